"""What a dispatch is given to take its batches from: the stream, or the set that lies on the device.

`take(limit)` returns (data, n): the arrays for the compiled program, and for how many steps, 1 to `limit`, they and one
dispatch are good. `batch_of(job)` is what finds the batch of a position in them, inside the program.
"""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

from jaxtrain import sharding
from jaxtrain.data import resident
from jaxtrain.job import Job

Batch = dict[str, jax.Array]


class Intake(Protocol):
    """A context manager over one stretch of the run."""

    @property
    def waited(self) -> float:
        """Seconds that `take` has spent waiting for data."""

    def take(self, limit: int) -> tuple[Any, int]: ...

    def __enter__(self) -> "Intake": ...

    def __exit__(self, *exception: object) -> None: ...


class Streamed:
    """Batches from the host, one a dispatch or `job.steps_per_dispatch` in a stack."""

    def __init__(self, job: Job, position: int):
        self._width = job.steps_per_dispatch
        self._everywhere = sharding.replicated(job.mesh)
        self._feed = job.batches(position, stack=self._width if self._width > 1 else 0)
        self._position = self._end = position  # of the next batch; of the next stack
        self._data: Any = None

    @property
    def waited(self) -> float:
        return self._feed.waited

    def take(self, limit: int) -> tuple[Any, int]:
        if self._width == 1:
            return next(self._feed), 1
        if self._position == self._end:
            self._data = next(self._feed), jax.device_put(np.int32(self._end), self._everywhere)
            self._end += self._width
        steps = min(limit, self._end - self._position)
        self._position += steps
        return self._data, steps

    def __enter__(self) -> "Streamed":
        return self

    def __exit__(self, *exception: object) -> None:
        self._feed.close()


class Resident:
    """The whole set, again and again."""

    waited = 0.0

    def __init__(self, job: Job, position: int):
        self._columns, self._width = job.columns, job.steps_per_dispatch

    def take(self, limit: int) -> tuple[Any, int]:
        return self._columns, min(limit, self._width)

    def __enter__(self) -> "Resident":
        return self

    def __exit__(self, *exception: object) -> None:
        pass


def open_intake(job: Job, position: int) -> Intake:
    """From data position `position` on. Where the set is resident, it is uploaded here, once."""
    return Streamed(job, position) if job.streamed_for else Resident(job, position)


def batch_of(job: Job) -> Callable[[Any, jax.Array], Batch]:
    """(data, position) → the batch [B, ...]; data as the intake gives it, position int32 []."""
    if not job.streamed_for:
        return functools.partial(resident.batch, plan=job.plan, mesh=job.mesh)
    return _the_only_one if job.steps_per_dispatch == 1 else _of_stack


def _the_only_one(batch: Batch, position: jax.Array) -> Batch:
    return batch


def _of_stack(data: tuple[Batch, jax.Array], position: jax.Array) -> Batch:
    stack, first = data
    place = position - first
    batch = {name: jax.lax.dynamic_index_in_dim(x, place, keepdims=False) for name, x in stack.items()}
    return jax.lax.optimization_barrier(batch)
