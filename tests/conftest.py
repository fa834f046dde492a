"""Hostile conditions for every test: eight simulated devices, warnings as errors, no silent rank promotion."""

import atexit
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

# Tests compile the same small programs again and again: each of them once a session is enough.
CACHE = tempfile.mkdtemp(prefix="jaxtrain-tests-")
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)
os.environ["JAX_COMPILATION_CACHE_DIR"] = CACHE
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["KERAS_BACKEND"] = "jax"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import pytest
from jax._src import compiler

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


# To compile, not to run: how a result is rounded is all that it may change. (Not without XLA's fusion emitters, which
# would halve it again: a gradient on eight devices is wrong then.)
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
QUICK_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in QUICK.items())


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "error",
        # Raised inside libraries, about their own use of other libraries: nothing here can mend them.
        "default::DeprecationWarning:(?!jaxtrain).*",
        "default::PendingDeprecationWarning:(?!jaxtrain).*",
    ):
        config.addinivalue_line("filterwarnings", line)


# What these say holds of any program: theirs are compiled quickly. A module is not among them where it compares bits of
# two programs, or those of its own with those of processes that it starts.
UNOPTIMISED = {
    *("augment", "benchmarks", "bring_your_own", "classification", "commands", "contract", "corrupt", "elastic"),
    *("evaluate", "extending", "initialisers", "language", "language_models", "mirror", "model", "models", "muon"),
    *("nonfinite", "optim", "own_steps", "predict", "regression", "report", "restart", "segmentation", "storage"),
    *("views", "watchdog"),
}


@pytest.fixture(autouse=True, scope="module")
def programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """How a module's are compiled. After it they are forgotten: XLA once aborted a process that kept them all."""
    jax.devices()  # there are eight now, whatever a test sets for the processes that it starts
    with pytest.MonkeyPatch.context() as patch:
        if request.module.__name__.removeprefix("test_") in UNOPTIMISED:
            patch.setattr(compiler, "get_compile_options", quickly)
        yield
    jax.clear_caches()


def quickly(*arguments: object, env_options_overrides: dict[str, object] | None = None, **options: object) -> object:
    """What JAX tells XLA, with QUICK: it has no public way to say this of all programs, eager operations among them."""
    return _told(*arguments, env_options_overrides={**(env_options_overrides or {}), **QUICK}, **options)


_told = compiler.get_compile_options


@pytest.fixture
def shared_tfds() -> pathlib.Path:
    """The folder of prepared TFDS data sets, or a skip that says how to give one."""
    folder = pathlib.Path(os.environ.get("TFDS_DATA_DIR", REPOSITORY.parent / "shared" / "tfds"))
    if not (folder / "cifar10").is_dir():
        pytest.skip(f"no prepared data sets at {folder}; set TFDS_DATA_DIR to a folder that holds cifar10")
    return folder


@pytest.fixture
def own_disks() -> list[str]:
    """The command that runs another one where it may mount what it likes."""
    command = ["unshare", "--map-root-user", "--mount"]
    probe = [*command, "mount", "-t", "tmpfs", "none", "/mnt"]
    if not shutil.which("unshare") or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("mounting a disk of one's own needs Linux with user namespaces (unshare --map-root-user --mount)")
    return command
