"""Devices: what is set before JAX starts, what is refused, and machines made of folders and scripts."""

import os
import pathlib
import stat
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxtrain.config import base_config
from jaxtrain.errors import UserError
from jaxtrain.machine import devices, hardware

VARIABLES = ("XLA_FLAGS", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", *devices.MEMORY, "JAX_COMPILATION_CACHE_DIR")
CACHE = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)
SMI = """#!/bin/sh
touch {marker}
case "$1" in
  --query-gpu=*) cat <<END
{gpus}
END
  ;;
  --query-compute-apps=*) cat <<END
{users}
END
  ;;
esac
"""


def sample(**changes):
    config = base_config()
    for key, value in ({"compile_cache": ""} | changes).items():
        config[key] = value
    return config


def refusal(function, *args, **kwargs) -> str:
    with pytest.raises(UserError) as caught:
        function(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Installs a fake nvidia-smi: `count` GPUs, those of `busy` in use. Returns a file that marks a call."""
    marker = tmp_path / "asked"

    def install(count: int, busy: tuple[int, ...] = ()) -> pathlib.Path:
        folder = tmp_path / "bin"
        folder.mkdir()
        gpus = "\n".join(f"{number}, GPU-{number}{number}, NVIDIA H200" for number in range(count))
        users = "\n".join(f"GPU-{number}{number}, {4000 + number}, /usr/bin/python" for number in busy)
        script = folder / "nvidia-smi"
        script.write_text(SMI.format(marker=marker, gpus=gpus, users=users))
        script.chmod(script.stat().st_mode | stat.S_IEXEC)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return marker

    return install


@pytest.fixture
def fresh(monkeypatch):
    """A process in which JAX has not started and no variable is set."""
    jax.devices()  # the tests' own, with the flags they need
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that what `prepare` sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setattr(devices, "_started", lambda: False)
    before = {name: getattr(jax.config, name) for name in ("jax_platforms", *CACHE)}
    jax.config.update("jax_platforms", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.parametrize(
    ("wanted", "count", "busy", "visible"),
    [
        ("all", 2, (), None),
        (2, 2, (), None),
        (1, 4, (), "0"),
        (2, 4, (0, 2), "1,3"),
        ((2,), 4, (), "2"),
        ((3, 1), 4, (), "3,1"),
        ((0,), 2, (0, 1), "0"),  # listed: taken although it is in use
        ("all", 0, (), None),
        (3, 0, (), None),  # no GPU here: a matter for `select`
    ],
)
def test_gpus_are_chosen_before_jax_starts(fresh, driver, wanted, count, busy, visible):
    driver(count, busy)
    devices.prepare(sample(devices=wanted))
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible
    assert os.environ.get("CUDA_DEVICE_ORDER") == (None if visible is None else "PCI_BUS_ID")


@pytest.mark.parametrize(
    ("wanted", "count", "busy", "expected"),
    [
        ("all", 2, (1,), ["GPU 1 (NVIDIA H200) is in use by python (pid 4001)", "devices=1", "devices=0,1"]),
        ("all", 1, (0,), ["GPU 0", "python (pid 4000)", "devices=0"]),
        (2, 2, (1,), ["config.devices is 2", "1 of 2 GPUs are free", "GPU 1", "pid 4001"]),
        (3, 2, (), ["config.devices is 3", "2 of 2 GPUs are free"]),
        ((0, 5), 2, (), ["config.devices lists 5", "0, 1"]),
    ],
)
def test_gpus_in_use_or_missing_are_named_and_refused(fresh, driver, wanted, count, busy, expected):
    driver(count, busy)
    line = refusal(devices.prepare, sample(devices=wanted))
    assert [text for text in expected if text not in line] == [], line
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_this_process_does_not_count_as_another(fresh, driver, monkeypatch):
    driver(1, (0,))
    monkeypatch.setattr(os, "getpid", lambda: 4000)
    devices.prepare(sample())
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


@pytest.mark.parametrize("visible", ["1", "GPU-11", ""])
def test_what_the_user_made_visible_stays(fresh, driver, monkeypatch, visible):
    marker = driver(2, (0, 1))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    devices.prepare(sample(devices=1))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible
    assert not marker.exists()


def test_the_driver_is_not_asked_when_the_cpu_is_meant(fresh, driver):
    marker = driver(2, (0, 1))
    devices.prepare(sample(platform="cpu"))
    assert not marker.exists()
    assert jax.config.jax_platforms == "cpu"


@pytest.mark.parametrize(
    ("preset", "share", "expected", "notes"),
    [
        ({}, 0.5, {devices.MEMORY[0]: "0.5"}, 0),
        ({}, 0.0, {}, 0),
        ({devices.MEMORY[1]: "0.3"}, 0.5, {devices.MEMORY[1]: "0.3"}, 1),
        ({devices.MEMORY[0]: "0.3"}, 0.0, {devices.MEMORY[0]: "0.3"}, 0),
        ({devices.MEMORY[0]: "0.5"}, 0.5, {devices.MEMORY[0]: "0.5"}, 0),
    ],
)
def test_the_share_of_memory_is_set_unless_the_user_has(fresh, monkeypatch, preset, share, expected, notes):
    for name, value in preset.items():
        monkeypatch.setenv(name, value)
    said: list[str] = []
    devices.prepare(sample(device_memory=share), say=said.append)
    assert {name: os.environ[name] for name in devices.MEMORY if name in os.environ} == expected
    assert len(said) == notes


@pytest.mark.parametrize(
    ("gpus", "preset", "expected"),
    [
        (0, "", ""),  # a CPU is exact as it is
        (2, "", " ".join(devices.DETERMINISTIC)),
        (2, "--xla_dump_to=/x", "--xla_dump_to=/x " + " ".join(devices.DETERMINISTIC)),
        (2, " ".join(devices.DETERMINISTIC), " ".join(devices.DETERMINISTIC)),
        (2, "--xla_gpu_deterministic_ops=false", "needs --xla_gpu_deterministic_ops=true, but XLA_FLAGS says"),
    ],
)
def test_determinism_is_asked_of_xla_where_there_are_gpus(fresh, monkeypatch, driver, gpus, preset, expected):
    """Report 45's kind: what the user set stays; what contradicts the config is refused."""
    if gpus:
        driver(gpus)
    jax.config.update("jax_platforms", "")
    if preset:
        monkeypatch.setenv("XLA_FLAGS", preset)
    if "needs" in expected:
        assert expected in refusal(devices.prepare, sample(deterministic=True))
        return
    devices.prepare(sample(deterministic=True))
    assert os.environ.get("XLA_FLAGS", "") == expected


def test_xla_knows_the_flags_of_determinism():
    """An unknown flag ends the process, on any platform."""
    environment = os.environ | {"XLA_FLAGS": " ".join(devices.DETERMINISTIC), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    assert subprocess.run(command, env=environment, capture_output=True).returncode == 0


@pytest.mark.parametrize("platforms", ["cpu", "tpu,cpu"])
def test_a_platform_that_the_environment_hides_is_refused(fresh, monkeypatch, platforms):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    jax.config.update("jax_platforms", platforms)
    assert f"JAX_PLATFORMS={platforms} hides it" in refusal(devices.prepare, sample(platform="gpu"))


@pytest.mark.parametrize(
    ("changes", "kind", "expected"),
    [
        (dict(platform="gpu"), "cpu", ["JAX has started on cpu", "JAX_PLATFORMS=cuda"]),
        (dict(platform="cpu"), "gpu", ["JAX has started on gpu", "JAX_PLATFORMS=cpu"]),
        (dict(device_memory=0.5), "gpu", ["JAX has started", "XLA_CLIENT_MEM_FRACTION=0.5"]),
        (dict(deterministic=True), "gpu", ["JAX has started", "XLA_FLAGS='--xla_gpu_deterministic_ops=true"]),
    ],
)
def test_what_comes_too_late_is_refused_with_the_line_to_run(fresh, monkeypatch, changes, kind, expected):
    monkeypatch.setattr(devices, "_started", lambda: True)
    monkeypatch.setattr(jax, "default_backend", lambda: kind)
    line = refusal(devices.prepare, sample(**changes))
    assert [text for text in expected if text not in line] == [], line


def test_a_process_that_has_started_runs_on(fresh, monkeypatch, driver):
    marker = driver(2, (0, 1))
    monkeypatch.setattr(devices, "_started", lambda: True)
    devices.prepare(sample(platform="cpu", device_memory=0.5, devices=2))
    assert not marker.exists()


@pytest.mark.parametrize(
    ("wanted", "ids"),
    [("all", list(range(8))), (1, [0]), (8, list(range(8))), (3, [0, 1, 2]), ((5,), [5]), ((6, 2), [6, 2])],
)
def test_devices_are_selected(tmp_path, wanted, ids):
    assert [device.id for device in devices.select(sample(devices=wanted), root=tmp_path)] == ids


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(devices=9), ["config.devices is 9", "8 (cpu)"]),
        (dict(devices=(0, 8)), ["config.devices lists 8", "0, 1, 2"]),
        (dict(platform="gpu"), ["config.platform is 'gpu'", "JAX runs on cpu"]),
        (dict(platform="tpu"), ["config.platform is 'tpu'", "JAX runs on cpu"]),
    ],
)
def test_a_device_or_platform_that_is_not_there_is_refused(tmp_path, changes, expected):
    line = refusal(devices.select, sample(**changes), root=tmp_path)
    assert [text for text in expected if text not in line] == [], line


