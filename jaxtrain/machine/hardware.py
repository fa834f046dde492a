"""What the machine has, asked of the operating system and the driver: JAX is neither imported nor started.

`root` stands for "/" so that tests can build a machine out of folders.
"""

import dataclasses
import math
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

_GOOGLE = "0x1ae0"  # PCI vendor
_TPU_CHIPS = {"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"}  # v2 to v7
_SMI_SECONDS = 30  # a driver that is waking up takes its time; a hung one must not hold the run


@dataclasses.dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU: its number and name as `nvidia-smi` shows them, and the processes that compute on it."""

    number: int
    uuid: str
    name: str
    users: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"GPU {self.number} ({self.name})"


def gpus() -> list[Gpu]:
    """The NVIDIA GPUs in the driver's order, with the other processes that use them; [] without a driver."""
    users: dict[str, list[str]] = {}
    for uuid, pid, program in _smi("--query-compute-apps=gpu_uuid,pid,process_name", 3):
        if pid != str(os.getpid()):
            users.setdefault(uuid, []).append(f"{Path(program).name or 'a process'} (pid {pid})")
    found = [
        Gpu(int(number), uuid, name, tuple(users.get(uuid, ())))
        for number, uuid, name in _smi("--query-gpu=index,uuid,name", 3)
        if number.isdigit()
    ]
    return sorted(found, key=lambda gpu: gpu.number)


def accelerator(root: str | Path = "/") -> str:
    """The kind of accelerator that the machine shows to this process: "gpu", "tpu" or ""."""
    root = Path(root)
    # A driver's folder alone may be the host's, seen from a container that was given no GPU.
    nvidia = any(root.glob("proc/driver/nvidia/gpus/*")) and any(root.glob("dev/nvidia[0-9]*"))
    if nvidia or any(True for _ in _smi("--query-gpu=index", 1)):
        return "gpu"
    if any(root.glob("dev/accel[0-9]*")) or any(map(_is_tpu, root.glob("sys/bus/pci/devices/*"))):
        return "tpu"
    return ""


def cpu_count(root: str | Path = "/") -> int:
    """CPUs that this process may keep busy: its affinity, and the quota of its control groups (v1 and v2)."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min(allowed, _quota(Path(root)))))


def memory(root: str | Path = "/") -> int:
    """Bytes of main memory that this process may use: the machine's, or what its control groups grant; 0: unknown."""
    lines = _read(Path(root) / "proc/meminfo").splitlines()
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemTotal:")]
    for group in _groups(Path(root), "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            found += [int(text) for text in [_read(group / name)] if text.isdigit()]
    return min(found, default=0)


def cpu_key(root: str | Path = "/") -> str:
    """A text that is equal on machines that can run each other's compiled programs."""
    try:
        lines = (Path(root) / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.partition("\t")[0] in ("flags", "Features")), "")


def _smi(query: str, columns: int) -> list[list[str]]:
    program = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path="/usr/lib/wsl/lib")
    if program is None:
        return []
    try:
        answer = subprocess.run(
            [program, query, "--format=csv,noheader"], capture_output=True, text=True, timeout=_SMI_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if answer.returncode:
        return []
    rows = [[cell.strip() for cell in line.split(",", columns - 1)] for line in answer.stdout.splitlines()]
    return [row for row in rows if len(row) == columns and row[0]]


def _is_tpu(device: Path) -> bool:
    return _read(device / "vendor") == _GOOGLE and _read(device / "device") in _TPU_CHIPS


def _quota(root: Path) -> float:
    """CPUs that the control groups grant."""
    return min([math.inf, *map(_granted, _groups(root, "cpu"))])


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control groups (v1 and v2), from its own up to the root."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mounts = [f"sys/fs/cgroup/{each}" for each in (controllers, controller)] if controllers else ["sys/fs/cgroup"]
        inside = Path(path.strip("/"))
        yield from (root / mount / group for mount in mounts for group in (inside, *inside.parents))


def _granted(group: Path) -> float:
    quota, _, period = _read(group / "cpu.max").partition(" ")
    if not quota:
        quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
    try:
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (ValueError, ZeroDivisionError):  # "max", or no such file
        return math.inf


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
