"""One process of a run under `jaxtrain.verify`: the command that a user would give, with a fault arranged around it.

    python -m jaxtrain.rehearsal.rehearse PLAN PLAN is a `Plan` as JSON

The training path knows nothing of this. The functions that mark where a run is are wrapped before it starts; each
passes on what it got, tells the parent through a pipe (no file: the disk may be full) and lets the fault fall.
"""

import contextlib
import dataclasses
import functools
import json
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from jaxtrain import exits
from jaxtrain import main as entry
from jaxtrain.machine import devices
from jaxtrain.rehearsal import inflict
from jaxtrain.rehearsal.faults import Fault


@dataclasses.dataclass(frozen=True)
class Plan:
    """arguments: of `jaxtrain.main`. notes: the descriptor of the pipe to the parent, JSON lines.

    goal: the step after which the run ends itself with a SIGTERM; 0: none. seconds: after which it takes the step
    that it is at for its goal; 0: never. poison: data positions whose loss is NaN; None: the step is as it is.
    """

    arguments: tuple[str, ...]
    workdir: str
    goal: int = 0
    seconds: float = 0.0
    fault: Fault | None = None
    poison: tuple[int, ...] | None = None
    notes: int = -1

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        content = json.loads(text)
        lists = {name: tuple(value) for name, value in content.items() if isinstance(value, list)}
        fault = content["fault"] and Fault(**content["fault"])
        return cls(**content | lists | {"fault": fault})


