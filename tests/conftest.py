"""Hostile conditions for every test: eight simulated devices, warnings as errors, no silent rank promotion."""

import os
import pathlib

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "error",
        # Raised inside libraries, about their own use of other libraries: nothing here can mend them.
        "default::DeprecationWarning:(?!jaxtrain).*",
        "default::PendingDeprecationWarning:(?!jaxtrain).*",
    ):
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture
def shared_tfds() -> pathlib.Path:
    """The folder of prepared TFDS data sets, or a skip that says how to give one."""
    folder = pathlib.Path(os.environ.get("TFDS_DATA_DIR", REPOSITORY.parent / "shared" / "tfds"))
    if not (folder / "cifar10").is_dir():
        pytest.skip(f"no prepared data sets at {folder}; set TFDS_DATA_DIR to a folder that holds cifar10")
    return folder
