"""A run, read from top to bottom: build, restore, loop, finish.

    state[s + 1], metrics[s + 1] = step(state[s], batch[s])
    batch[s]                     = data(seed, s + offset)

What happens in between, and when, is in `jaxtrain.loop.loop`; the step itself in `jaxtrain.step`.
"""

import contextlib
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from jaxtrain import config as configs
from jaxtrain import contract, exits, precision
from jaxtrain.describe import facts
from jaxtrain.errors import HangError, UserError
from jaxtrain.initialise import initialised
from jaxtrain.job import Job, build
from jaxtrain.loop import agreement
from jaxtrain.loop.advance import abstract_sums, zero_sums
from jaxtrain.loop.agreement import Wishes
from jaxtrain.loop.judge import best_line, last_values
from jaxtrain.loop.loop import Loop, restore, tell_left_out
from jaxtrain.loop.opening import hang_file, open_checkpoints, open_report
from jaxtrain.loop.stopping import Stopped, Stopper, nothing
from jaxtrain.loop.watchdog import Watchdog
from jaxtrain.machine import devices, distributed
from jaxtrain.machine.peers import Ending
from jaxtrain.reporting.report import Report
from jaxtrain.result import Result
from jaxtrain.storage import restart
from jaxtrain.storage import workdir as workdirs
from jaxtrain.storage.checkpoint import Checkpoints
from jaxtrain.storage.lease import Lease
from jaxtrain.storage.mirror import local_workdir


def run(
    config: ConfigDict,
    workdir: str | Path | None = None,
    *,
    mode: str = "train",
    profile: tuple[int, int] | None = None,
    debug: bool = False,
    state: Any = None,
    **objects: Any,
) -> Result:
    """Trains (or, with mode="eval", evaluates a workdir) and returns what came out.

    Without a workdir nothing is written. With one, a folder or a URL ("gs://…"), running the same config again resumes
    it, bit by bit. `state` carries on from a state in memory, for example an earlier `Result.state`. `objects` (model,
    task, data, step) stand in for the config's parts, see `jaxtrain.job.build`. A signal (Ctrl-C, SIGTERM, a notebook's
    Stop) ends the run after the step, saved; the result then says so. Where code that is not ours holds that up, or the
    run hangs, it ends the process (not a notebook's). Raises UserError for a mistake, before anything is written;
    NonFiniteError and StorageError for what can happen later; HangError where another process of the run is lost.
    """
    config = configs.checked(config)
    distributed.join(config)
    with distributed.one_end() as ending:
        return _run(config, workdir, mode, profile, debug, state, objects, ending)


def _run(
    config: ConfigDict,
    workdir: str | Path | None,
    mode: str,
    profile: tuple[int, int] | None,
    debug: bool,
    state: Any,
    objects: dict[str, Any],
    ending: Ending,
) -> Result:
    """The run of this process, alone or one of several."""
    devices.prepare(config, say=distributed.say)
    if profile and workdir is None:
        raise UserError("a profile is written into the workdir, and this run has none; give one")
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(Stopper())
        folder, committed = stack.enter_context(local_workdir(workdir, exits.say))
        old = workdirs.read(folder) if folder else None
        resumed, notes = restart.continued(config, folder, old, mode, objects)
        job = build(resumed, **objects)
        job.rehearse()
        agreement.begin(job, folder)
        refuse_rollback_to_nowhere(job, folder)
        stack.enter_context(precision.scope(job.policy))
        watchdog = stack.enter_context(Watchdog(config.hang_minutes))
        if mode == "eval":
            return evaluate(job, folder, stop, watchdog)
        lease = stack.enter_context(Lease(folder, notes.append)) if folder and jax.process_index() == 0 else None
        old = workdirs.read(folder) if folder else None  # again: another run may have come and gone in the meantime
        restart.continued(config, folder, old, mode, objects)
        report = stack.enter_context(open_report(job, folder))
        stop.say = report.say if distributed.is_first() else exits.say
        ending.last = [report.close]
        if lease:
            report.may_write = lease.check
            ending.last.append(lease.release)
        stop.last = [*ending.last, lambda: ending.end_others(stop.exit_code, f"ended{stop.why()}")]
        watchdog.last = [*ending.last, lambda: ending.end_others(HangError.exit_code, "it hangs")]
        watchdog.file = hang_file(folder)
        report.header(facts(job, folder, notes))
        checkpoints = stack.enter_context(open_checkpoints(job, folder, report, committed)) if folder else None
        state, sums = start(job, checkpoints, report, state, old)
        report.history[:] = distributed.from_first(report.history)
        changes = restart.record(job, config, folder, objects) if folder and distributed.is_first() else ()
        if changes:
            report.warn(f"{'; '.join(changes)}: this run continues, it does not reproduce")
        if folder:
            workdirs.refuse_unshared(folder)
        loop = Loop(job, report, checkpoints, stop, watchdog, state, sums, folder=folder, profile=profile, debug=debug)
        stack.enter_context(loop.agreed)
        loop.run()
        return finish(loop, folder)


