"""The first steps of a run in one precision after the other: loss, speed and memory side by side.

python -m jaxtrain.compare_precision --config=configs/vit.py --steps=200
"""

import argparse
import dataclasses
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxtrain import commandline
from jaxtrain import config as configs
from jaxtrain import main as entry
from jaxtrain.config import lookup
from jaxtrain.errors import UserError

if TYPE_CHECKING:
    from jaxtrain.job import Job

REFERENCE = "float32"
USUAL = {"gpu": ("tensorfloat32", "bfloat16", "float16"), "tpu": ("bfloat16",), "cpu": ("bfloat16", "float16")}
EPILOG = """\
Each precision runs in a process of its own, on the same examples with the same random keys. Nothing is written. By
default float32 comes first, then what the platform has: on GPUs tensorfloat32, bfloat16 and float16, on TPUs bfloat16,
on CPUs bfloat16 and float16 (which tells of the loss there, not of the speed elsewhere).

exit codes: 0 done; 2 a mistake, told in one line
"""


@dataclasses.dataclass(frozen=True)
class Measured:
    """What some steps in one precision came to."""

    precision: str
    platform: str
    batch_size: int
    losses: list[float]  # of each step; NaN where the update was left out, as float16 does while it looks for its scale
    step_seconds: float  # the median, from the batch on the device to the new state
    compile_seconds: float
    memory: int  # bytes
    of_device: bool  # `memory` is the device's own peak; else what the compiled step says that it needs

    @property
    def end(self) -> float:
        """The mean loss of the last tenth of the steps."""
        last = [loss for loss in self.losses[-max(1, len(self.losses) // 10) :] if math.isfinite(loss)]
        return statistics.fmean(last) if last else math.nan


def measure(job: "Job", steps: int) -> Measured:
    """Runs the first `steps` steps of a job, each waited for. Raises UserError where there is no loss to compare."""
    import jax

    from jaxtrain import metrics, precision
    from jaxtrain.initialise import initialised
    from jaxtrain.machine import compiling

    if "loss" not in job.outcome:
        raise UserError(
            f"step {job.step_name} reports no `loss` to compare; it reports {', '.join(sorted(job.outcome))}"
        )
    with precision.scope(job.policy), job.batches(0, steps) as batches:
        state = job.initial()
        if job.config.init_from:
            state = initialised(job, state, lambda line: None)
        where = jax.tree.map(lambda leaf: leaf.sharding, job.abstract)
        began = time.perf_counter()
        options = compiling.options(job.mesh)
        jitted = jax.jit(job.steps.train, donate_argnums=0, out_shardings=(where, None), compiler_options=options)
        program = jitted.lower(job.abstract, job.abstract_batch).compile()
        compiled = time.perf_counter() - began
        losses, seconds = [], []
        for batch in batches:
            jax.block_until_ready((state, batch))
            began = time.perf_counter()
            state, found = program(state, batch)
            jax.block_until_ready((state, found))
            seconds.append(time.perf_counter() - began)
            losses.append(metrics.compute(metrics.as_monoids({"loss": found["loss"]}))["loss"])
    device = job.mesh.devices.flat[0]
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    return Measured(
        precision=job.policy.name,
        platform=device.platform,
        batch_size=job.config.batch_size,
        losses=losses,
        step_seconds=statistics.median(seconds[1:] or seconds),  # the first one may wait for what is made once
        compile_seconds=compiled,
        memory=peak or _needed(program.memory_analysis()),
        of_device=bool(peak),
    )


def _needed(analysis: Any) -> int:
    """Bytes of arguments, results and what is between, on one device; a result in an argument's place counts once."""
    parts = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes")
    return sum(getattr(analysis, part, 0) for part in parts) - getattr(analysis, "alias_size_in_bytes", 0)


def table(rows: Sequence[Measured]) -> str:
    """A line for each precision, and what the figures mean."""
    steps = len(rows[0].losses)
    shown = sorted({1, steps // 4, steps // 2, 3 * steps // 4} - {0})
    reference = next((row for row in rows if row.precision == REFERENCE), None)
    last = max(1, steps // 10)
    titles = ["precision", *(f"loss at {step}" for step in shown), f"last {last}", f"to {REFERENCE}"]
    lines = [[*titles, "ms/step", "speed", "compile s", "memory MB"]]
    for row in rows:
        apart = (row.end - reference.end) / abs(reference.end) if reference and reference.end else math.nan
        speed = reference.step_seconds / row.step_seconds if reference else math.nan
        losses = [f"{row.losses[step - 1]:.4f}" for step in shown]
        figures = [f"{1e3 * row.step_seconds:.2f}", f"{speed:.2f}×", f"{row.compile_seconds:.1f}"]
        lines.append([row.precision, *losses, f"{row.end:.4f}", f"{apart:+.2%}", *figures, f"{row.memory / 1e6:.1f}"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shape = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]
    return "\n".join([*shape, "", *_notes(rows, last)])


def _notes(rows: Sequence[Measured], last: int) -> list[str]:
    first = rows[0]
    analysed = f"what the compiled step needs by its own analysis; a {first.platform} device does not tell its peak"
    notes = [
        f"{len(first.losses):,} steps of {first.batch_size:,} examples on {first.platform}",
        f"last {last}: the mean over so many steps; ms/step: the median, without data and compilation",
        f"memory: {'the peak of the device' if first.of_device else analysed}",
    ]
    for row in rows:
        if left_out := sum(not math.isfinite(loss) for loss in row.losses):
            notes.append(f"{row.precision}: {left_out:,} of the updates not finite and left out (nan)")
    return notes


def run(argv: Sequence[str]) -> int:
    """The command. Returns the exit code; raises what is a mistake."""
    flags, changes = commandline.parse(argv, _parser())
    if flags.steps < 1:
        raise UserError(f"--steps={flags.steps}, expected 1 or more")
    if any(change.startswith("precision=") for change in changes):
        raise UserError("--config.precision says one precision; name those to compare: --precisions=float32,bfloat16")
    config = configs.load(flags.config, changes)
    wanted = _named(flags.precisions)
    found = [_here(config, wanted[0], flags.steps)] if len(wanted) == 1 else _each_alone(argv, wanted)
    print(json.dumps([dataclasses.asdict(row) for row in found]) if flags.json else table(found))
    return 0


def _named(text: str) -> list[str]:
    """The precisions asked for; none: those of the platform."""
    from jaxtrain.precision import NAMES

    known = [name for name in NAMES if name != "auto"]
    wanted = list(dict.fromkeys(text.split(","))) if text else []
    if strange := [name for name in wanted if name not in known]:
        raise UserError(f"--precisions: {strange[0]!r} is unknown.{lookup.choices_hint(strange[0], known)}")
    return wanted


def _here(config: configs.Config, name: str, steps: int) -> Measured:
    from jaxtrain.job import build
    from jaxtrain.machine import devices

    config.precision, config.compile_cache = name, ""  # a warm cache would tell nothing of the time to compile
    devices.prepare(config, say=_say)
    job = build(config)
    job.rehearse()
    return measure(job, min(steps, job.total_steps))


def _each_alone(argv: Sequence[str], wanted: Sequence[str]) -> list[Measured]:
    """Each in a process of its own: a device tells its peak since the process began, and some precisions reset JAX."""
    found = [_child(argv, (wanted or [REFERENCE])[0])]
    for name in wanted[1:] if wanted else USUAL.get(found[0].platform, USUAL["cpu"]):
        found.append(_child(argv, name))
    return found


def _child(argv: Sequence[str], name: str) -> Measured:
    _say(f"{name} …")
    command = [sys.executable, "-m", "jaxtrain.compare_precision", *argv, f"--precisions={name}", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:  # it has said why
        raise SystemExit(done.returncode if done.returncode > 0 else 128 - done.returncode)
    (row,) = json.loads(done.stdout.splitlines()[-1])
    return Measured(**row)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = commandline.Parser(
        prog="python -m jaxtrain.compare_precision",
        description="The first steps of a run in one precision after the other: loss, speed and memory side by side.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", metavar="FILE[:ARGS]", help="as of jaxtrain.main, with the same --config.KEY=VALUE")
    add("--steps", type=int, default=200, help="of each run, at most config.total (200)")
    add("--precisions", metavar="NAME,…", default="", help="those to compare; by default what the platform has")
    add("--json", action="store_true", help="print the measurements, each loss among them, as JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line. Returns the exit code."""
    return entry.guarded(run, argv)


if __name__ == "__main__":
    sys.exit(main())
