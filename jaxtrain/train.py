"""A run, read from top to bottom: build, restore, loop, finish.

    state[s + 1], metrics[s + 1] = step(state[s], batch[s])
    batch[s]                     = data(seed, s + offset)

What happens, and when, is a function of the step. The loop goes from one step at which something is due (report,
evaluation, checkpoint, end) to the next, and returns to Python in between only to hand out the next batch.
"""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from jaxtrain import agreement, contract, devices, distributed, exits, finite, precision, restart
from jaxtrain import config as configs
from jaxtrain import workdir as workdirs
from jaxtrain.advance import abstract_sums, checked_advance, plain_advance, zero_sums
from jaxtrain.agreement import Wishes
from jaxtrain.behind import Behind, Interval
from jaxtrain.checkpoint import Checkpoints
from jaxtrain.data.feed import Feed
from jaxtrain.describe import facts
from jaxtrain.due import Due
from jaxtrain.errors import HangError, NonFiniteError, StorageError, UserError
from jaxtrain.initialise import initialised
from jaxtrain.job import Job, build
from jaxtrain.judge import best_line, is_better, last_values, out_of_patience
from jaxtrain.lease import Lease
from jaxtrain.mirror import local_workdir
from jaxtrain.nonfinite import study
from jaxtrain.opening import hang_file, intervals, open_checkpoints, open_report
from jaxtrain.pace import Pace
from jaxtrain.peers import Ending
from jaxtrain.profiler import profiler
from jaxtrain.report import Report
from jaxtrain.result import Result
from jaxtrain.stopping import Stopped, Stopper, nothing
from jaxtrain.watchdog import Watchdog

REMEDIES = (
    "lower config.optimizer.learning_rate, set config.clip_norm, look with --debug, or bear it with "
    "--config.on_nonfinite=skip or rollback"
)


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
        agreement.refuse_another_run(job, folder)
        refuse_rollback_to_nowhere(job, folder)
        stack.enter_context(precision.scope(job.policy))
        watchdog = stack.enter_context(Watchdog(config.hang_minutes))
        if mode == "eval":
            return evaluate(job, folder, stop, watchdog)
        lease = stack.enter_context(Lease(folder, notes.append)) if folder and jax.process_index() == 0 else None
        old = workdirs.read(folder) if folder else None  # again: another run may have come and gone in the meantime
        restart.continued(config, folder, old, mode, objects)
        report = stack.enter_context(open_report(job, folder))
        stop.say = ending.say = report.say if distributed.is_first() else exits.say
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


def restore(job: Job, checkpoints: Checkpoints, step: int) -> tuple[Any, Any]:
    """State and sums as they were saved at `step`."""
    restored = checkpoints.restore(step, {"state": job.abstract, "sums": abstract_sums(job)})
    return restored["state"], restored["sums"]


