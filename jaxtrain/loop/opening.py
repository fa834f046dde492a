"""What a run writes to, and how often: its lines, its states, and the stacks of one that hangs."""

import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import jax

from jaxtrain.job import Job
from jaxtrain.loop.due import Due
from jaxtrain.machine import distributed
from jaxtrain.reporting.curves import in_notebook
from jaxtrain.reporting.report import Report
from jaxtrain.storage.checkpoint import Checkpoints


def open_report(job: Job, folder: Path | None) -> Report:
    """Where the run's lines go: of several processes, process 0 writes and tells."""
    config, tells = job.config, distributed.is_first()
    return Report(
        folder if tells else None,
        total_steps=job.total_steps,
        steps_per_epoch=float(job.steps_per_epoch),
        batch_size=job.rows,
        terminal=config.terminal if tells else "quiet",
        tensorboard=config.tensorboard,
        live_curves=tells and config.terminal == "auto" and in_notebook(),
        best=config.best,
        synthetic=job.dataset.synthetic,
        members=job.together.names if job.together else (),
    )


def hang_file(folder: Path | None) -> Path | None:
    """Where the stacks of this process go if it hangs: of several, each has its own."""
    name = f"hang-{jax.process_index()}.txt" if jax.process_count() > 1 else "hang.txt"
    return folder / name if folder else None


def open_checkpoints(job: Job, folder: Path, report: Report, committed: Callable[[], None]) -> Checkpoints:
    """Where the run's states go: the last `keep`, the best, and every `keep_every`-th for good.

    And the last of those that a rollback may go back to. `committed` is called after each save, in the background.
    """
    config = job.config.checkpoint

    def due(every: str) -> Callable[[int], bool] | None:
        times = Due({"": job.steps_in(every)}, sys.maxsize) if every else None
        return (lambda step: step == 0 or bool(times.at(step))) if times else None

    anchor = due(config.every) if job.config.on_nonfinite == "rollback" else None
    return Checkpoints(
        folder / "checkpoints",
        keep=config.keep,
        keep_every=due(config.keep_every),
        anchor=anchor,
        committed=committed,
        say=report.warn,
    )


def intervals(job: Job) -> dict[str, Fraction]:
    """Name → interval in steps of all that happens again and again."""
    config = job.config
    wanted = {"report": config.report_every, "checkpoint": config.checkpoint.every}
    every = {name: job.steps_in(text) for name, text in wanted.items() if text}
    evaluations = {name: found.every for name, found in job.evaluations.items() if found.every is not None}
    return every | evaluations