def start(
    job: Job, checkpoints: Checkpoints | None, report: Report, state: Any, old: workdirs.Record | None
) -> tuple[Any, Any]:
    """The state to begin with, and the sums of a report interval that a checkpoint cut in two."""
    found = checkpoints.restore_latest({"state": job.abstract, "sums": abstract_sums(job)}) if checkpoints else None
    if found is not None:
        latest, restored = found
        if latest > job.total_steps:
            raise UserError(
                f"the workdir holds step {latest}, and config.total is {job.total_steps} steps; "
                "take another workdir, or a longer total"
            )
        if state is not None:
            raise UserError(f"the workdir holds step {latest}, and a state was given too; take another workdir")
        report.cut(latest)
        report.say(f"resumed at step {latest}")
        if warning := restart.another_length(job, old, latest):
            report.warn(warning)
        return restored["state"], restored["sums"]
    report.cut(0)
    if state is None:
        state = job.initial()
        if job.config.init_from:
            state = initialised(job, state, report.say)
    else:
        contract.refuse_unusable_state(job.abstract, state)
        # The loop donates its state; the caller keeps the one it gave.
        state = jax.tree.map(lambda leaf, like: jax.device_put(jnp.copy(leaf), like.sharding), state, job.abstract)
    return state, zero_sums(job)


def finish(loop: Loop, folder: Path | None) -> Result:
    """The last log lines and checkpoint on disk, the test split evaluated once, the summary printed."""
    job, report = loop.job, loop.report
    loop.behind.flush()
    if loop.checkpoints is not None:
        loop.checkpoints.wait()
        if loop.compiled or not loop.agreed.exit_code:  # a signal may come before the first step, and leave nothing
            loop.checkpoints.verify(loop.step)  # exit code 0 says that it is there and loads
        loop.watchdog.beat()
    tested = any(key.startswith("test/") for line in report.history for key in line)
    if (
        loop.complete()
        and not loop.agreed.exit_code
        and job.config.test != "no"
        and "test" in job.evaluations
        and not tested
    ):
        with contextlib.suppress(Stopped), loop.stop.away(nothing if folder else None):
            each_batch = loop.watchdog.each_batch(loop.agreed.check)
            report.write(loop.step, job.evaluate("test", tested_state(loop), each_batch))
            tell_left_out(job, report)
        loop.watchdog.beat()
    metrics = last_values(report.history)
    report.summary(
        metrics=metrics,
        step=loop.step,
        seconds=time.monotonic() - loop.began,
        ended="finished" if loop.complete() else f"stopped at step {loop.step} of {loop.due.total}{loop.agreed.why()}",
        best=best_line(report.history, job.config),
    )
    return Result(
        job=job,
        state=loop.state,
        history=report.history,
        metrics=metrics,
        workdir=folder,
        exit_code=loop.agreed.exit_code,
    )


def tested_state(loop: Loop) -> Any:
    """The weights that the test split judges: the last ones, or those that validation chose."""
    if loop.job.config.test == "last":
        return loop.state
    if loop.checkpoints is None:
        return loop.state if loop.best_state is None else loop.best_state
    best = loop.checkpoints.best()
    if best is None:
        return loop.state
    return restore(loop.job, loop.checkpoints, best)[0]


def evaluate(job: Job, folder: Path | None, stop: Stopper, watchdog: Watchdog) -> Result:
    """All evaluations of a workdir's newest checkpoint (its best where `config.test` says so)."""
    if folder is None or not (folder / "checkpoints").is_dir():
        raise UserError(f"--mode=eval needs a workdir with checkpoints; {folder} has none")
    checkpoints = Checkpoints(folder / "checkpoints")
    step = checkpoints.best() if job.config.test == "best" else None
    step = checkpoints.latest() if step is None else step
    if step is None:
        raise UserError(f"{folder} holds no complete checkpoint to evaluate")
    state, _ = restore(job, checkpoints, step)
    agreed = agreement.reached(lambda: Wishes(stop.signal or 0))
    with open_report(job, None) as report, agreed:
        report.say(f"step {step} of {folder}")
        with contextlib.suppress(Stopped):
            for name in job.evaluations:
                watchdog.beat()
                report.write(step, job.evaluate(name, state, watchdog.each_batch(agreed.check)))
                tell_left_out(job, report)
        metrics = last_values(report.history)
        report.summary(ended=f"evaluated step {step:,}{agreed.why()}", metrics=metrics, places={"workdir": folder})
    return Result(job, state, report.history, metrics, folder, agreed.exit_code)


def refuse_rollback_to_nowhere(job: Job, folder: Path | None) -> None:
    lacking = "a workdir" if folder is None else "" if job.config.checkpoint.every else "config.checkpoint.every"
    if job.config.on_nonfinite == "rollback" and lacking:
        raise UserError(
            f"config.on_nonfinite is 'rollback', but there is no {lacking.removeprefix('a ')}: a rollback goes back to "
            f"a checkpoint at a step that does not depend on the clock; give it {lacking}"
        )
