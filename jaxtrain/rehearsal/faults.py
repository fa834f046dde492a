"""What can befall a run and what it answers, in one literal table; and how `--inject` names it."""

import dataclasses

from jaxtrain.config import lookup
from jaxtrain.errors import UserError

STEP, PHASE, LATEST = "step", "phase", "latest"

PHASES = {
    "data": "the data set is opened, the first batch is read",
    "compile": "the first step compiles",
    "checkpoint": "a checkpoint is being written",
    "evaluation": "an evaluation runs",
    "end": "the last step is done: the last checkpoint, the test split, the summary",
    "any": "any moment from the start of Python on",
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """One fault: what is done to the run, where it may fall, and what the run answers.

    `exit_code` is that of the process in which it falls, 128 + 9 for a SIGKILL; `ends` is whether it falls into a
    process and ends it, so that the run must be started again.
    """

    doc: str
    answer: str
    where: tuple[str, ...]
    exit_code: int = 0
    ends: bool = True


KINDS = {
    "kill": Kind(
        "SIGKILL",
        "the next start resumes from the newest good checkpoint",
        (STEP, PHASE),
        137,
    ),
    "sigterm": Kind(
        "SIGTERM",
        "the step is finished and saved, exit 143 within 20 s",
        (STEP, PHASE),
        143,
    ),
    "sigint": Kind(
        "SIGINT (Ctrl-C)",
        "the step is finished and saved, exit 130 within 20 s",
        (STEP, PHASE),
        130,
    ),
    "usr1": Kind(
        "SIGUSR1 (a cluster's notice of preemption)",
        "the step is finished and saved, exit 143 within 20 s",
        (STEP, PHASE),
        143,
    ),
    "corrupt": Kind(
        "one bit of the newest checkpoint is flipped between two starts",
        "told, passed over for the one before, not deleted",
        (LATEST,),
        ends=False,
    ),
    "halve": Kind(
        "the largest file of the newest checkpoint loses its second half between two starts",
        "told, passed over for the one before, not deleted",
        (LATEST,),
        ends=False,
    ),
    "empty": Kind(
        "the folder of the newest checkpoint is emptied between two starts",
        "told, passed over for the one before, not deleted",
        (LATEST,),
        ends=False,
    ),
    "diskfull": Kind(
        "from this step on no file grows",
        "exit 5 naming the file; the last good checkpoint stays",
        (STEP,),
        5,
    ),
    "readonly": Kind(
        "from this step on the workdir takes no new file",
        "exit 5 naming the file; the last good checkpoint stays",
        (STEP,),
        5,
    ),
    "vanish": Kind(
        "the workdir is moved away at this step, and back before the next start",
        "exit 5 naming it; no run begins anew in its place",
        (STEP,),
        5,
    ),
    "hang": Kind(
        "the feed stands still from this step on, with config.hang_minutes at a few seconds",
        "the stacks of all threads go to hang.txt, exit 4",
        (STEP,),
        4,
    ),
    "second": Kind(
        "at this step the same command is started a second time",
        "the second is refused with exit 2, the first goes on",
        (STEP,),
        ends=False,
    ),
    "nan": Kind(
        "the loss of an example in the batch of this step is NaN",
        "as config.on_nonfinite says: stop (exit 3 naming step, array and examples), skip or roll back",
        (STEP,),
        3,
        ends=False,
    ),
}


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault and its moment: `where` is a step, a phase or "latest".

    A phase counts from step `after` on; -1 is before the first batch. `seconds` into the phase, or after the
    beginning of the step, it falls; at the latest when the phase ends.
    """

    kind: str
    where: str
    after: int = -1
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind}@{self.where}"

    @property
    def step(self) -> int:
        """The step that it falls on; 0 where that is no single step."""
        return int(self.where) if self.where.isdecimal() else 0

    @property
    def is_told_by_phase(self) -> bool:
        return self.where in PHASES

    @property
    def ends(self) -> bool:
        return KINDS[self.kind].ends

    @property
    def exit_code(self) -> int:
        return KINDS[self.kind].exit_code


def parse(text: str) -> list[Fault]:
    """The faults of "sigterm@120,kill@checkpoint,corrupt@latest". Raises UserError, one line, for any other text."""
    faults = [_one(part.strip()) for part in text.split(",") if part.strip()]
    for fault in faults[:-1]:
        if fault.kind == "second":
            raise UserError(f"--inject: {fault} lets the run go on to its end; put it last")
    steps = [fault for fault in faults if fault.step and fault.kind != "nan"]
    for before, fault in zip(steps, steps[1:], strict=False):
        if fault.step <= before.step:
            raise UserError(f"--inject: {fault} comes after {before}, when its step is over; order them by step")
    return faults


def _one(text: str) -> Fault:
    name, at, where = text.partition("@")
    if name not in KINDS:
        raise UserError(f"--inject: unknown fault {name!r}.{lookup.choices_hint(name, KINDS)}")
    legal = KINDS[name].where
    fits = {STEP: where.isdecimal() and int(where) > 0, PHASE: where in PHASES, LATEST: where == LATEST}
    if not at or not any(fits[kind] for kind in legal):
        forms = {STEP: f"{name}@120 (a step)", PHASE: f"{name}@ one of {', '.join(PHASES)}", LATEST: f"{name}@latest"}
        expected = " or ".join(forms[kind] for kind in legal)
        near = lookup.nearest(where, PHASES) if PHASE in legal else ""
        raise UserError(f"--inject: {text!r} says no moment, expected {expected}" + (f"; {near}?" if near else ""))
    return Fault(name, str(int(where)) if where.isdecimal() else where)
