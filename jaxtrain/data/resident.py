"""A whole data set on the device: uploaded once, and batches gathered inside the compiled step.

The order, the columns and the augmentation are those of the stream, so both give the same batches to the bit.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxtrain import sharding
from jaxtrain.data import damage, host
from jaxtrain.data.order import Shuffled
from jaxtrain.data.sources import Batch, Source, VaryingSource, example_bytes
from jaxtrain.machine.hardware import memory

SHARE = 4  # a set may take one part in so many of a device's memory: the rest is the model's
UNKNOWN = 4 << 30  # bytes, where a device does not tell how many it has
READ_AT_ONCE = 1 << 22  # bytes of examples


def obstacle(source: Source, mesh: Mesh) -> str:
    """Why this set cannot be resident, to end a sentence with; "" where it can."""
    if isinstance(source, VaryingSource):
        return "its examples are drawn anew on the host in each epoch"
    if damage.of(source) is not None:
        return "damaged examples are left out as they are read (config.data.max_corrupt)"
    size, room = example_bytes(source) * len(source), _room(mesh)
    if size > room:
        return f"{_shown(size)} are more than the {_shown(room)} that a set may take of a device's memory"
    return ""


def upload(
    source: Source, mesh: Mesh, check: Callable[[Batch], None], *, threads: int = 0, kind: str = "auto"
) -> dict[str, jax.Array]:
    """The set as arrays [N, ...], whole on every device. TensorFlow is needed only where `kind` is "tf.data".

    Raises what reading it raises, and what `check` does, which sees the examples in pieces.
    """
    everywhere, columns = sharding.replicated(mesh), read(source, check, threads=threads, kind=kind)
    return {
        name: jax.make_array_from_callback(column.shape, everywhere, column.__getitem__)
        for name, column in columns.items()
    }


def read(source: Source, check: Callable[[Batch], None], *, threads: int = 0, kind: str = "auto") -> Batch:
    """The examples of a source in the order of their ids, arrays [N, ...]."""
    size = len(source)
    piece = max(1, min(size, READ_AT_ONCE // max(1, example_bytes(source))))
    columns = {name: np.empty((size, *leaf.shape), leaf.dtype) for name, leaf in source.spec.items()}
    kind = "threads" if kind == "auto" else kind

    def ids(number: int) -> np.ndarray:
        return np.minimum(np.arange(number * piece, (number + 1) * piece), size - 1)

    pieces = host.batches(source, ids, 0, math.ceil(size / piece), threads=threads, kind=kind)
    for number, batch in enumerate(pieces):
        check(batch)
        rows = slice(number * piece, min((number + 1) * piece, size))
        for name, column in columns.items():
            column[rows] = batch[name][: rows.stop - rows.start]
    return columns


def batch(columns: Mapping[str, jax.Array], position: jax.Array, plan: Shuffled, mesh: Mesh) -> dict[str, jax.Array]:
    """The batch at a data position (int32 []), inside a program: as the feed gives it, on the same devices."""
    over_batch = sharding.over_batch(mesh)
    ids, epochs = (jax.lax.with_sharding_constraint(each, over_batch) for each in plan.traced(position))  # [B]
    rows = {name: column.at[ids].get(mode="promise_in_bounds") for name, column in columns.items()}  # [B, ...]
    rows = {name: jax.lax.with_sharding_constraint(each, over_batch) for name, each in rows.items()}
    # What computes on the batch is compiled as it is for one that comes from outside.
    return jax.lax.optimization_barrier(rows | {"id": ids, "epoch": epochs})


class Kept:
    """The batches of an evaluation, kept on the device after the first time that all of them were made."""

    def __init__(self, feed: Callable[[], Any]):
        self._feed, self._batches = feed, list[dict[str, jax.Array]]()
        self._whole = False

    def __iter__(self) -> Iterator[dict[str, jax.Array]]:
        if self._whole:
            yield from self._batches
            return
        self._batches.clear()
        with self._feed() as batches:
            for each in batches:
                self._batches.append(each)
                yield each
        self._whole = True


def _room(mesh: Mesh) -> int:
    """Bytes that a set may take on each device. CPU devices share the machine's memory."""
    device = mesh.local_mesh.devices.flat[0]
    if device.platform == "cpu":
        total = (memory() or UNKNOWN) // mesh.local_mesh.size
    else:
        total = (device.memory_stats() or {}).get("bytes_limit", UNKNOWN)
    return total // SHARE


def _shown(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**29 else f"{size / 2**20:.0f} MiB"