def gpu_machine(root: pathlib.Path) -> None:
    (root / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    (root / "dev").mkdir()
    (root / "dev/nvidia0").touch()


def pci(root: pathlib.Path, vendor: str, device: str) -> None:
    folder = root / "sys/bus/pci/devices/0000:00:04.0"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "device").write_text(f"{device}\n")


def accelerator_node(root: pathlib.Path) -> None:
    (root / "dev").mkdir()
    (root / "dev/accel0").touch()


MACHINES = [
    (lambda root: None, ""),
    (gpu_machine, "gpu"),
    (
        lambda root: (root / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True),
        "",
    ),  # a container's host
    (accelerator_node, "tpu"),
    (lambda root: pci(root, "0x1ae0", "0x0063"), "tpu"),
    (lambda root: pci(root, "0x1ae0", "0x0042"), ""),  # Google's network card
    (lambda root: pci(root, "0x8086", "0x0063"), ""),
]


@pytest.mark.parametrize(("build", "kind"), MACHINES)
def test_the_machine_shows_its_accelerator(tmp_path, build, kind):
    build(tmp_path)
    assert hardware.accelerator(tmp_path) == kind


@pytest.mark.parametrize(("build", "extra"), [(gpu_machine, "jax[cuda12]"), (accelerator_node, "jax[tpu]")])
def test_an_accelerator_that_jax_does_not_see_stops_the_run_with_the_remedy(fresh, tmp_path, monkeypatch, build, extra):
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)  # no plugin is installed
    build(tmp_path)
    line = refusal(devices.select, sample(), root=tmp_path)
    expected = [f"pip install -U '{extra}=={jax.__version__}'", "--config.platform=cpu"]
    assert [text for text in expected if text not in line] == [], line
    assert devices.select(sample(platform="cpu"), root=tmp_path) == jax.devices()
    jax.config.update("jax_platforms", "cpu")  # what JAX_PLATFORMS=cpu does: also meant
    assert devices.select(sample(), root=tmp_path) == jax.devices()


