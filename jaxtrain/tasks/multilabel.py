"""Any number of labels out of K for each example."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.metrics import Mean, Metrics
from jaxtrain.tasks.classification import refuse_bad_weights

Batch = Mapping[str, jax.Array]


@dataclass(frozen=True, kw_only=True)
class MultiLabel:
    """Binary cross-entropy of each of `num_classes` labels, summed over them. A `jaxtrain.tasks.Task`.

    class_weights: K numbers by which the training loss of each label is multiplied, () for none.
    per_class: adds the share of examples whose label k is right, "class_accuracy/<k>".

    The batch holds `image` [B, H, W, C] and `label` [B, K], integers 0 or 1. Model outputs are logits [B, K] of any
    float dtype; arithmetic on them is float32, or float64 where they are float64. A label counts as predicted where
    its logit is above 0.
    """

    num_classes: int
    class_weights: tuple[float, ...] = ()
    per_class: bool = False

    def __post_init__(self) -> None:
        if not self.num_classes or self.num_classes < 1:
            raise UserError(f"multilabel: the data has {self.num_classes} classes, expected 1 or more: pick a task")
        refuse_bad_weights("multilabel", self.class_weights, self.num_classes)

    def inputs(self, batch: Batch) -> jax.Array:
        """The pictures [B, H, W, C]."""
        return batch["image"]

    def losses(self, outputs: jax.Array, batch: Batch) -> jax.Array:
        """Training loss of each example, float32 [B]."""
        entropy = self._cross_entropy(self._logits(outputs), batch["label"])
        if self.class_weights:
            entropy = entropy * np.asarray(self.class_weights, entropy.dtype)[None]
        return entropy.sum(axis=-1)

    def metrics(self, outputs: jax.Array, batch: Batch, mask: jax.Array) -> Metrics:
        """Over the rows where `mask` is true: loss, unweighted; accuracy, the share of all labels that are right;
        exact_match, that of examples with all K right; class_accuracy.
        """
        logits = self._logits(outputs)
        right = ((logits > 0) == (batch["label"] == 1)) & ~jnp.isnan(logits)  # [B, K]
        found: Metrics = {
            "loss": Mean.of(self._cross_entropy(logits, batch["label"]).sum(axis=-1), mask),
            "accuracy": Mean.of(right, jnp.broadcast_to(mask[:, None], right.shape)),
            "exact_match": Mean.of(right.all(axis=-1), mask),
        }
        if self.per_class:
            found["class_accuracy"] = Shares.of(right, mask)
        return found

    def predict(self, outputs: jax.Array) -> dict[str, jax.Array]:
        """label int32 [B, K], 0 or 1; probabilities float32 [B, K]."""
        logits = self._logits(outputs)
        return {
            "label": (logits > 0).astype(jnp.int32),
            "probabilities": jax.nn.sigmoid(logits).astype(jnp.float32),
        }

    def check(self, batch: Mapping[str, np.ndarray]) -> None:
        """Refuse a host batch without labels [B, K] of 0 and 1; rows where `mask` is false are not looked at.

        Raises UserError naming the ids (rows of the batch where it has no `id`) and values found.
        """
        label = batch.get("label")
        if label is None or not np.issubdtype(label.dtype, np.integer) or label.shape[1:] != (self.num_classes,):
            found = {name: f"{value.dtype}{list(value.shape)}" for name, value in batch.items()}
            raise UserError(f"multilabel: needs batch['label'] integers [B, {self.num_classes}], found {found}")
        bad = (label != 0) & (label != 1)
        rows = np.flatnonzero(bad.any(axis=1) & batch.get("mask", np.True_))
        if len(rows):
            ids = batch.get("id", np.arange(len(label)))
            shown = ", ".join(f"{ids[row]} has {label[row][bad[row]][0]}" for row in rows[:5])
            more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
            raise UserError(f"multilabel: labels are 0 or 1, but example {shown}{more}: mend the data set")

    def _logits(self, outputs: jax.Array) -> jax.Array:
        """[B, K] in float32, or float64 if the outputs are; checks the shape once, when traced."""
        if outputs.ndim != 2 or outputs.shape[-1] != self.num_classes:
            raise UserError(
                f"multilabel: the model's outputs are {list(outputs.shape)}, "
                f"expected [batch, {self.num_classes}]: give the model {self.num_classes} outputs"
            )
        return outputs.astype(jnp.float64 if outputs.dtype == jnp.float64 else jnp.float32)

    def _cross_entropy(self, logits: jax.Array, label: jax.Array) -> jax.Array:
        """-log p of each label, [B, K]; NaN where it is neither 0 nor 1."""
        entropy = jax.nn.softplus(jnp.where(label == 1, -logits, logits))
        return jnp.where((label == 0) | (label == 1), entropy, jnp.asarray(jnp.nan, logits.dtype))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Shares:
    """How often each of K things held. Computes to {"0": share, "1": share, …}, NaN where nothing was seen."""

    held: jax.Array  # int32 [K]
    count: jax.Array  # int32 []

    @classmethod
    def of(cls, held: jax.Array, mask: jax.Array) -> Self:
        """Over `held`, bool [B, K], in the rows where `mask`, bool [B], is true."""
        return cls(jnp.sum(held & mask[:, None], axis=0, dtype=jnp.int32), jnp.sum(mask, dtype=jnp.int32))

    def merge(self, other: Self) -> Self:
        return type(self)(self.held + other.held, self.count + other.count)

    def compute(self) -> Any:
        count = int(self.count)
        return {str(k): int(held) / count if count else math.nan for k, held in enumerate(self.held)}
