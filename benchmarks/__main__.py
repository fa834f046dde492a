"""python -m benchmarks [--save] [NAME …]: a table with the aims. Wants an idle machine. --save: into RESULTS.md too."""

import datetime
import importlib
import os
import platform
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
    print(f"{machine()}\n")
    rows = {name: list(importlib.import_module(f"benchmarks.{name}").measure()) for name in names}
    print(render(row for found in rows.values() for row in found))
    if "--save" in given:
        results.save({name: render(found) for name, found in rows.items()}, machine())
    return 0


def machine() -> str:
    """The date, and what the figures were measured with."""
    device = jax.devices()[0]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{datetime.date.today()}, {cores} cores of {_processor()}, {device.device_kind} ({device.platform}), "
        f"Python {platform.python_version()}, JAX {jax.__version__}"
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
