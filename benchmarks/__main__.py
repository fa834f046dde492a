"""python -m benchmarks [loop] [startup] [data] [checkpoint]: a table with the aims. Wants an idle machine."""

import datetime
import importlib
import os
import platform
import sys

import jax

from benchmarks.table import render

NAMES = ("loop", "startup", "data", "checkpoint")


def main() -> int:
    names = sys.argv[1:] or list(NAMES)
    if unknown := [name for name in names if name not in NAMES]:
        print(f"benchmarks: unknown: {', '.join(unknown)}; known: {', '.join(NAMES)}", file=sys.stderr)
        return 2
    device = jax.devices()[0]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(
        f"{datetime.date.today()}, {cores} cores, {device.device_kind} ({device.platform}), "
        f"Python {platform.python_version()}, JAX {jax.__version__}\n"
    )
    rows = [row for name in names for row in importlib.import_module(f"benchmarks.{name}").measure()]
    print(render(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
