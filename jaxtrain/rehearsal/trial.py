"""The two runs of one verification: one uninterrupted, one that faults befall, each process started as a user would."""

import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jaxtrain.errors import JaxtrainError, UserError
from jaxtrain.rehearsal import answers, child, compare, faults, inflict, moments
from jaxtrain.rehearsal.child import Ended
from jaxtrain.rehearsal.compare import Batch
from jaxtrain.rehearsal.faults import Fault
from jaxtrain.rehearsal.rehearse import Plan
from jaxtrain.rehearsal.verdict import Verdict
from jaxtrain.reporting.sinks import JsonLines

FIRST_SHARE = 0.35  # of the time: what the uninterrupted run may take
HANG_SECONDS = 5.0
ENDED_ITSELF = 143  # what a run that reaches `Plan.goal` ends with


@dataclasses.dataclass
class Trial:
    """Two runs in `folder`, of the command `arguments`, in `minutes`; what is to befall the second one.

    borne: NaN that the config has the run bear: a property of its data, so both runs have it. poisonable: whether the
    step can be given NaN at all.
    """

    folder: Path
    arguments: tuple[str, ...]  # of jaxtrain.main, without the workdir
    faults: Sequence[Fault]
    borne: Sequence[Fault]
    poisonable: bool
    minutes: float
    rng: random.Random
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        self.starts = 0
        self.goal = 0  # the last step of both, where the first had to be ended
        self.befallen: list[Fault] = []
        self.problems: list[str] = []

    @property
    def uninterrupted(self) -> Path:
        return self.folder / compare.NAMES[0]

    @property
    def resumed(self) -> Path:
        return self.folder / compare.NAMES[1]

    def run(self, kills: int, cost: bool) -> Verdict:
        """Both runs, `kills` more in the second, and their comparison.

        Raises UserError for what cannot be; JaxtrainError where the run fails without any fault;
        subprocess.TimeoutExpired where the time is over.
        """
        first = self.first()
        steps = answers.newest(self.uninterrupted)
        planned = self.planned(kills, steps, first)
        batches = self.second(planned, steps, first)
        if planned and not self.befallen:
            raise UserError(f"{self.minutes:g} minutes are not enough for a single kill; --minutes=… gives more")
        rows = (
            compare.batches(first.batches, batches, steps),  # what differs here makes the rest differ
            *compare.states(self.uninterrupted, self.resumed),
            compare.lines(self.uninterrupted, self.resumed),
            compare.events(self.uninterrupted, self.resumed),
        )
        self.problems += answers.to_borne(self.borne, self.resumed)
        ratio = self.cost(first) if cost or first.first("platform") == "gpu" else None
        befallen = (*self.borne, *self.befallen)
        return Verdict(rows, tuple(self.problems), steps, befallen, self.folder, ratio)

    def first(self) -> Ended:
        """The run that nothing befalls; ended after its share of the time, where it is not done by then."""
        ended = self.start(self.uninterrupted, seconds=FIRST_SHARE * 60 * self.minutes)
        self.goal = int(ended.first("goal") or 0)
        if ended.exit_code != (ENDED_ITSELF if self.goal else 0):
            reason = (ended.complaints or ended.errors.splitlines() or ["it said nothing"])[-1]
            if ended.exit_code == UserError.exit_code:
                raise UserError(reason)
            raise JaxtrainError(f"the run fails without any fault (exit code {ended.exit_code}): {reason}")
        return ended

    def planned(self, kills: int, steps: int, first: Ended) -> list[Fault]:
        """What is to befall the second run, in order: what was asked for, then kills."""
        if late := next((fault for fault in self.faults if fault.step > steps), None):
            raise UserError(f"--inject: {late} is past step {steps}, the last that there was time for; --minutes=…")
        asked: list[Fault] = []
        for fault in self.faults:
            if fault.where == faults.LATEST and not asked:  # there must be checkpoints to damage
                asked.append(moments.aimed("step", max(1, 2 * steps // 3), first, self.rng))
            if fault.where in faults.PHASES:
                if not first.phases(fault.where):
                    raise UserError(f"--inject: {fault}: this run has no moment in which {faults.PHASES[fault.where]}")
                fault = dataclasses.replace(moments.aimed(fault.where, -1, first, self.rng), kind=fault.kind)
            asked.append(fault)
        return [*asked, *moments.draw(kills, steps, first, self.rng)]

    def second(self, planned: Sequence[Fault], steps: int, first: Ended) -> list[Batch]:
        """The run that all this befalls, to its end. Returns what its steps were given, in order."""
        batches: list[Batch] = []
        damaged: list[tuple[Fault, int]] = []
        complete = False
        for fault in planned:
            if fault.kind in inflict.DAMAGES:
                damaged.append((fault, self.damage(fault)))
                continue
            if fault.kind == "kill" and fault not in self.faults and self.left() < 2 * first.seconds:
                self.say(f"  {fault} is left out: there is time for the last start only; --minutes=… gives more")
                continue
            if fault.kind == "kill" and answers.newest(self.resumed) >= steps:  # nothing else is left of the run
                fault = moments.aimed("end", steps, first, self.rng)
            ended = self.befall(fault, damaged)
            batches += ended.batches
            complete, damaged = ended.exit_code == 0, []
        if damaged or not complete:
            batches += self.befall(None, damaged).batches
        return batches

    def befall(self, fault: Fault | None, damaged: Sequence[tuple[Fault, int]]) -> Ended:
        """One start, its fault, and how that and what was damaged before it were answered."""
        before = answers.newest(self.resumed)
        ended = self.start(self.resumed, fault)
        for damage, step in damaged:
            self.problems += answers.to_damage(damage, step, ended, self.resumed)
        if fault is not None:
            self.befallen.append(fault)
            self.problems += answers.to_fault(fault, ended, self.resumed, before)
            inflict.bring_back(self.resumed)
        elif ended.exit_code != (ENDED_ITSELF if self.goal else 0):
            self.problems.append(f"the last start ended with exit code {ended.exit_code}{answers.said(ended)}")
        return ended

    def damage(self, fault: Fault) -> int:
        """Damages the newest good checkpoint of the second run; returns its step."""
        step = answers.newest(self.resumed)
        if not step:
            raise UserError(f"--inject: {fault} finds no checkpoint; let a later step come before it")
        inflict.DAMAGES[fault.kind](self.resumed / "checkpoints" / str(step))
        self.befallen.append(fault)
        self.say(f"  {fault}: the checkpoint of step {step}")
        return step

    def cost(self, first: Ended) -> float | None:
        """The time of a step with config.deterministic over that without, medians over the reported intervals."""
        if self.left() < 1.5 * first.seconds:
            self.say("  no time is left to measure what config.deterministic costs; --minutes=… gives more")
            return None
        free = self.folder / "not-deterministic"
        self.start(free, changes=["deterministic=false"])
        with_it, without = map(_step_ms, (self.uninterrupted, free))
        self.say(f"  config.deterministic: {with_it:.3g} ms a step with it, {without:.3g} ms without")
        return with_it / without

    def start(
        self, workdir: Path, fault: Fault | None = None, *, seconds: float = 0.0, changes: Sequence[str] = ()
    ) -> Ended:
        """One process of a run, from its start or its newest checkpoint on."""
        poison = [each.step - 1 for each in (*self.borne, *([fault] if fault else [])) if each.kind == "nan"]
        changes = [*changes, *self._surroundings(fault)]
        plan = Plan(
            arguments=(*self.arguments, *(f"--config.{each}" for each in changes), f"--workdir={workdir}"),
            workdir=str(workdir),
            goal=self.goal,
            seconds=seconds,
            fault=None if poison and fault is not None and fault.kind == "nan" else fault,
            poison=tuple(poison) if self.poisonable else None,
        )
        ended = child.start(plan, max(self.left(), 0.1), self.folder / f"start-{self.starts}.txt")
        self.say(f"  start {self.starts:<3} {_told(workdir.name, fault, ended)}")
        self.starts += 1
        return ended

    def left(self) -> float:
        """Seconds of the time for everything."""
        return 60 * self.minutes - (time.monotonic() - self.began)

    def _surroundings(self, fault: Fault | None) -> Iterator[str]:
        """What a fault needs of the config to happen at all."""
        if fault is not None and fault.where == "compile":  # what is compiled already does not compile
            yield f"compile_cache={self.folder / f'cache-{self.starts}'}"
        if fault is not None and fault.kind == "hang":
            yield f"hang_minutes={HANG_SECONDS / 60:.4f}"


def _step_ms(workdir: Path) -> float:
    """The median of what `metrics.jsonl` says; nan where it says nothing."""
    found = [line["time/step_ms"] for line in JsonLines.read(workdir / "metrics.jsonl") if "time/step_ms" in line]
    return statistics.median(found) if found else math.nan


def _told(run: str, fault: Fault | None, ended: Ended) -> str:
    """One line on a process: what it did and how it ended."""
    resumed, given = ended.first("start"), ended.batches
    span = f"steps {given[0].step} to {given[-1].step}" if given else "no step"
    start = f"resumed at {resumed}, " if resumed else ""
    return f"{run:<18} {str(fault or ''):<19} {start}{span}; exit code {ended.exit_code} after {ended.seconds:.1f} s"
