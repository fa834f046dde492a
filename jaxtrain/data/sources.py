"""Where examples come from: random access by id, behind one small interface; a data set and its roles."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jaxtrain.data import roles
from jaxtrain.errors import UserError

Batch = dict[str, np.ndarray]  # each array [B, ...]
Spec = dict[str, jax.ShapeDtypeStruct]  # of ONE example

NOMINAL_SIZES = {
    "train": 512,
    "validation": 128,
    "test": 128,
}  # of a synthetic stand-in for a set not at hand


class DataAbsent(UserError):
    """The data set is known, but its data is not on this machine; `config.synthetic="if_absent"` mends it."""


@runtime_checkable
class Source(Protocol):
    """Random access to examples, from several threads; the same id gives the same example for ever."""

    @property
    def spec(self) -> Spec:
        """Shape and dtype of one example's arrays, known without reading one."""

    def __len__(self) -> int: ...

    def get(self, ids: np.ndarray) -> Batch:
        """The examples of `ids` (integers [B] in 0..len-1, any order, also repeated): new arrays [B, ...].

        A source that bears damaged examples says so with an attribute `damage`, a `jaxtrain.data.damage.Damage`.
        """


@runtime_checkable
class EncodedSource(Source, Protocol):
    """A source of records that take time to decode: a reader may then decode them in parallel, in its own
    way.

    `get(ids)` is `decode(records(ids))`; `decode` and `decode_graph` give the same values to the bit.
    """

    def records(self, ids: np.ndarray) -> list[bytes]:
        """The records as stored: quick, undecoded."""

    def decode(self, records: Sequence[bytes]) -> Batch:
        """By numpy, in the calling thread. Raises any exception where a record is damaged."""

    def decode_graph(self, serialized: Any) -> dict[str, Any]:
        """By TensorFlow's graph operations, inside tf.data: string tensor [B] → tensors [B, ...]."""

    def describe(self, number: int) -> str:
        """Names one example to the user: the data set, and where in it."""


@runtime_checkable
class VaryingSource(Source, Protocol):
    """A source whose examples are others in each epoch of training, such as pictures of which a part is drawn."""

    def varied(self, seed: int) -> Source:
        """The same for training: example `id` of epoch e has number e · len + id (int64), of which alone, and of
        `seed`, it is a function."""


class ArraySource:
    """Arrays in memory or memory-mapped, one example a row; nothing is copied as a whole.

    float64 is served as float32 and wide integers as int32, a batch at a time. "label" must be integers;
    "image" uint8 or floats, and [N, H, W] is served as [N, H, W, 1]. Raises UserError for anything else, for
    unequal lengths, for no examples, and for integers that int32 does not hold.
    """

    def __init__(self, arrays: Mapping[str, Any]):
        self._arrays = {key: _checked(key, np.asanyarray(array)) for key, array in arrays.items()}
        lengths = {key: len(array) for key, array in self._arrays.items()}
        if len(set(lengths.values())) != 1 or not min(lengths.values()):
            found = ", ".join(f"{key}: {length}" for key, length in lengths.items()) or "no arrays"
            raise UserError(f"the arrays have {found} examples: expected the same number, one or more, in each")
        self._dtypes = {key: _served(key, array.dtype) for key, array in self._arrays.items()}
        self._size = lengths.popitem()[1]

    @property
    def spec(self) -> Spec:
        return {k: jax.ShapeDtypeStruct(a.shape[1:], self._dtypes[k]) for k, a in self._arrays.items()}

    def __len__(self) -> int:
        return self._size

    def get(self, ids: np.ndarray) -> Batch:
        return {k: a.take(ids, axis=0).astype(self._dtypes[k], copy=False) for k, a in self._arrays.items()}

    def column(self, key: str) -> np.ndarray:
        """One whole array as it was given: for labels, which are small."""
        return self._arrays[key]


class Subset:
    """The examples `ids` (int32 [n]) of another source, renumbered 0..n-1."""

    def __init__(self, source: Source, ids: np.ndarray):
        self.source, self.ids = source, ids

    @property
    def spec(self) -> Spec:
        return self.source.spec

    def __len__(self) -> int:
        return len(self.ids)

    def get(self, ids: np.ndarray) -> Batch:
        return self.source.get(self.ids[ids])

    @property
    def damage(self) -> Any:
        return getattr(self.source, "damage", None)


