"""What the processes of a run must have in common: the run itself, and the moment at which they stop or save.

A signal reaches one process, and clocks differ: acted on alone, either would leave the others for ever in a
collective that one of them does not enter. So whoever wants something says so in JAX's key-value store. Then every
process holds before its next step and says how many it has handed out; the wish is granted to all of them after one
step more than the furthest has. No step costs more than a lock; no device takes part.

    process 0   step 40   step 41 | held   says 41            step 42, acts
    process 1   step 40 | held             says 40   step 41, step 42, acts
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import operator
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain import config as configs
from jaxtrain import exits
from jaxtrain.errors import UserError
from jaxtrain.job import Job
from jaxtrain.loop.stopping import Stopped
from jaxtrain.machine import distributed

LISTENING = 0.5  # seconds between two looks: how long a wish waits, and a process is held, at most
# Keys that may differ between hosts: none of them changes what a step computes, or when.
OF_A_HOST = ("threads", "prefetch", "loader", "compile_cache", "device_memory", "distributed", "join_minutes")


@dataclasses.dataclass(frozen=True)
class Wishes:
    """What signals and clocks ask of the loop."""

    signal: int = 0  # the number of one that came
    end: bool = False  # `max_minutes` are over
    save: bool = False  # `checkpoint.minutes` have passed

    def __or__(self, other: "Wishes") -> "Wishes":
        return Wishes(max(self.signal, other.signal), self.end or other.end, self.save or other.save)

    def beyond(self, granted: "Wishes") -> "Wishes":
        """Those that are not granted yet."""
        return Wishes(
            self.signal if self.signal > granted.signal else 0,
            self.end and not granted.end,
            self.save and not granted.save,
        )


class Alone:
    """A single process, which grants itself at once what it wishes."""

    def __init__(self, own: Callable[[], Wishes]):
        self._own = own

    @property
    def granted(self) -> Wishes:
        """What to act on now."""
        return self._own()

    @property
    def exit_code(self) -> int:
        """130 for Ctrl-C, 143 for SIGTERM and SIGUSR1; 0 without a signal."""
        signal = self.granted.signal
        return exits.CODES[signal] if signal else 0

    def why(self) -> str:
        """What came, to end a sentence with."""
        signal = self.granted.signal
        return f": {exits.name(signal)}" if signal else ""

    def tick(self) -> None:
        """A step, or a batch of an evaluation, was handed to the device."""

    def check(self) -> None:
        """A tick that raises Stopped when a signal came."""
        self.tick()
        if self.granted.signal:
            raise Stopped

    def saved(self) -> None:
        """The wish to save is fulfilled."""

    def __enter__(self) -> "Alone":
        return self

    def __exit__(self, *exception: object) -> None:
        pass


class Together(Alone):
    """One of several processes. All are granted the same at the same tick, so all must tick equally often."""

    def __init__(
        self, own: Callable[[], Wishes], client: Any, key: str, number: int, processes: int, meet: Callable[[], None]
    ):
        super().__init__(own)
        self._client, self._key, self._number, self._processes, self._meet = client, key, number, processes, meet
        self._granted = Wishes()
        self._ticks, self._held = 0, False
        self._due: tuple[int, Wishes] | None = None  # what is granted, and at which tick
        self._change = threading.Condition()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="jaxtrain-agreement", daemon=True)

    @property
    def granted(self) -> Wishes:
        return self._granted

    def tick(self) -> None:
        with self._change:
            self._change.wait_for(lambda: not self._held)
            self._ticks += 1
            if self._due is not None and self._due[0] == self._ticks:
                self._granted |= self._due[1]
                self._due = None

    def saved(self) -> None:
        with self._change:
            self._granted = dataclasses.replace(self._granted, save=False)

    def __enter__(self) -> "Together":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:
            self._meet()  # until then a process that still ticks may be held, and needs this one's answer
        self._over.set()
        self._thread.join()

    def _listen(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone: JAX ends this process
            for count in itertools.count():
                if not self._wished(f"{self._key}/{count}") or not self._settled(f"{self._key}/{count}"):
                    return
                while self._due is not None:  # only then can the next wish be told from this one
                    if self._over.wait(LISTENING):
                        return

    def _wished(self, key: str) -> bool:
        """Waits until any process wishes something; False where the run is over instead."""
        while not self._over.wait(LISTENING):
            with contextlib.suppress(RuntimeError):  # told already, by another one
                if self._own().beyond(self._granted) != Wishes():
                    self._client.key_value_set(f"{key}/wished", "")
            with contextlib.suppress(RuntimeError):  # not there
                self._client.key_value_try_get(f"{key}/wished")
                return True
        return False

    def _settled(self, key: str) -> bool:
        """Holds this process until all have said where they are; False where the run is over instead."""
        with self._change:
            self._held, here = True, self._ticks
        own = self._own().beyond(self._granted)
        self._client.key_value_set(f"{key}/at/{self._number}", json.dumps([here, dataclasses.astuple(own)]))
        while len(answers := self._client.key_value_dir_get(f"{key}/at/")) < self._processes:
            if self._over.wait(0.02):
                return False
        places, wishes = zip(*(json.loads(text) for _, text in answers), strict=True)
        with self._change:
            self._due = max(places) + 1, functools.reduce(operator.or_, (Wishes(*each) for each in wishes))
            self._held = False
            self._change.notify_all()
        return True


def reached(own: Callable[[], Wishes]) -> Alone:
    """How this process is granted its wishes, alone or together with the others."""
    processes = distributed.processes()
    if processes == 1:
        return Alone(own)
    key = distributed.next_key("agreement")
    return Together(own, distributed.store(), key, distributed.number(), processes, distributed.meet)


def begin(job: Job, workdir: Path | None) -> None:
    """Returns when all processes are here, with the same run, and their devices have found each other.

    Raises UserError in a process that was started with another config than process 0, or sees other data.
    """
    if distributed.processes() == 1:
        return
    _refuse_another_run(job, workdir)
    # The first collective of a group of devices waits for half a minute only (gloo), and then the run is over. Now all
    # are here; later, one may still compile.
    distributed.meet()
    axes = job.mesh.axis_names
    for group in [axes, *((axis,) for axis in axes)]:
        jax.block_until_ready(_summed(job.mesh, group))
    multihost_utils.broadcast_one_to_all(np.int32(0))  # the groups in which orbax saves


def _summed(mesh: Mesh, group: tuple[str, ...]) -> jax.Array:
    """A sum over these axes of the mesh."""
    each = PartitionSpec(mesh.axis_names)
    ones = jax.make_array_from_callback((mesh.size,), NamedSharding(mesh, each), lambda at: np.ones(1, np.int32))
    add = functools.partial(jax.lax.psum, axis_name=group)
    return jax.jit(jax.shard_map(add, mesh=mesh, in_specs=each, out_specs=each, check_vma=False))(ones)


def _refuse_another_run(job: Job, workdir: Path | None) -> None:
    own = _facts(job, workdir)
    there = distributed.from_first(own)
    differing = [f"{key} {there.get(key)!r} → {own.get(key)!r}" for key in own if own[key] != there.get(key)]
    if differing:
        raise UserError(
            f"this process was given another run than process 0: {'; '.join(differing[:3])}; start all with one "
            "command, or independent runs with --config.distributed=off"
        )


def _facts(job: Job, workdir: Path | None) -> dict[str, Any]:
    """What must be equal in all processes, as JSON gives it back."""
    facts = json.loads(configs.to_json(job.config))
    for key in OF_A_HOST:
        facts.pop(key)
    facts["data"].pop("dir", None)
    facts |= {"workdir": str(workdir), "precision": job.policy.name, "jax": jax.__version__}
    return facts | {f"{role} examples": len(source) for role, source in job.sources.items()}
