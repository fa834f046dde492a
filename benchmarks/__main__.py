"""python -m benchmarks [--save] [NAME …]: tables with the aims. Wants an idle machine. --save: into RESULTS.md too."""

import datetime
import importlib
import os
import platform
import subprocess
import sys

import jax

from benchmarks import results
from benchmarks.table import render

NAMES = (
    "loop",
    "dispatch",
    "frameworks",
    "memory",
    "startup",
    "data",
    "streaming",
    "checkpoint",
    "models",
    "compiling",
    "replicas",
)


def main() -> int:
    given = sys.argv[1:]
    names = [name for name in given if name != "--save"] or list(NAMES)
    if unknown := [name for name in names if name not in NAMES]:
        print(f"benchmarks: unknown: {', '.join(unknown)}; known: {', '.join(NAMES)}", file=sys.stderr)
        return 2
    if len(names) > 1:  # each in a process of its own: what one leaves behind slowed another five times
        commands = [
            [sys.executable, "-m", "benchmarks", *(["--save"] if "--save" in given else []), name] for name in names
        ]
        return max(subprocess.run(command).returncode for command in commands)
    where = machine()
    rows = list(importlib.import_module(f"benchmarks.{names[0]}").measure())
    print(f"{names[0]}: {where}\n\n{render(rows)}\n", flush=True)
    if "--save" in given:
        results.save({names[0]: render(rows)}, where)
    return 0


def machine() -> str:
    """The date, what the figures are measured with, and how busy that was before."""
    device = jax.devices()[0]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    accelerator = "no accelerator" if device.platform == "cpu" else f"{jax.device_count()} × {device.device_kind}"
    load = f", load {os.getloadavg()[0]:.1f} before" if hasattr(os, "getloadavg") else ""
    return (
        f"{datetime.date.today()}, {cores} cores of {_processor()}, {accelerator}, Python {platform.python_version()}, "
        f"JAX {jax.__version__}{load}"
    )


def _processor() -> str:
    """As Linux calls it; elsewhere the architecture."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


if __name__ == "__main__":
    sys.exit(main())