class Stage:
    """Where the run is; tells the parent, and lets the fault fall."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.loop: Any = None  # jaxtrain.train.Loop, once it runs
        self._began = time.monotonic()
        self._fallen = threading.Lock()
        self._armed: threading.Timer | None = None
        self._ending = False

    @property
    def step(self) -> int:
        """The last step handed to the device; -1 before the loop."""
        return -1 if self.loop is None else int(self.loop.step)

    def note(self, **facts: Any) -> None:
        """One line to the parent. A single small write: a SIGKILL cannot tear it."""
        os.write(self.plan.notes, json.dumps(facts).encode() + b"\n")

    @contextlib.contextmanager
    def phase(self, name: str, step: int | None = None) -> Iterator[None]:
        """Marks a phase, at `step`; a fault that is due in it falls before it is over."""
        began, fault, at = time.monotonic(), self.plan.fault, self.step if step is None else step
        timer = self._arm(fault) if fault is not None and fault.where == name and at >= fault.after else None
        try:
            yield
        finally:
            self.note(phase=name, at=at, seconds=time.monotonic() - began)
            if timer:
                timer.cancel()
                self.fall()

    def begin_step(self) -> None:
        """Called before a batch is handed to the next step."""
        fault, step = self.plan.fault, self.step + 1
        if fault is not None and fault.step and step >= fault.step:
            if fault.kind != "kill":
                self.fall()
            elif not self._armed:  # it falls somewhere in the step
                self._armed = self._arm(fault)
        late = self.plan.seconds and time.monotonic() - self._began > self.plan.seconds
        if (late or step == self.plan.goal) and not self._ending:
            self._ending = True
            self.note(goal=step)
            inflict.sigterm(self.plan)

    def steps_until(self, limit: int) -> int:
        """How many of the next `limit` steps may be dispatched at once."""
        fault = self.plan.fault
        stops = [self.plan.goal, fault.step if fault is not None else 0]
        return min([limit, *(stop - self.step - 1 for stop in stops if stop > self.step + 1)])

    def _arm(self, fault: Fault) -> threading.Timer:
        timer = threading.Timer(fault.seconds, self.fall)
        timer.daemon = True
        timer.start()
        return timer

    def fall(self) -> None:
        """The fault happens, once."""
        if self.plan.fault is None or not self._fallen.acquire(blocking=False):
            return
        self.note(fault=str(self.plan.fault), at=self.step, time=time.time())
        if told := inflict.ACTS[self.plan.fault.kind](self.plan):
            self.note(**told)


def arrange(stage: Stage, rest: contextlib.ExitStack) -> None:
    """Wraps what marks where a run is; the phase of its end lasts until `rest` is closed.

    Imports JAX, before whose import `devices.quiet` must have run.
    """
    from jaxtrain import supply, train
    from jaxtrain.job import Job
    from jaxtrain.loop import advance, loop, nonfinite
    from jaxtrain.rehearsal import poison
    from jaxtrain.storage.checkpoint import Checkpoints

    _wrap(train, "build", _within(stage, "data"))
    _wrap(Job, "evaluate", _within(stage, "evaluation"))
    _wrap(loop.Loop, "run", functools.partial(_run, stage))
    batches = _Batches(stage)
    _wrap(loop, "plain_advance", batches.advanced)
    _wrap(loop, "open_intake", batches.opened)
    saves = _Saves(stage)
    _wrap(Checkpoints, "save", saves.begun)
    _wrap(Checkpoints, "_finish", saves.finished)
    _wrap(train, "finish", functools.partial(_ended, stage, rest))
    if stage.plan.poison is not None:
        _wrap(supply, "for_step", poison.poisonable)
        _wrap(advance, "batch_of", functools.partial(poison.found, stage.plan.poison))
        _wrap(nonfinite, "batch_at", functools.partial(poison.again, stage.plan.poison))


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Puts `around(original, …)` in the place of `owner.name`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **options: Any) -> Any:
        return around(original, *args, **options)

    setattr(owner, name, wrapped)


def _within(stage: Stage, phase: str) -> Callable[..., Any]:
    def around(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with stage.phase(phase):
            return original(*args, **options)

    return around


def _run(stage: Stage, original: Callable[..., Any], loop: Any) -> Any:
    stage.loop = loop
    platform = loop.job.mesh.devices.flat[0].platform
    stage.note(start=stage.step, checkpoints=_listing(stage), platform=platform)
    if stage.plan.goal and stage.step >= stage.plan.goal:
        inflict.sigterm(stage.plan)
    return original(loop)


def _ended(stage: Stage, rest: contextlib.ExitStack, original: Callable[..., Any], *args: Any) -> Any:
    stage.note(end=stage.step)
    rest.enter_context(stage.phase("end"))
    return original(*args)


class _Batches:
    """From the data to the step: the data phase lasts until the first batch, the first dispatch compiles."""

    def __init__(self, stage: Stage):
        self._stage = stage
        self._offset = 0
        self._phase = contextlib.ExitStack()

    def opened(self, original: Callable[..., Any], job: Any, position: int) -> Any:
        """What the loop takes from, watched."""
        self._phase.close()
        self._phase.enter_context(self._stage.phase("data"))
        self._offset = position - self._stage.step
        return _Watched(original(job, position), self)

    def taken(self, take: Callable[[int], tuple[Any, int]], limit: int) -> tuple[Any, int]:
        """A dispatch ends where a fault or the goal is due, so that it falls at that step."""
        self._stage.begin_step()
        data, steps = take(self._stage.steps_until(limit))
        self._phase.close()
        return data, steps

    def advanced(self, original: Callable[..., Any], job: Any) -> Callable[..., Any]:
        """The program; the ids of each batch that it took are told."""
        from jaxtrain.loop.intake import batch_of

        advance, first, stage = original(job), True, self._stage
        ids = _ids(batch_of(job))

        def told(state: Any, sums: Any, data: Any, steps: int) -> Any:
            nonlocal first
            with stage.phase("compile") if first else contextlib.nullcontext():
                result = advance(state, sums, data, steps)
            first = False
            for step in range(stage.step, stage.step + steps):
                stage.note(step=step + 1, offset=self._offset, ids=ids(data, step + self._offset))
            return result

        return told


class _Watched:
    """An intake whose `take` the stage sees."""

    def __init__(self, intake: Any, batches: _Batches):
        self._intake, self._batches = intake, batches

    @property
    def waited(self) -> float:
        return float(self._intake.waited)

    def take(self, limit: int) -> tuple[Any, int]:
        return self._batches.taken(self._intake.take, limit)

    def __enter__(self) -> "_Watched":
        self._intake.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._intake.__exit__(*exception)


class _Saves:
    """A save lasts from its call until the thread in the background is done."""

    def __init__(self, stage: Stage):
        self._stage = stage
        self._phase = contextlib.ExitStack()

    def begun(self, original: Callable[..., Any], checkpoints: Any, step: int, *args: Any, **options: Any) -> Any:
        checkpoints.wait()
        self._phase.enter_context(self._stage.phase("checkpoint", step))
        try:
            return original(checkpoints, step, *args, **options)
        except BaseException:
            self._phase.close()
            raise

    def finished(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with self._phase:
            return original(*args, **options)


def _listing(stage: Stage) -> list[str]:
    """What lies in the folder of checkpoints."""
    try:
        return sorted(os.listdir(os.path.join(stage.plan.workdir, "checkpoints")))
    except FileNotFoundError:
        return []


def _ids(find: Callable[..., Any]) -> Callable[[Any, int], int]:
    """(data, position) → CRC-32 of the ids of the batch there, as the program finds it and read from the device."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    found = jax.jit(lambda data, position: find(data, position)["id"])

    def checksum(data: Any, position: int) -> int:
        with jax.transfer_guard("allow"):
            return zlib.crc32(np.ascontiguousarray(found(data, jnp.int32(position))).tobytes())

    return checksum


def main(argv: list[str] | None = None) -> int:
    exits.on_signal()  # as the command itself does
    plan = Plan.from_json((sys.argv[1:] if argv is None else argv)[0])
    stage = Stage(plan)
    devices.quiet()
    with stage.phase("any"), contextlib.ExitStack() as rest:
        arrange(stage, rest)
        return entry.main(list(plan.arguments))


if __name__ == "__main__":
    sys.exit(main())
