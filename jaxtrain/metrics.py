"""Metrics as monoids: small pytrees that add up over batches, devices and steps in any grouping.

    total = empty(jax.eval_shape(step, ...))      # once
    total = merge(total, task.metrics(...))       # on the device, every batch
    compute(total)                                # on the host, when somebody asks

The identity of every monoid here is all zeros, so `empty` needs only shapes and dtypes and its result can be
sharded, donated and checkpointed. Sums are float32 and counts int32, whatever the precision of the run: a
count in bfloat16 stops at 256. An int32 count holds 2.1e9 examples between two calls of `compute`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import UserError


class Monoid(Protocol):
    """A registered dataclass of arrays whose identity is all zeros."""

    def merge(self, other: Self) -> Self:
        """Associative; `other` is the later one."""

    def compute(self) -> Any:
        """The value, of fetched (NumPy) arrays: a number, or a dict of them, its names the same for any contents."""


Metrics = dict[str, Any]  # name → Monoid; `Any` because tree functions keep no types


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mean:
    """The mean of all values ever seen, not a mean of means. No value: NaN."""

    total: jax.Array  # float32 []
    count: jax.Array  # int32 []

    @classmethod
    def of(cls, values: jax.Array, mask: jax.Array | None = None) -> Self:
        """Over `values` of any shape and real dtype, less those where `mask` (bool, same shape) is false.

        What stands in a masked place does not matter, NaN and infinity included.
        """
        values = jnp.asarray(values).astype(jnp.float32)
        if mask is None:
            return cls(jnp.sum(values, dtype=jnp.float32), jnp.full((), values.size, jnp.int32))
        if mask.shape != values.shape:
            raise ValueError(f"mask {mask.shape} and values {values.shape} differ in shape")
        kept = jnp.where(mask, values, jnp.zeros_like(values))
        return cls(jnp.sum(kept, dtype=jnp.float32), jnp.sum(mask, dtype=jnp.int32))

    def merge(self, other: Self) -> Self:
        return type(self)(self.total + other.total, self.count + other.count)

    def compute(self) -> float:
        return float(self.total) / int(self.count) if int(self.count) else math.nan


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Count:
    """How many there were, exactly. Computes to an int."""

    total: jax.Array  # int32 []

    @classmethod
    def of(cls, mask: jax.Array) -> Self:
        """The number of true entries of `mask`, bool of any shape."""
        return cls(jnp.sum(mask, dtype=jnp.int32))

    def merge(self, other: Self) -> Self:
        return type(self)(self.total + other.total)

    def compute(self) -> float:
        return int(self.total)


def _once() -> jax.Array:
    return jnp.ones((), jnp.int32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Last:
    """The latest value, `Last(value)`. None yet: NaN."""

    value: jax.Array  # [] of any real dtype, which is kept
    seen: jax.Array = field(default_factory=_once)  # int32 [], values merged; 0 marks the identity

    def merge(self, other: Self) -> Self:
        value = jnp.where(other.seen > 0, other.value, self.value)
        return type(self)(value, self.seen + other.seen)

    def compute(self) -> float:
        return self.value.item() if int(self.seen) else math.nan


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Members:
    """The same metric of R members that train side by side, each by itself.

    Computes to their mean, under the metric's own name, their sample standard deviation, "std", and each, "0", "1", ….
    """

    stacked: Any  # a monoid, each array [R, ...]
    alike: bool = field(default=False, metadata={"static": True})  # one value says it all, and is all that is computed

    def merge(self, other: Self) -> Self:
        return type(self)(jax.vmap(lambda a, b: a.merge(b))(self.stacked, other.stacked), self.alike)

    def compute(self) -> Any:
        count = 1 if self.alike else len(jax.tree.leaves(self.stacked)[0])
        each = [jax.tree.map(lambda leaf, r=r: leaf[r], self.stacked).compute() for r in range(count)]
        if self.alike:
            return each[0]
        if not isinstance(each[0], dict):
            return spread("", each)
        return {
            name: number for part in each[0] for name, number in spread(part, [values[part] for values in each]).items()
        }


def spread(part: str, each: list[Any]) -> dict[str, float]:
    """{part: mean, "part/std": …, "part/0": …, …} of the numbers of two members or more."""
    start = f"{part}/" if part else ""
    mean = sum(each) / len(each)
    variance = sum((value - mean) ** 2 for value in each) / (len(each) - 1)
    return {part: mean, f"{start}std": math.sqrt(variance)} | {f"{start}{r}": value for r, value in enumerate(each)}


def is_monoid(value: Any) -> bool:
    return callable(getattr(value, "merge", None)) and callable(getattr(value, "compute", None))


def empty(metrics: Any) -> Any:
    """The identity of `metrics`, a tree of monoids of arrays or of what `jax.eval_shape` returns."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), metrics)


def merge(earlier: Any, later: Any) -> Any:
    """Both together, monoid by monoid. Raises ValueError where the two trees differ in structure."""
    return jax.tree.map(lambda a, b: a.merge(b), earlier, later, is_leaf=is_monoid)


def compute(metrics: Metrics) -> dict[str, float]:
    """Name → Python number; waits for the device. Of a monoid that computes several: "name/part" → number.

    The part "" has the name alone.
    """
    values: dict[str, float] = {}
    for name, monoid in jax.device_get(metrics).items():
        value = monoid.compute()
        parts = value if isinstance(value, dict) else {"": value}
        values |= {f"{name}/{part}" if part else name: number for part, number in parts.items()}
    return values


def names(metrics: Mapping[str, Any]) -> list[str]:
    """What `compute` will call the values of `metrics`, given as what `jax.eval_shape` returns."""
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), dict(metrics))
    return [*compute({name: value if is_monoid(value) else Last(value) for name, value in zeros.items()})]


def as_monoids(metrics: Mapping[str, Any]) -> Metrics:
    """What a user's own step returned: monoids as they are, real scalars as a `Mean` over the steps.

    Raises UserError for anything else, naming it.
    """
    return {name: value if is_monoid(value) else Mean.of(_scalar(name, value)) for name, value in metrics.items()}


def _scalar(name: str, value: Any) -> jax.Array:
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError):
        raise UserError(f"metric {name!r} is {type(value).__name__}, expected a scalar or a monoid") from None
    if array.shape or jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise UserError(
            f"metric {name!r} is {array.dtype}{list(array.shape)}, expected a real scalar: "
            f"reduce it, or return a monoid such as jaxtrain.metrics.Mean.of(values)"
        )
    return array
