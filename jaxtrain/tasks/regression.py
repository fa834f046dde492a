"""Numbers for each example."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.lookup import choices_hint
from jaxtrain.errors import UserError
from jaxtrain.metrics import Mean, Metrics

Batch = Mapping[str, jax.Array]
Loss = Literal["mse", "mae", "huber"]


@dataclass(frozen=True, kw_only=True)
class Regression:
    """The mean over `num_outputs` numbers of a loss of each one's error. A `jaxtrain.tasks.Task`.

    loss: "mse" (error²), "mae" (|error|) or "huber" (Huber, "Robust Estimation of a Location Parameter", 1964):
        error² / 2 up to `delta`, then delta · (|error| - delta / 2).
    inputs_key, target_key: the names of the arrays in the batch.

    The batch holds the inputs [B, ...] and the target [B] or [B, num_outputs], finite numbers. Model outputs are
    [B, num_outputs] of any float dtype; arithmetic on them is float32, or float64 where they are float64.
    """

    num_outputs: int = 1
    loss: Loss = "mse"
    delta: float = 1.0
    inputs_key: str = "image"
    target_key: str = "target"

    def __post_init__(self) -> None:
        if self.num_outputs < 1:
            raise UserError(f"regression: num_outputs={self.num_outputs}, expected 1 or more")
        if self.loss not in get_args(Loss):
            raise UserError(f"regression: no loss {self.loss!r}.{choices_hint(self.loss, get_args(Loss))}")
        if not 0 < self.delta < math.inf:
            raise UserError(f"regression: delta={self.delta}, expected a number above 0")

    def inputs(self, batch: Batch) -> jax.Array:
        """The inputs [B, ...]."""
        return batch[self.inputs_key]

    def losses(self, outputs: jax.Array, batch: Batch) -> jax.Array:
        """Loss of each example, float32 [B]."""
        return self._loss(self._error(outputs, batch))

    def metrics(self, outputs: jax.Array, batch: Batch, mask: jax.Array) -> Metrics:
        """loss, mse, mae and r2, over the rows where `mask` is true."""
        error = self._error(outputs, batch)
        return {
            "loss": Mean.of(self._loss(error), mask),
            "mse": Mean.of(jnp.square(error).mean(axis=-1), mask),
            "mae": Mean.of(jnp.abs(error).mean(axis=-1), mask),
            "r2": R2.of(error, self._target(outputs, batch), mask),
        }

    def predict(self, outputs: jax.Array) -> dict[str, jax.Array]:
        """value float32 [B, num_outputs]."""
        return {"value": outputs.astype(jnp.float32)}

    def check(self, batch: Mapping[str, np.ndarray]) -> None:
        """Refuse a host batch whose target is not [B] or [B, num_outputs] of finite numbers, where `mask` is true.

        Raises UserError naming the ids (rows of the batch where it has no `id`).
        """
        target = batch.get(self.target_key)
        if target is None or target.dtype.kind not in "iuf" or target.shape[1:] not in self._shapes():
            found = {name: f"{value.dtype}{list(value.shape)}" for name, value in batch.items()}
            raise UserError(
                f"regression: needs batch[{self.target_key!r}] of numbers [B, {self.num_outputs}], found {found}"
            )
        wrong = ~np.isfinite(target.reshape(len(target), -1)).all(axis=1) & batch.get("mask", np.True_)
        rows = np.flatnonzero(wrong)
        if len(rows):
            ids = batch.get("id", np.arange(len(target)))
            shown = ", ".join(str(ids[row]) for row in rows[:5]) + (" and more" if len(rows) > 5 else "")
            raise UserError(f"regression: the target of example {shown} is not finite: mend the data set")

    def _shapes(self) -> list[tuple[int, ...]]:
        """What a target may look like, one example of it."""
        return [(self.num_outputs,)] + ([()] if self.num_outputs == 1 else [])

    def _target(self, outputs: jax.Array, batch: Batch) -> jax.Array:
        """[B, num_outputs] in float32, or float64 if the outputs are."""
        dtype = jnp.float64 if outputs.dtype == jnp.float64 else jnp.float32
        return batch[self.target_key].astype(dtype).reshape(len(outputs), self.num_outputs)

    def _error(self, outputs: jax.Array, batch: Batch) -> jax.Array:
        """outputs - target; checks the shape once, when traced."""
        if outputs.ndim != 2 or outputs.shape[-1] != self.num_outputs:
            raise UserError(
                f"regression: the model's outputs are {list(outputs.shape)}, expected [batch, {self.num_outputs}]: "
                f"give the model {self.num_outputs} outputs, or set config.task.num_outputs"
            )
        target = self._target(outputs, batch)
        return outputs.astype(target.dtype) - target

    def _loss(self, error: jax.Array) -> jax.Array:
        """[B, num_outputs] → [B]."""
        size = jnp.abs(error)
        if self.loss == "mse":
            return jnp.square(error).mean(axis=-1)
        if self.loss == "mae":
            return size.mean(axis=-1)
        return jnp.where(size <= self.delta, jnp.square(error) / 2, self.delta * (size - self.delta / 2)).mean(axis=-1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class R2:
    """The coefficient of determination, 1 - Σ error² / Σ (target - its mean)², its mean over the D outputs.

    Means and squares merge as in Chan et al., "Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances", 1979: a sum of squares less a square of sums would cancel. NaN where a target does not vary.
    """

    count: jax.Array  # int32 []
    mean: jax.Array  # float32 [D], of the targets
    spread: jax.Array  # float32 [D], Σ (target - mean)²
    error: jax.Array  # float32 [D], Σ error²

    @classmethod
    def of(cls, error: jax.Array, target: jax.Array, mask: jax.Array) -> Self:
        """Of error and target, float [B, D], where `mask` (bool [B]) is true."""

        def summed(values: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(mask[:, None], values.astype(jnp.float32), jnp.float32(0)), axis=0)

        count = jnp.sum(mask, dtype=jnp.int32)
        mean = summed(target) / jnp.maximum(count, 1).astype(jnp.float32)
        return cls(count, mean, summed(jnp.square(target - mean.astype(target.dtype)[None])), summed(jnp.square(error)))

    def merge(self, other: Self) -> Self:
        count = self.count + other.count
        share = other.count.astype(jnp.float32) / jnp.maximum(count, 1).astype(jnp.float32)
        apart = other.mean - self.mean
        between = jnp.square(apart) * share * self.count.astype(jnp.float32)
        return type(self)(
            count, self.mean + share * apart, self.spread + other.spread + between, self.error + other.error
        )

    def compute(self) -> float:
        if not int(self.count) or not np.all(self.spread):
            return math.nan
        return float(np.mean(1 - np.asarray(self.error, np.float64) / np.asarray(self.spread, np.float64)))
