"""The loop: from one step at which something is due (report, evaluation, checkpoint, end) to the next.

What happens, and when, is a function of the step, so that Python is needed in between only to hand out the batches.
"""

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

from jaxtrain import contract
from jaxtrain.errors import NonFiniteError, StorageError
from jaxtrain.job import Job
from jaxtrain.loop import agreement, finite
from jaxtrain.loop.advance import abstract_sums, checked_advance, plain_advance, zero_sums
from jaxtrain.loop.agreement import Wishes
from jaxtrain.loop.behind import Behind, Interval
from jaxtrain.loop.due import Due
from jaxtrain.loop.intake import Intake, open_intake
from jaxtrain.loop.judge import is_better, out_of_patience
from jaxtrain.loop.nonfinite import study
from jaxtrain.loop.opening import intervals
from jaxtrain.loop.pace import Pace
from jaxtrain.loop.profiler import profiler
from jaxtrain.loop.stopping import Stopped, Stopper, nothing
from jaxtrain.loop.watchdog import Watchdog
from jaxtrain.machine import distributed
from jaxtrain.reporting.report import Report
from jaxtrain.storage.checkpoint import Checkpoints

REMEDIES = (
    "lower config.optimizer.learning_rate, set config.clip_norm, look with --debug, or bear it with "
    "--config.on_nonfinite=skip or rollback"
)


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
        if self.debug:
            self.job = step_by_step(self.job)
        self.step = int(self.state.step)
        self.zeros = zero_sums(self.job)
        self.behind = Behind(self.report, self.job.rows, self.refuse_nonfinite)
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
        with self.opened() as intake:
            while not (self.complete() or self.interrupted()):
                trace(self.step)
                self.span(intake, self.due.next(self.step))
                due = self.due.at(self.step)
                if "report" in due:
                    self.write_interval()
                best = self.evaluate(due)
                if self.complete():
                    self.write_interval()
                if best or self.save_is_due(due):
                    self.save(best)

    def opened(self) -> Intake:
        """Where batches come from, from the state's position on. Uploads a set that is to be resident."""
        with self.stop.away(self.keeper()):
            return open_intake(self.job, self.step + int(self.state.offset))

    def span(self, intake: Intake, until: int) -> None:
        """Hands steps to the device, up to `until` or an interruption. Nothing here reads a result."""
        waited = intake.waited
        self.pace.begin(self.step)
        with jax.transfer_guard("allow" if self.debug else "disallow"):
            waiting = self.stop.away(self.keeper())
            while self.step < until:
                with waiting:
                    data, steps = intake.take(until - self.step)
                if not self.compiled:
                    self.watchdog.pause()
                began = time.monotonic()
                self.state, self.sums = self.advance(self.state, self.sums, data, steps)
                self.step += steps
                self.agreed.tick()
                if self.compiled:
                    self.pace.dispatched(self.step, self.sums)
                else:  # the first call compiles: that is no part of the speed, and no hang
                    self.compiled, waited = True, intake.waited
                    self.tell_compiled(time.monotonic() - began)
                    self.pace.begin(self.step)
                    self.watchdog.beat()
                    self.stop.working()
                    waiting = self.stop.away(self.keeper())
                if self.interrupted() or self.minutes_passed():
                    break
        self.waited += intake.waited - waited

    def tell_compiled(self, seconds: float) -> None:
        """Of many members, which take their time."""
        if self.job.together is not None:
            names = self.job.together.names
            self.report.say(f"{len(names)} members in one program, traced and compiled in {seconds:.1f} s")

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
        config, members = self.job.config, self.job.together
        ends = {f"/{r}": f" of {name}" for r, name in enumerate(members.names)} if members else {"": ""}
        if "train/skipped_at" not in values:
            wrong = [name for name, value in values.items() if name.startswith("train/") and not math.isfinite(value)]
            if wrong and config.on_nonfinite != "skip":
                found = next(((name, who) for end, who in ends.items() for name in wrong if name.endswith(end)), None)
                name, who = found or (wrong[0], "")
                raise NonFiniteError(f"{name}{who} is {values[name]} in the steps up to {step}", step)
            return
        counts = [
            (int(values[f"train/skipped_at{end}"]), int(values[f"train/skipped{end}"]), ends[end]) for end in ends
        ]
        for at, skipped, who in sorted(counts):  # the first fault, whenever it is looked for
            if at >= 0 and config.on_nonfinite != "skip":
                raise NonFiniteError(f"loss or gradient{who} was not finite at step {at}, parameters untouched", at)
            if at >= 0 and skipped > config.max_skipped:
                raise NonFiniteError(
                    f"loss or gradient{who} was not finite at step {at} and later: {skipped} updates left out, and "
                    f"config.max_skipped is {config.max_skipped}"
                )

    def refuse_nonfinite_state(self) -> None:
        """Raises NonFiniteError where the state itself is not finite, which no update need have noticed yet.

        The fault is that of the next step, so that a rollback does not depend on whether this one was saved.
        """
        try:
            finite.refusal(self.state, self.step, self.job.together.names if self.job.together else ())()
        except NonFiniteError as fault:
            raise NonFiniteError(str(fault), self.step + 1) from None

    def roll_back(self, fault: NonFiniteError) -> None:
        """Returns to a checkpoint, and leaves the batches from there to the fault out of the run.

        To the newest that `checkpoint.every` made, so that what is left out is a function of the fault alone.
        Raises NonFiniteError where the config says to stop, or that was done often enough.
        """
        config, found = self.job.config, ""
        if fault.step is not None and self.job.parts is not None:
            found = study(*self.job.blamed(self.state, fault.step), fault.step, self.folder)
        self.rollbacks += 1
        if config.on_nonfinite != "rollback" or fault.step is None or self.checkpoints is None:
            raise NonFiniteError(f"{fault}{found}; {REMEDIES}", fault.step) from None
        if self.rollbacks > config.max_rollbacks:
            raise NonFiniteError(f"{fault}{found}; {config.max_rollbacks} rollbacks did not help: {REMEDIES}") from None
        step = self.checkpoints.latest(anchor=True)
        if step is None:
            raise StorageError(f"{fault}{found}; no good checkpoint to go back to") from None
        last = int(self.state.offset) + fault.step  # a fault before this one may have left out batches already
        self.state, self.sums = restore(self.job, self.checkpoints, step)
        first = int(self.state.offset) + step
        self.state = dataclasses.replace(
            self.state, offset=jax.device_put(np.int32(last - step), self.job.abstract.offset.sharding)
        )
        self.pace.settle()
        self.behind.drop()
        self.report.cut(step)
        self.step, self.since, self.waited = step, step, 0.0
        self.report.warn(f"{fault}{found}; rolled back to step {step}, leaving out batches {first + 1} to {last}")


def restore(job: Job, checkpoints: Checkpoints, step: int) -> tuple[Any, Any]:
    """State and sums as they were saved at `step`."""
    restored = checkpoints.restore(step, {"state": job.abstract, "sums": abstract_sums(job)})
    return restored["state"], restored["sums"]


def step_by_step(job: Job) -> Job:
    """The same with a program of one step, which takes its batch from outside: so that each can be looked at."""
    config = job.config.copy_and_resolve_references()
    config.steps_per_dispatch = 1
    config.data.resident = "no"
    return dataclasses.replace(job, config=config)


def tell_left_out(job: Job, report: Report) -> None:
    """Names the damaged examples that were met of late; the reports count them."""
    tell = report.warn if distributed.is_first() else distributed.say
    for line in job.left_out():
        tell(f"{line}; left out")