class EncodedSubset(Subset):
    """A subset of an encoded source, so encoded too."""

    source: EncodedSource

    def records(self, ids: np.ndarray) -> list[bytes]:
        return self.source.records(self.ids[ids])

    def decode(self, records: Sequence[bytes]) -> Batch:
        return self.source.decode(records)

    def decode_graph(self, serialized: Any) -> dict[str, Any]:
        return self.source.decode_graph(serialized)

    def describe(self, number: int) -> str:
        return self.source.describe(int(self.ids[number]))


def example_bytes(source: Source) -> int:
    """Of one example's arrays."""
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in source.spec.values())


def subset(source: Source, ids: np.ndarray) -> Subset:
    """The examples `ids` of `source`, in that order."""
    return EncodedSubset(source, ids) if isinstance(source, EncodedSource) else Subset(source, ids)


class SyntheticSource:
    """Examples made from their ids: a coarse pattern of the class under noise, so that training lowers the
    loss.

    Class of id i: i % num_classes. Patterns depend on the class alone, noise on (seed, id): sources of other
    seeds are other examples of the same classes. Costs two gathers a batch and 100 kB, whatever `size` is.
    """

    def __init__(self, spec: Spec, size: int, num_classes: int, seed: int = 0):
        self.spec, self._size, self._num_classes, self._seed = spec, size, num_classes, seed
        self._fields = {key: _pattern(field, num_classes) for key, field in spec.items() if field.shape}

    def __len__(self) -> int:
        return self._size

    def get(self, ids: np.ndarray) -> Batch:
        label = ids % self._num_classes
        # Knuth's multiplicative hash: neighbours get noise from far apart.
        mixed = (ids.astype(np.uint32) + np.uint32(self._seed)) * np.uint32(2654435761)
        offset = (mixed >> np.uint32(16)).astype(np.int64)  # [B] in 0.._NOISE-1
        return {key: self._field(key, label, offset) for key in self.spec}

    def _field(self, key: str, label: np.ndarray, offset: np.ndarray) -> np.ndarray:
        field = self.spec[key]
        if not field.shape:
            return label.astype(field.dtype)
        pattern, cell, noise = self._fields[key]
        pixels = pattern[label].take(cell, axis=1)  # [B, n]
        pixels += np.lib.stride_tricks.sliding_window_view(noise, cell.size)[offset]
        pixels = pixels.reshape(-1, *field.shape)  # [B, ...], 0..255
        if np.issubdtype(field.dtype, np.floating):
            return pixels.astype(field.dtype) / field.dtype.type(255)
        if field.dtype == np.uint8:
            return pixels
        return (pixels.astype(field.dtype) * self._num_classes // 256).astype(field.dtype)


@dataclasses.dataclass(frozen=True)
class Dataset:
    """What a data set's builder returns: everything known of it without its data, and how to open the data.

    `open()` gives role → source, roles among "train", "validation", "test"; it may download first, and raises
    DataAbsent where there is no data. `present()` says whether the data is on this machine. `sizes` (role →
    examples) may be empty where that is known only after opening.
    """

    name: str
    spec: Spec
    num_classes: int | None
    class_names: tuple[str, ...]
    open: Callable[[], dict[str, Source]]
    present: Callable[[], bool] = lambda: True
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    synthetic: bool = False


def from_arrays(
    train: Any,
    labels: Any = None,
    *,
    validation: Any = 0.1,
    test: Any = 0.2,
    num_classes: int | None = None,
    class_names: Sequence[str] = (),
    name: str = "arrays",
) -> Dataset:
    """A data set of arrays: `from_arrays(images, labels)` or `from_arrays({"image": ..., "label": ...})`.

    `validation` and `test` are shares of the arrays, cut off by class (0: no such role), or arrays of their
    own: (images, labels) or a dict. `num_classes` is the largest label + 1 unless given,
    or the length of labels [N, K] that are all 0 or 1. Dtypes are those of
    ArraySource, which also says what is refused.
    """
    whole = ArraySource(_named(train if labels is None else (train, labels)))
    given = {"validation": validation, "test": test}
    own = {role: ArraySource(_named(value)) for role, value in given.items() if not _is_share(value)}
    for role, source in own.items():
        if source.spec != whole.spec:
            raise UserError(f"{role} has {_words(source.spec)}; expected as train, {_words(whole.spec)}")
    shares = {role: 0.0 if role in own else float(value) for role, value in given.items()}
    opened = cut_source(whole, whole.column("label") if "label" in whole.spec else None, **shares) | own
    if num_classes is None and "label" in whole.spec:
        num_classes = max(_classes([source.column("label") for source in (whole, *own.values())]), len(class_names))
    return Dataset(
        name=name,
        spec=whole.spec,
        num_classes=num_classes,
        class_names=tuple(class_names),
        open=lambda: dict(opened),
        sizes={role: len(source) for role, source in opened.items()},
    )


def cut_source(source: Source, labels: np.ndarray | None, *, validation: float, test: float) -> dict[str, Source]:
    """One source cut into roles (`roles.split`): role → source. Only labels of rank 1 stratify."""
    by_class = labels if labels is not None and labels.ndim == 1 else None
    ids = roles.split(by_class, len(source), validation=validation, test=test)
    if len(ids) == 1:
        return {"train": source}
    return {role: subset(source, of_role) for role, of_role in ids.items()}


def synthetic(dataset: Dataset) -> Dataset:
    """A stand-in of the same shapes, classes and (where known, else nominal) sizes, which needs no data."""
    sizes = dict(dataset.sizes) or NOMINAL_SIZES
    num_classes = dataset.num_classes or 10

    def open_synthetic() -> dict[str, Source]:
        return {
            role: SyntheticSource(dataset.spec, size, num_classes, seed=list(NOMINAL_SIZES).index(role) << 24)
            for role, size in sizes.items()
        }

    return dataclasses.replace(dataset, open=open_synthetic, present=lambda: True, sizes=sizes, synthetic=True)


_NOISE = 1 << 16  # different noise fields, one for each value of a hash's upper half


def _pattern(field: jax.ShapeDtypeStruct, num_classes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(patterns uint8 [K, cells] in 0..191, the cell of each element int [n], noise uint8 in 0..63)."""
    random = np.random.default_rng(0)
    coarse = [min(4, size) for size in field.shape]
    axes = [np.arange(size) * cells // size for size, cells in zip(field.shape, coarse, strict=True)]
    cell = np.ravel_multi_index(np.meshgrid(*axes, indexing="ij"), coarse).ravel()
    pattern = random.integers(0, 192, (num_classes, math.prod(coarse)), np.uint8)
    return pattern, cell, random.integers(0, 64, cell.size + _NOISE - 1, np.uint8)


def _named(value: Any) -> dict[str, Any]:
    """Arrays as given in a call: a mapping, images, or (images, labels)."""
    if isinstance(value, Mapping):
        return dict(value)
    images, labels = value if isinstance(value, tuple) else (value, None)
    return {"image": images} if labels is None else {"image": images, "label": labels}


def _classes(labels: Sequence[np.ndarray]) -> int:
    """One more than the largest label; of rows of 0 and 1, which say which classes are there, their length."""
    largest = max(int(each.max()) for each in labels)
    return labels[0].shape[1] if labels[0].ndim == 2 and largest <= 1 else max(largest + 1, 1)


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float)


def _words(spec: Spec) -> str:
    return ", ".join(f"{key} {np.dtype(field.dtype)} {list(field.shape)}" for key, field in spec.items())


def _checked(key: str, array: np.ndarray) -> np.ndarray:
    """The array with an image's channel axis; UserError where it cannot be served."""
    kind, rank = array.dtype.kind, array.ndim
    if not rank or kind not in "biuf":
        raise UserError(f"array {key!r} is {array.dtype} {list(array.shape)}: expected numbers, one row an example")
    if key == "label" and kind not in "iu":
        raise UserError(f"labels are {array.dtype}: expected integers 0..classes-1; convert with .astype('int32')")
    if key == "image" and not (kind == "f" or array.dtype == np.uint8):
        raise UserError(f"images are {array.dtype}: expected uint8 (0..255) or float32; convert with .astype('uint8')")
    bounds = np.iinfo(np.int32)
    if kind in "iu" and array.dtype.itemsize >= 4 and array.dtype != np.int32 and array.size:
        low, high = int(array.min()), int(array.max())
        if low < bounds.min or high > bounds.max:
            raise UserError(f"array {key!r} holds {low} to {high}: expected values that int32 holds")
    return array[..., None] if key == "image" and rank == 3 else array


def _served(key: str, dtype: np.dtype) -> np.dtype:
    """The dtype a batch has: labels int32, the rest at most 32 bits."""
    if dtype.kind == "f" and dtype.itemsize > 4:
        return np.dtype(np.float32)
    wide = dtype.kind in "iu" and dtype.itemsize >= 4
    return np.dtype(np.int32) if wide or key == "label" else dtype