@dataclasses.dataclass
class Loop:
    """From one step at which something is due to the next."""

    job: Job
    report: Report
    checkpoints: Checkpoints | None
    stop: Stopper
    watchdog: Watchdog
    state: Any
    sums: Any
    folder: Path | None = None
    profile: tuple[int, int] | None = None
    debug: bool = False

    def __post_init__(self) -> None:
        config = self.job.config
        self.step = int(self.state.step)
        self.zeros = zero_sums(self.job)
        self.behind = Behind(self.report, config.batch_size, self.refuse_nonfinite)
        self.due = Due(intervals(self.job), max(self.job.total_steps, self.step), self.profile or ())
        self.advance = checked_advance(self.job) if self.debug else plain_advance(self.job)
        self.best_state: Any = None  # without a workdir, where no checkpoint keeps it
        self.began = self.saved_at = time.monotonic()
        self.agreed = agreement.reached(self.wishes)
        self.pace = Pace(self.watchdog.beat)
        self.watchdog.where = lambda: f"at step {self.step}"
        self.compiled = False
        self.since, self.waited = self.step, 0.0  # the report interval so far
        self.rollbacks = 0

    def run(self) -> None:
        """Until the last step, a signal, `max_minutes` or the end of patience."""
        self.watchdog.beat()
        # A signal may have cut off evaluations that were due at the restored step.
        if self.step and self.checkpoints is not None and self.evaluate(self.due.at(self.step)):
            self.save(best=True)
        if self.complete():
            self.report.say(f"already finished at step {self.step}")
            if self.checkpoints is not None and self.checkpoints.latest() is None:  # a state from memory, to be kept
                self.save(best=False)
            return
        saved = distributed.from_first(self.checkpoints.steps()) if self.checkpoints is not None else None
        if saved == [] and self.job.config.on_nonfinite == "rollback":
            self.save(best=False)  # so that there is always one to go back to
        traces = (self.folder or Path()) / "profile"
        with profiler(traces, self.profile if distributed.is_first() else None, self.report.say) as trace:
            while not (self.complete() or self.interrupted()):
                try:
                    self.train(trace)
                except NonFiniteError as fault:
                    self.roll_back(fault)

    def train(self, trace: Callable[[int], None]) -> None:
        """From where the state is to the end of the run or an interruption. Raises NonFiniteError at a fault."""
        with self.job.batches(self.step + int(self.state.offset)) as batches:
            while not (self.complete() or self.interrupted()):
                trace(self.step)
                self.span(batches, self.due.next(self.step))
                due = self.due.at(self.step)
                if "report" in due:
                    self.write_interval()
                best = self.evaluate(due)
                if self.complete():
                    self.write_interval()
                if best or self.save_is_due(due):
                    self.save(best)

    def span(self, batches: Feed, until: int) -> None:
        """Hands steps to the device, up to `until` or an interruption. Nothing here reads a result."""
        waited = batches.waited
        self.pace.begin(self.step)
        with jax.transfer_guard("allow" if self.debug else "disallow"):
            waiting = self.stop.away(self.keeper())
            while self.step < until:
                with waiting:
                    batch = next(batches)
                if not self.compiled:
                    self.watchdog.pause()
                self.state, self.sums = self.advance(self.state, self.sums, batch)
                self.step += 1
                self.agreed.tick()
                if self.compiled:
                    self.pace.dispatched(self.step, self.sums)
                else:  # the first call compiles: that is no part of the speed, and no hang
                    self.compiled, waited = True, batches.waited
                    self.pace.begin(self.step)
                    self.watchdog.beat()
                    self.stop.working()
                    waiting = self.stop.away(self.keeper())
                if self.interrupted() or self.minutes_passed():
                    break
        self.waited += batches.waited - waited

    def write_interval(self) -> None:
        """Ends a report interval. What is written now is the one before it."""
        if self.checkpoints is not None:
            self.checkpoints.check()  # a save that failed in the background ends the run here
        if self.step == self.since:
            return
        self.behind.push(Interval(self.step, self.sums, *self.pace.take(), self.waited))
        tell_left_out(self.job, self.report)
        self.sums, self.since, self.waited = self.zeros, self.step, 0.0

    def evaluate(self, due: set[str]) -> bool:
        """Runs the evaluations that are due and not yet reported. True where validation found the best weights."""
        best = False
        reported = {key.split("/")[0] for line in self.report.history if line["step"] == self.step for key in line}
        for name in [name for name in self.job.evaluations if name in due - reported]:
            self.settle()
            self.report.status(f"evaluating {name}…")
            try:
                with self.stop.away(self.keeper(best)):
                    values = self.job.evaluate(name, self.state, self.watchdog.each_batch(self.agreed.check))
            except Stopped:
                break
            finally:
                self.watchdog.beat()
                self.report.status()
            if name == "eval":
                best = is_better(values, self.report.history, self.job.config)
            self.report.write(self.step, values, best=best and name == "eval")
            tell_left_out(self.job, self.report)
        return best

    def keeper(self, best: bool = False) -> Callable[[], str] | None:
        """What saves the state in another thread, while this one waits for data or for an evaluation.

        None where nothing does: without a workdir, and where all processes would have to.
        """
        if not self.compiled and not best:
            return nothing
        alone = self.checkpoints is not None and jax.process_count() == 1
        return functools.partial(self.keep, best) if alone else None

    def keep(self, best: bool) -> str:
        """Returns when the state is on disk, and says so."""
        self.save(best)
        if self.checkpoints is not None:
            self.checkpoints.wait()
        return f"; step {self.step} is saved"

    def save(self, best: bool) -> None:
        """Saves in the background, after the log of all steps so far is on disk."""
        self.report.may_write()
        self.settle()
        contract.refuse_miscount(self.job.step_name, int(self.state.step), self.step)
        self.refuse_nonfinite_state()
        self.report.flush()
        self.saved_at = time.monotonic()
        self.agreed.saved()
        if self.checkpoints is not None:
            tree = {"state": self.state, "sums": self.sums}
            meta = {"precision": self.job.policy.name}
            self.checkpoints.save(self.step, tree, meta=meta, best=best, before_commit=self.report.may_write)
            self.watchdog.beat()
        elif best and self.job.config.test == "best":
            self.best_state = jax.tree.map(jnp.copy, self.state)

    def settle(self) -> None:
        """Waits for all steps so far, writes what is held back. Raises NonFiniteError, also where no report is due."""
        self.pace.settle()
        self.behind.flush()
        if self.step > self.since:
            self.behind.look(self.step, self.sums)

    def save_is_due(self, due: set[str]) -> bool:
        return "checkpoint" in due or self.complete() or self.interrupted() or self.minutes_passed()

    def wishes(self) -> Wishes:
        """What signals and clocks ask of this process."""
        config, now = self.job.config, time.monotonic()
        return Wishes(
            signal=self.stop.signal or 0,
            end=0 < 60 * config.max_minutes < now - self.began,
            save=0 < 60 * config.checkpoint.minutes < now - self.saved_at,
        )

    def minutes_passed(self) -> bool:
        """Since the last checkpoint, as many as the config bears."""
        return self.agreed.granted.save

    def complete(self) -> bool:
        """All steps done, or no better evaluation for as long as the config's patience lasts."""
        return self.step >= self.due.total or out_of_patience(self.report.history, self.job.config)

    def interrupted(self) -> bool:
        """A signal came, or `max_minutes` are over."""
        granted = self.agreed.granted
        return granted.end or bool(granted.signal)

    def refuse_nonfinite(self, step: int, values: dict[str, float]) -> None:
        """Raises NonFiniteError where the reported interval up to `step` had a fault that the config does not bear.

        A step of a user's own need not leave any update out; of such a step any metric tells.
        """
        config = self.job.config
        if "train/skipped_at" not in values:
            wrong = [name for name, value in values.items() if name.startswith("train/") and not math.isfinite(value)]
            if wrong and config.on_nonfinite != "skip":
                raise NonFiniteError(f"{wrong[0]} is {values[wrong[0]]} in the steps up to {step}", step)
            return
        skipped, at = int(values["train/skipped"]), int(values["train/skipped_at"])
        if at >= 0 and config.on_nonfinite != "skip":
            raise NonFiniteError(f"loss or gradient was not finite at step {at}, parameters untouched", at)
        if at >= 0 and skipped > config.max_skipped:
            raise NonFiniteError(
                f"loss or gradient was not finite at step {at} and later: {skipped} updates left out, and "
                f"config.max_skipped is {config.max_skipped}"
            )

    def refuse_nonfinite_state(self) -> None:
        """Raises NonFiniteError where the state itself is not finite, which no update need have noticed yet.

        The fault is that of the next step, so that a rollback does not depend on whether this one was saved.
        """
        try:
            finite.refusal(self.state, self.step)()
        except NonFiniteError as fault:
            raise NonFiniteError(str(fault), self.step + 1) from None

    def roll_back(self, fault: NonFiniteError) -> None:
        """Returns to a checkpoint, and leaves the batches from there to the fault out of the run.

        To the newest that `checkpoint.every` made, so that what is left out is a function of the fault alone.
        Raises NonFiniteError where the config says to stop, or that was done often enough.
        """
        config, found = self.job.config, ""
        if fault.step is not None and self.job.parts is not None:
            found = study(self.job, self.state, fault.step, self.folder)
        self.rollbacks += 1
        if config.on_nonfinite != "rollback" or fault.step is None or self.checkpoints is None:
            raise NonFiniteError(f"{fault}{found}; {REMEDIES}", fault.step) from None
        if self.rollbacks > config.max_rollbacks:
            raise NonFiniteError(f"{fault}{found}; {config.max_rollbacks} rollbacks did not help: {REMEDIES}") from None
        step = self.checkpoints.latest(anchor=True)
        if step is None:
            raise StorageError(f"{fault}{found}; no good checkpoint to go back to") from None
        self.state, self.sums = restore(self.job, self.checkpoints, step)
        first, last = (int(self.state.offset) + each for each in (step, fault.step))
        self.state = dataclasses.replace(
            self.state, offset=jax.device_put(np.int32(last - step), self.job.abstract.offset.sharding)
        )
        self.pace.settle()
        self.behind.drop()
        self.report.cut(step)
        self.step, self.since, self.waited = step, step, 0.0
        self.report.warn(f"{fault}{found}; rolled back to step {step}, leaving out batches {first + 1} to {last}")


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
    return Result(job, state, report.history, metrics, folder, agreed.exit_code)


def refuse_rollback_to_nowhere(job: Job, folder: Path | None) -> None:
    lacking = "a workdir" if folder is None else "" if job.config.checkpoint.every else "config.checkpoint.every"
    if job.config.on_nonfinite == "rollback" and lacking:
        raise UserError(
            f"config.on_nonfinite is 'rollback', but there is no {lacking.removeprefix('a ')}: a rollback goes back to "
            f"a checkpoint at a step that does not depend on the clock; give it {lacking}"
        )


def tell_left_out(job: Job, report: Report) -> None:
    """Names the damaged examples that were met of late; the reports count them."""
    tell = report.warn if distributed.is_first() else distributed.say
    for line in job.left_out():
        tell(f"{line}; left out")