def test_a_driver_that_fails_shows_no_gpu(tmp_path, monkeypatch):
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert hardware.gpus() == []
    assert hardware.accelerator(tmp_path) == ""


@pytest.mark.parametrize(
    ("visible", "numbers"), [(None, [0, 1]), ("4,5", [4, 5]), ("GPU-33,GPU-11", [3, 1]), ("1,3,5", [0, 1])]
)
def test_gpus_keep_the_drivers_numbers(fresh, driver, monkeypatch, visible, numbers):
    driver(6)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = [types.SimpleNamespace(platform="gpu", id=place) for place in range(2)]
    assert devices._numbers(found) == numbers
    assert devices._chosen((numbers[1],), found) == [found[1]]


def write(root: pathlib.Path, files: dict[str, str]) -> pathlib.Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/cpu,cpuacct"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 16),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "max 100000\n"}, 16),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "400000 100000\n"}, 4),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "150000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "6400000 100000\n"}, 16),
        ({"proc/self/cgroup": "0::/a/b\n", f"{V2}/a/cpu.max": "300000 100000\n"}, 3),  # a parent's counts too
        ({"proc/self/cgroup": "0::/seen/from/outside\n", f"{V2}/cpu.max": "200000 100000\n"}, 2),
        (
            {
                "proc/self/cgroup": "9:memory:/x\n3:cpu,cpuacct:/job\n",
                f"{V1}/job/cpu.cfs_quota_us": "500000\n",
                f"{V1}/job/cpu.cfs_period_us": "100000\n",
            },
            5,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            16,
        ),
        ({"proc/self/cgroup": "1:cpuset:/\n", f"{V2}/cpuset/cpu.max": "100000 100000\n"}, 16),
    ],
)
def test_the_cpu_count_follows_affinity_and_control_groups(tmp_path, monkeypatch, files, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    assert devices.cpu_count(write(tmp_path, files)) == expected


def test_the_cpu_count_here_is_within_the_affinity():
    assert 1 <= devices.cpu_count() <= len(os.sched_getaffinity(0))


def test_small_programs_are_kept_in_the_users_cache(fresh, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said: list[str] = []
    devices.prepare(sample(compile_cache="auto"), say=said.append)
    jax.jit(lambda x: x * 3 + 1)(jnp.float32(2)).block_until_ready()
    folders = list((tmp_path / "jaxtrain" / "xla").iterdir())
    assert len(folders) == 1
    assert any(folders[0].iterdir())
    assert said == []


def test_a_cache_folder_can_be_named_preset_or_left_out(fresh, tmp_path, monkeypatch):
    devices.prepare(sample(compile_cache=str(tmp_path / "mine")))
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/somewhere/else")
    devices.prepare(sample(compile_cache="auto"))
    assert jax.config.jax_compilation_cache_dir == "/somewhere/else"
    devices.prepare(sample(compile_cache=""))
    assert jax.config.jax_compilation_cache_dir is None


def test_a_cache_that_cannot_be_written_is_told_and_done_without(fresh, tmp_path):
    (tmp_path / "file").touch()
    said: list[str] = []
    devices.prepare(sample(compile_cache=str(tmp_path / "file" / "cache")), say=said.append)
    assert jax.config.jax_compilation_cache_dir is None
    assert len(said) == 1
    assert "no compile cache" in said[0]
    assert "\n" not in said[0]


def test_a_new_process_is_quiet_and_stops_for_a_gpu_that_jax_does_not_see(driver):
    driver(1)
    program = (
        "from jaxtrain.machine import devices\nfrom jaxtrain.config import base_config\n"
        "from jaxtrain.errors import UserError\n"
        "config = base_config(); config.compile_cache = ''; devices.prepare(config)\n"
        "try:\n    devices.select(config)\n"
        "except UserError as error:\n    print(error)\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "CUDA_", "TF_"))}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.stderr == ""
    assert done.returncode == 0
    assert done.stdout.count("\n") == 1
    assert "this machine has a GPU that JAX does not see" in done.stdout
