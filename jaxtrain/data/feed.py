"""Batches on the device: a thread puts what the host decoded onto the mesh, ahead of the consumer."""

import collections
import contextlib
import functools
import operator
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxtrain.data import damage, host
from jaxtrain.data.order import Plan
from jaxtrain.data.sources import Batch, Source
from jaxtrain.errors import UserError

_JOIN_SECONDS = 10.0


class Feed(Iterator[dict[str, jax.Array]]):
    """The batches of steps start..stop-1 (stop None: for ever) as global arrays [B, ...], sharded as told.

    `plan(step)` says what the step loads. (ids, epochs), as from `order.ids`: the batch has the source's arrays,
    "id" and "epoch" (int32 [B]). Ids alone: it has "id" and "mask" (bool [B]), which is False where the id is
    -1; there the arrays hold another example. A source that bears damaged examples has a "mask" in any case, False
    for those too. The plan does not know of devices or processes: each process loads the rows that lie on its devices.
    `varies`: the source is what a VaryingSource is for training, and is asked for numbers of which the epoch is a part.
    `stack` n: the batches of n steps at once, arrays [n, B, ...]. `check(batch)` sees each batch as numpy arrays first,
    and may raise.

    An exception on the way is raised by `next`. `waited` counts the seconds that the consumer spent in `next`.
    Use it as a context manager, or call `close()`; a feed that is dropped closes itself.
    Raises UserError where B does not divide over the devices.
    """

    def __init__(
        self,
        source: Source,
        plan: Plan,
        sharding: Sharding,
        *,
        start: int = 0,
        stop: int | None = None,
        prefetch: int = 2,
        threads: int = 0,
        kind: str = "auto",
        varies: bool = False,
        stack: int = 0,
        check: Callable[[Batch], None] = lambda batch: None,
    ):
        rows = _local_rows(sharding, len(_columns(plan(start))["id"]))
        columns = functools.partial(_local_columns, plan, rows)
        loaded = host.batches(
            source,
            lambda step: _numbers(columns(step), len(source) if varies else 0),
            start,
            stop,
            threads=threads,
            lookahead=prefetch * max(1, stack),
            kind=kind,
        )
        join = operator.or_ if damage.of(source) is None else _joined
        made = _made(loaded, columns, join, start, check, stack)
        self.waited = 0.0
        self._buffer = _Buffer(max(1, prefetch))
        # The thread must not hold the feed, or a feed that is dropped would live for ever.
        thread = threading.Thread(
            target=_fill,
            args=(self._buffer, made, functools.partial(_put, _of_stack(sharding) if stack else sharding)),
            name="jaxtrain-feed",
            daemon=True,
        )
        self._end = weakref.finalize(self, _end, self._buffer, thread)
        thread.start()

    def __next__(self) -> dict[str, jax.Array]:
        began = time.monotonic()
        try:
            return self._buffer.take()
        finally:
            self.waited += time.monotonic() - began

    def close(self) -> None:
        """Ends the threads, also while they or the consumer wait. The feed is then exhausted."""
        self._end()

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Buffer:
    """A bounded queue of one producer; it ends with an exception, and either side may end it at once."""

    def __init__(self, size: int):
        self._items: collections.deque[dict[str, jax.Array]] = collections.deque()
        self._size, self._change = size, threading.Condition()
        self._error: BaseException | None = None  # raised once the items are taken

    def put(self, item: dict[str, jax.Array]) -> bool:
        """Waits for room; False where the buffer was closed instead."""
        with self._change:
            self._change.wait_for(lambda: self._error or len(self._items) < self._size)
            if self._error:
                return False
            self._items.append(item)
            self._change.notify_all()
            return True

    def take(self) -> dict[str, jax.Array]:
        with self._change:
            self._change.wait_for(lambda: self._error or self._items)
            if self._items:
                self._change.notify_all()
                return self._items.popleft()
            assert self._error is not None
            raise self._error

    def end(self, error: BaseException, *, drop: bool = False) -> None:
        """No more items: the consumer gets those that are there, unless dropped, then `error` for ever."""
        with self._change:
            self._error = self._error or error
            if drop:
                self._items.clear()
            self._change.notify_all()


def _made(
    loaded: Generator[Batch, None, None],
    columns: Callable[[int], Batch],
    join: Callable[[Batch, Batch], Batch],
    step: int,
    check: Callable[[Batch], None],
    stack: int,
) -> Generator[Batch, None, None]:
    """The batches, joined and checked; with `stack`, so many of them as one."""
    group = []
    with contextlib.closing(loaded):
        for arrays in loaded:
            batch = join(arrays, columns(step))
            check(batch)
            step += 1
            group.append(batch)
            if len(group) < stack:
                continue
            yield {key: np.stack([each[key] for each in group]) for key in batch} if stack else batch
            group = []


def _fill(buffer: _Buffer, made: Generator[Batch, None, None], put: Callable[[Batch], dict[str, jax.Array]]) -> None:
    """The thread: loads, checks and transfers until the batches end or the buffer is closed."""
    try:
        with contextlib.closing(made):
            for batch in made:
                if not buffer.put(put(batch)):
                    return
        buffer.end(StopIteration())
    except BaseException as error:
        buffer.end(error)


def _end(buffer: _Buffer, thread: threading.Thread) -> None:
    buffer.end(StopIteration(), drop=True)
    if thread is not threading.current_thread():  # a collected feed may be finalised in any thread
        thread.join(_JOIN_SECONDS)


def _columns(planned: Any) -> Batch:
    """What the plan itself adds to a batch."""
    if isinstance(planned, tuple):
        return {"id": planned[0], "epoch": planned[1]}
    return {"id": planned, "mask": planned >= 0}


def _numbers(columns: Batch, size: int) -> np.ndarray:
    """What a source is asked for: ids, or for one that varies by the epoch, in a set of `size`, epoch · size + id."""
    if size:
        return columns["epoch"].astype(np.int64) * size + columns["id"]
    return np.maximum(columns["id"], 0)


def _joined(arrays: Batch, columns: Batch) -> Batch:
    """What was loaded and what the plan adds; `mask` may be of both, where there is no example or a damaged one."""
    return arrays | columns | {"mask": arrays["mask"] & columns.get("mask", np.True_)}


def _local_columns(plan: Plan, rows: np.ndarray | slice, step: int) -> Batch:
    return {key: column[rows] for key, column in _columns(plan(step)).items()}


def _local_rows(sharding: Sharding, size: int) -> np.ndarray | slice:
    """The rows of a batch of `size` that lie on this process's devices, sorted; all, in a single process."""
    try:
        sharding.shard_shape((size,))
    except ValueError as error:
        raise UserError(
            f"a batch of {size} does not divide over the devices: expected a multiple of the data axis of "
            f"{getattr(sharding, 'mesh', sharding)}"
        ) from error
    if sharding.is_fully_addressable:
        return slice(None)
    shards = sharding.addressable_devices_indices_map((size,)).values()
    return np.unique(np.concatenate([np.arange(size)[index] for index in shards if index is not None]))


def _of_stack(sharding: Sharding) -> Sharding:
    """Where [n, B, ...] lies whose batches [B, ...] lie as told."""
    assert isinstance(sharding, NamedSharding)
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))


def _put(sharding: Sharding, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Local rows → global arrays. The arrays are new for each batch, so sharing their memory is safe."""
    if sharding.is_fully_addressable:
        return jax.device_put(dict(batch), sharding)
    return {key: jax.make_array_from_process_local_data(sharding, array) for key, array in batch.items()}
