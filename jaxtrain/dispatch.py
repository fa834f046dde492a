"""How many steps are handed to the device at once: a fixed rule over the program and the platform, no stopwatch.

One step alone and the same step in a compiled loop round differently, loops of any length do not: so this is decided
once for a run. A loop saves what a dispatch costs, which only small steps notice.
"""

from typing import Any

from jaxtrain import flops

LOOP = 32  # steps a dispatch, at most: of steps as small as below, a fraction of a second
# Multiply-adds of a step on one device, up to which it is quicker in a loop.
CPU_STEP = 4_000_000  # 0.1 ms or so, of which half is dispatch
ACCELERATOR_STEP = 100_000_000_000  # half a millisecond of the fastest
# XLA's CPU code runs these ten times slower inside a loop, or loops in loops no faster.
SLOW_IN_A_CPU_LOOP = {"conv_general_dilated", "scan", "while", "reduce_window_max", "select_and_scatter_add"}


def steps_per_dispatch(program: Any, platform: str, devices: int) -> int:
    """Of a train step, given as its jaxpr for the global batch: 1 is a program of its own, more a loop of so many."""
    work = flops.in_jaxpr(program) / devices
    if platform != "cpu":
        return LOOP if work <= ACCELERATOR_STEP else 1
    slow = bool(flops.primitives(program) & SLOW_IN_A_CPU_LOOP)
    return LOOP if work <= CPU_STEP and not slow else 1
