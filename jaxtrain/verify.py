"""Proves that a run which is killed and resumed equals one that is not, and rehearses faults.

    python -m jaxtrain.verify --config=configs/digits.py

The run is made short, run once from start to end and once with kills or other faults, each process started as a user
would; then the two are compared bit by bit. The user's own workdir is not touched.
"""

import argparse
import dataclasses
import math
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ml_collections import ConfigDict

from jaxtrain import answers, child, commandline, compare, faults, inflict, moments, shorten
from jaxtrain import config as configs
from jaxtrain import main as entry
from jaxtrain.child import Ended
from jaxtrain.compare import Batch, Row
from jaxtrain.errors import JaxtrainError, UserError
from jaxtrain.faults import Fault
from jaxtrain.rehearsal import Plan
from jaxtrain.sinks import JsonLines

KILLS = 3
HANG_SECONDS = 5.0
FIRST_SHARE = 0.35  # of the time: what the uninterrupted run may take


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What came out. `folder` holds both workdirs and what the processes said, where it was kept; else None."""

    rows: tuple[Row, ...]
    problems: tuple[str, ...]  # answers to faults that are not the documented ones
    steps: int
    falls: tuple[str, ...]  # what befell the second run, in order
    folder: Path | None
    cost: float | None = None  # time of a step with config.deterministic over that without, where it was measured

    @property
    def equal(self) -> bool:
        return not any(row.difference for row in self.rows)

    @property
    def good(self) -> bool:
        """Equal, and every fault was answered as documented."""
        return self.equal and not self.problems

    @property
    def exit_code(self) -> int:
        return 0 if self.good else 1

    def __str__(self) -> str:
        if self.good:
            return (
                f"EQUAL: {self.steps} steps with {self._told()} end as {self.steps} uninterrupted ones do, bit for bit"
            )
        differing = [f"{row.name}: {row.difference}" for row in self.rows if row.difference]
        found = "; ".join([*differing[:1], *self.problems])
        return f"{'NOT AS DOCUMENTED' if self.equal else 'NOT EQUAL'}: {found}; both runs are in {self.folder}"

    def _told(self) -> str:
        kills = sum(fall.startswith("kill@") for fall in self.falls)
        others = [fall for fall in self.falls if not fall.startswith("kill@")]
        return " and ".join([*others, *([f"{kills} kill{'s' * (kills > 1)}"] if kills else [])]) or "nothing"


def verify(
    spec: str,
    changes: Sequence[str] = (),
    *,
    steps: int = 200,
    minutes: float = 5.0,
    kills: int | None = None,
    seed: int = 0,
    inject: str = "",
    keep: str | Path | None = None,
    cost: bool = False,
    say: Callable[[str], None] = print,
) -> Verdict:
    """Runs "FILE[:ARGS]" with `changes` ("model.width=64") twice, once with faults, and compares.

    steps, minutes: the run is cut to these steps, and to what can be run twice in this time. kills: SIGKILLs at moments
    drawn by `seed`; by default 3, or none where `inject` ("sigterm@120,corrupt@latest") interrupts the run itself. keep:
    a new folder for both workdirs; without it they are in a temporary one, which stays only where the verdict is bad.
    cost: measure what config.deterministic, with which all runs are made, costs; on GPUs that is done anyway. say: gets a
    line for what happens.
    Raises UserError for mistakes, and where the time is too short; JaxtrainError where the run fails without any fault.
    """
    wanted = faults.parse(inject)
    config = configs.load(spec, changes, say=lambda line: None)
    if steps < 2:
        raise UserError(f"--steps={steps}: there is nothing to interrupt; expected 2 or more")
    most, cut = shorten.shortened(config, steps)
    if late := next((fault for fault in wanted if fault.step > most), None):
        raise UserError(f"--inject: {late} is past the last step, {most}; --steps=… gives more")
    folder = _folder(keep)
    overrides = [*shorten.intervals(most), *changes, *cut]
    arguments = [f"--config={spec}", *(f"--config.{each}" for each in overrides)]
    say(f"{spec}: {most} steps, uninterrupted and then with faults, in {folder}")
    trial = Trial(folder, tuple(arguments), config, wanted, minutes, random.Random(seed), say)
    if kills is None:
        kills = 0 if any(fault.ends or fault.where == faults.LATEST for fault in wanted) else KILLS
    try:
        verdict = trial.run(kills, cost)
    except subprocess.TimeoutExpired:
        raise UserError(f"{minutes:g} minutes are not enough; --minutes=… gives more; see {folder}") from None
    if verdict.good and keep is None:
        shutil.rmtree(folder)
        verdict = dataclasses.replace(verdict, folder=None)
    return verdict


def _folder(keep: str | Path | None) -> Path:
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="jaxtrain-verify-"))
    folder = Path(keep).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--keep={keep} is there already; expected a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@dataclasses.dataclass
class Trial:
    """The two runs of one verification."""

    folder: Path
    arguments: tuple[str, ...]
    config: ConfigDict
    faults: list[Fault]
    minutes: float
    rng: random.Random
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        self.starts = 0
        self.goal = 0  # of the second run, where the first had to be ended
        self.problems: list[str] = []
        nan = [fault for fault in self.faults if fault.kind == "nan"]
        # Where NaN does not stop the run it is a property of its data, and both runs have it.
        self.borne = nan if self.config.on_nonfinite != "stop" else []
        self.poison = tuple(fault.step - 1 for fault in self.borne) if nan else None
        self.faults = [fault for fault in self.faults if fault not in self.borne]

    def run(self, kills: int, cost: bool) -> Verdict:
        first = self.uninterrupted()
        a, b = self.workdir("uninterrupted"), self.workdir("resumed")
        steps = answers.newest(a)
        planned = self.planned(kills, steps, first)
        batches = self.interrupted(planned, steps, first)
        if self.borne:
            self.problems += answers.to_borne(self.config.on_nonfinite, self.borne, b)
        rows = [*compare.states(a, b), compare.batches(first.batches, batches, steps)]
        rows += [compare.lines(a, b), compare.events(a, b)]
        ratio = self.cost(first) if cost or first.first("platform") == "gpu" else None
        return Verdict(
            tuple(rows), tuple(self.problems), steps, tuple(map(str, [*self.borne, *planned])), self.folder, ratio
        )

    def workdir(self, name: str) -> Path:
        return self.folder / name

    def uninterrupted(self) -> Ended:
        """The run that nothing befalls; ended after a third of the time, where it is not done by then."""
        ended = self.start("uninterrupted", seconds=FIRST_SHARE * 60 * self.minutes)
        self.goal = int(ended.first("goal") or 0)
        if ended.exit_code != (143 if self.goal else 0):
            error = ended.errors.splitlines()[-1:] or [f"exit code {ended.exit_code}"]
            reason = error[0].removeprefix("jaxtrain: ")
            if ended.exit_code == UserError.exit_code:
                raise UserError(reason)
            raise JaxtrainError(f"the run fails without any fault (exit code {ended.exit_code}): {reason}")
        return ended

    def planned(self, kills: int, steps: int, first: Ended) -> list[Fault]:
        """What is to befall the second run, in order: what was asked for, then kills."""
        if past := next((fault for fault in self.faults if fault.step > steps), None):
            raise UserError(f"--inject: {past} is past step {steps}, the last that there was time for; --minutes=…")
        asked: list[Fault] = []
        for fault in self.faults:
            if fault.where == faults.LATEST and not asked:  # there must be checkpoints to damage
                asked.append(moments.aimed("step", max(1, 2 * steps // 3), first, self.rng))
            if fault.where in faults.PHASES:
                if not first.phases(fault.where):
                    raise UserError(
                        f"--inject: {fault} cannot be: {faults.PHASES[fault.where]}, which this run has not"
                    )
                fault = dataclasses.replace(moments.aimed(fault.where, -1, first, self.rng), kind=fault.kind)
            asked.append(fault)
        return [*asked, *moments.draw(kills, steps, first, self.rng)]

    def interrupted(self, planned: list[Fault], steps: int, first: Ended) -> list[Batch]:
        """The run that all this befalls, to its end. Returns what its steps were given, in order."""
        workdir, batches = self.workdir("resumed"), []
        damaged: list[tuple[Fault, int]] = []
        complete = False
        for fault in planned:
            if fault.kind in inflict.DAMAGES:
                damaged.append((fault, self.damage(fault, workdir)))
                continue
            if fault.kind == "kill" and answers.newest(workdir) >= steps:  # nothing else is left of the run
                fault = moments.aimed("end", steps, first, self.rng)
            ended = self.befallen(fault, damaged, workdir)
            batches += ended.batches
            complete, damaged = ended.exit_code == 0, []
        if damaged or not complete:
            ended = self.befallen(None, damaged, workdir)
            batches += ended.batches
        return batches

    def befallen(self, fault: Fault | None, damaged: list[tuple[Fault, int]], workdir: Path) -> Ended:
        """One start, its fault, and how that and what was damaged before it were answered."""
        before = answers.newest(workdir)
        ended = self.start("resumed", fault)
        for damage, step in damaged:
            self.problems += answers.to_damage(damage, step, ended, workdir)
        if fault is not None:
            self.problems += answers.to_fault(fault, ended, workdir, before)
            inflict.brought_back(workdir)
        elif ended.exit_code != (143 if self.goal else 0):
            self.problems += [f"the last start ended with exit code {ended.exit_code}: {ended.errors[-300:]}"]
        return ended

    def cost(self, first: Ended) -> float | None:
        """The time of a step with config.deterministic over that without, medians over the reported intervals."""
        if self.left() < 1.5 * first.seconds:
            self.say("  no time is left to measure what config.deterministic costs; --minutes=… gives more")
            return None
        self.start("free", changes=["deterministic=false"])
        with_it, without = (_step_ms(self.workdir(run)) for run in ("uninterrupted", "free"))
        self.say(f"  config.deterministic: {with_it:.3g} ms a step with it, {without:.3g} ms without")
        return with_it / without

    def damage(self, fault: Fault, workdir: Path) -> int:
        """Damages the newest good checkpoint; returns its step."""
        step = answers.newest(workdir)
        if not step:
            raise UserError(f"--inject: {fault} finds no checkpoint; let another fault come later before it")
        inflict.DAMAGES[fault.kind](workdir / "checkpoints" / str(step))
        self.say(f"  between starts  {fault}: the checkpoint of step {step}")
        return step

    def left(self) -> float:
        """Seconds of the time for everything."""
        return 60 * self.minutes - (time.monotonic() - self.began)

    def start(
        self, run: str, fault: Fault | None = None, *, seconds: float = 0.0, changes: Sequence[str] = ()
    ) -> Ended:
        """One process of a run, from its start or its newest checkpoint on."""
        workdir = self.workdir(run)
        changes = [*changes, *self.surroundings(fault)]
        is_nan = fault is not None and fault.kind == "nan"
        plan = Plan(
            arguments=(*self.arguments, *(f"--config.{each}" for each in changes), f"--workdir={workdir}"),
            workdir=str(workdir),
            notes=-1,
            goal=self.goal,
            seconds=seconds,
            fault=None if is_nan else fault,
            poison=(fault.step - 1,) if fault is not None and is_nan else self.poison,
        )
        ended = child.start(plan, max(self.left(), 0.1), self.folder / f"start-{self.starts}.txt")
        self.say(f"  start {self.starts:<3} {_told(run, fault, ended)}")
        self.starts += 1
        return ended

    def surroundings(self, fault: Fault | None) -> Iterator[str]:
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
    span = f"steps {given[0].step} to {ended.last_step}" if given else "no step"
    start = f"resumed at {resumed}, " if resumed else ""
    return f"{run:<14} {str(fault or ''):<17} {start}{span}; exit code {ended.exit_code} after {ended.seconds:.1f} s"


def table(rows: Sequence[Row]) -> str:
    """What was compared, a line each."""
    width = max(len(row.name) for row in rows)
    amounts = max(len(row.amount) for row in rows)
    return "\n".join(
        f"  {row.name:<{width}}  {row.amount:<{amounts}}  "
        + (f"DIFFERS  {row.difference}" if row.difference else f"{row.digest[:16]}  equal")
        for row in rows
    )


def run(argv: Sequence[str]) -> int:
    """The command. Returns the exit code; raises what is a mistake."""
    import jax

    jax.config.update("jax_platforms", "cpu")  # the accelerator belongs to the runs
    flags, changes = commandline.parse(argv, _parser())
    options = {name: value for name, value in vars(flags).items() if name != "config"}
    verdict = verify(flags.config, changes, **options)
    print(table(verdict.rows))
    if verdict.cost is not None:
        print(f"a step takes {verdict.cost:.2f} times as long with config.deterministic as without")
    print(verdict)
    return verdict.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = commandline.Parser(
        prog="python -m jaxtrain.verify",
        description="Proves that this run, killed and resumed, equals itself uninterrupted; rehearses faults.",
        epilog="\n".join(_epilog()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", metavar="FILE[:ARGS]", help="as of jaxtrain.main, with the same --config.KEY=VALUE")
    add("--steps", type=int, default=200, help="of the run, at most (200)")
    add("--minutes", type=float, default=5.0, help="for everything (5)")
    add("--kills", type=int, help="SIGKILLs at drawn moments (3; 0 where --inject interrupts the run)")
    add("--seed", type=int, default=0, help="of the moments (0)")
    add("--inject", metavar="FAULT@WHEN,…", default="", help="faults, in the order in which they fall")
    add("--cost", action="store_true", help="measure what config.deterministic costs, as is done on GPUs anyway")
    add("--keep", metavar="DIR", help="a new folder for both workdirs; else a temporary one")
    return parser


def _epilog() -> list[str]:
    lines = ["faults for --inject; WHEN is a step, a phase, or latest:"]
    lines += [f"  {name:<9} {kind.doc}\n            → {kind.answer}" for name, kind in faults.KINDS.items()]
    lines += ["", "phases:", *(f"  {name:<11} {doc}" for name, doc in faults.PHASES.items())]
    return [*lines, "", "exit codes: 0 equal, and every fault answered as documented; 1 not; 2 a mistake"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line. Returns the exit code."""
    return entry.guarded(run, argv)


if __name__ == "__main__":
    sys.exit(main())
