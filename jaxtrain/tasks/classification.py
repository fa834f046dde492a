"""One label out of K for each example."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.lookup import choices_hint
from jaxtrain.errors import UserError
from jaxtrain.metrics import Mean, Metrics
from jaxtrain.tasks.calibration import Calibration
from jaxtrain.tasks.confusion import Confusion

Batch = Mapping[str, jax.Array]
Loss = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, kw_only=True)
class Classification:
    """Cross-entropy over `num_classes`, which the data set gives. A `jaxtrain.tasks.Task`.

    loss: "softmax", or "sigmoid": the sum over classes of the binary cross-entropy of "it is this one", as in Beyer et
        al., "Are we done with ImageNet?", 2020. (Several labels a picture: task "multilabel".)
    label_smoothing: ε in [0, 1) of Szegedy et al., "Rethinking the Inception Architecture", 2015: the
        training loss is (1 - ε) · CE + ε · mean(-log p). Metrics are never smoothed.
    class_weights: K numbers by which the training loss of each class is multiplied, as they stand: the mean divides
        by examples, not by weights. () for none. Metrics are never weighted.
    top_k: k > 0 adds the metric "top<k>_accuracy".
    per_class: adds the accuracy of each class, "class_accuracy/<class>".
    calibration: adds the expected calibration error, "calibration_error", see `tasks.calibration`.

    The batch holds `image` [B, H, W, C] and `label` int32 [B]; after mixup or cutmix also `mixed_label` int32
    [B] and `mix` float32 [B], the weight of `label`. Model outputs are logits [B, K] of any float dtype; all
    arithmetic on them is float32, or float64 where they are float64.

    A label outside 0..K-1 is refused on the host by `check`. Should one reach the device all the same, its
    loss is NaN: it never scores another class.
    """

    num_classes: int
    loss: Loss = "softmax"
    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] = ()
    top_k: int = 0
    per_class: bool = False
    calibration: bool = False

    def __post_init__(self) -> None:
        if not self.num_classes or self.num_classes < 2:
            raise UserError(f"classification: the data has {self.num_classes} classes, expected 2 or more: pick a task")
        if self.loss not in get_args(Loss):
            raise UserError(f"classification: no loss {self.loss!r}.{choices_hint(self.loss, get_args(Loss))}")
        refuse_bad_weights("classification", self.class_weights, self.num_classes)
        if not 0 <= self.label_smoothing < 1:
            raise UserError(f"classification: label_smoothing={self.label_smoothing}, expected 0 or more and below 1")
        if not 0 <= self.top_k <= self.num_classes:
            raise UserError(
                f"classification: top_k={self.top_k}, expected 0 (off) up to the {self.num_classes} classes"
            )

    def inputs(self, batch: Batch) -> jax.Array:
        """The pictures [B, H, W, C]."""
        return batch["image"]

    def losses(self, outputs: jax.Array, batch: Batch) -> jax.Array:
        """Training loss of each example, float32 [B]: smoothed, weighted; over both labels of a mixed picture."""
        log_p = self._log_p(self._logits(outputs))
        if self.class_weights:
            log_p = log_p * np.asarray(self.class_weights, log_p.dtype)[None]
        cross_entropy = _over_labels(lambda label: self._cross_entropy(log_p, label), batch)
        if not self.label_smoothing:
            return cross_entropy
        return (1 - self.label_smoothing) * cross_entropy - self.label_smoothing * jnp.mean(log_p, axis=-1)

    def metrics(self, outputs: jax.Array, batch: Batch, mask: jax.Array) -> Metrics:
        """loss (without smoothing), accuracy and what the options add, over the rows where `mask` is true.

        On mixed pictures a hit counts by the weight of the label that was hit, as in mixup's own code; for the
        accuracy of each class they count as the label that weighs more.
        """
        logits = self._logits(outputs)
        log_p = self._log_p(logits)

        def mean(score: Callable[[jax.Array], jax.Array]) -> Mean:
            return Mean.of(_over_labels(score, batch), mask)

        found: Metrics = {
            "loss": mean(lambda label: self._cross_entropy(log_p, label)),
            "accuracy": mean(lambda label: self._hits(logits, label, 1)),
        }
        if self.top_k:
            found[f"top{self.top_k}_accuracy"] = mean(lambda label: self._hits(logits, label, self.top_k))
        if self.per_class:
            predicted = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            found["class_accuracy"] = Confusion.of(_chief_label(batch), predicted, mask, self.num_classes)
        if self.calibration:
            hits = _over_labels(lambda label: self._hits(logits, label, 1), batch)
            found["calibration_error"] = Calibration.of(self._probabilities(logits).max(axis=-1), hits, mask)
        return found

    def predict(self, outputs: jax.Array) -> dict[str, jax.Array]:
        """label int32 [B], the most probable class (of equals the first); probabilities float32 [B, K]."""
        logits = self._logits(outputs)
        return {
            "label": jnp.argmax(logits, axis=-1).astype(jnp.int32),
            "probabilities": self._probabilities(logits).astype(jnp.float32),
        }

    def check(self, batch: Mapping[str, np.ndarray]) -> None:
        """Refuse a host batch without integer labels in 0..K-1; rows where `mask` is false are not looked at.

        Raises UserError naming the ids (rows of the batch where it has no `id`) and labels found.
        """
        label = batch.get("label")
        if label is None or not np.issubdtype(label.dtype, np.integer) or label.ndim != 1:
            found = {name: f"{value.dtype}{list(value.shape)}" for name, value in batch.items()}
            raise UserError(f"classification: needs batch['label'] int32 [B], found {found}")
        bad = ((label < 0) | (label >= self.num_classes)) & batch.get("mask", np.True_)
        if not bad.any():
            return
        rows = np.flatnonzero(bad)
        ids = batch.get("id", np.arange(len(label)))
        shown = ", ".join(f"{ids[row]} has {label[row]}" for row in rows[:5])
        more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
        raise UserError(
            f"classification: labels go from 0 to {self.num_classes - 1}, but example {shown}{more}: mend the data set"
        )

    def _logits(self, outputs: jax.Array) -> jax.Array:
        """[B, K] in float32, or float64 if the outputs are; checks the shape once, when traced."""
        if outputs.ndim != 2 or outputs.shape[-1] != self.num_classes:
            raise UserError(
                f"classification: the model's outputs are {list(outputs.shape)}, "
                f"expected [batch, {self.num_classes}]: give the model {self.num_classes} outputs"
            )
        return outputs.astype(jnp.float64 if outputs.dtype == jnp.float64 else jnp.float32)

    def _log_p(self, logits: jax.Array) -> jax.Array:
        """The log-probability of each label, [B, K]; for "sigmoid", of that label and none of the others."""
        if self.loss == "softmax":
            return jax.nn.log_softmax(logits)
        return logits - jax.nn.softplus(logits).sum(axis=-1, keepdims=True)

    def _probabilities(self, logits: jax.Array) -> jax.Array:
        return jax.nn.softmax(logits) if self.loss == "softmax" else jax.nn.sigmoid(logits)

    def _cross_entropy(self, log_p: jax.Array, label: jax.Array) -> jax.Array:
        """-log p of label [B], NaN where it is no class: [B]."""
        return jnp.where(self._is_class(label), -_of_label(log_p, label), jnp.nan)

    def _hits(self, logits: jax.Array, label: jax.Array, k: int) -> jax.Array:
        """1 where label [B] is among the k most probable, else 0: [B].

        Of equals the first comes first, as in `argmax` and `top_k`; NaN comes before every label, so that
        outputs that are no numbers hit nothing.
        """
        own = _of_label(logits, label)[:, None]
        before = _classes(logits) < label[:, None]
        ahead = jnp.where(before, ~(logits < own), ~(logits <= own)) & ~_is_label(logits, label)  # [B, K]
        rank = jnp.sum(ahead, axis=-1, dtype=jnp.int32)
        return (self._is_class(label) & (rank < k)).astype(logits.dtype)

    def _is_class(self, label: jax.Array) -> jax.Array:
        return (label >= 0) & (label < self.num_classes)


def refuse_bad_weights(task: str, weights: tuple[float, ...], num_classes: int) -> None:
    """Raises UserError unless there are no weights, or one a class, each 0 or more and finite."""
    if weights and len(weights) != num_classes:
        raise UserError(f"{task}: class_weights has {len(weights)} numbers, expected {num_classes}, one a class, or ()")
    if not all(0 <= weight < math.inf for weight in weights):
        raise UserError(f"{task}: class_weights={weights}, expected finite numbers, 0 or more")


def _chief_label(batch: Batch) -> jax.Array:
    """The label of each picture, int32 [B]; of a mixed one that which weighs more."""
    label = batch["label"].astype(jnp.int32)
    if "mixed_label" not in batch:
        return label
    return jnp.where(batch["mix"] >= 0.5, label, batch["mixed_label"].astype(jnp.int32))


def _over_labels(score: Callable[[jax.Array], jax.Array], batch: Batch) -> jax.Array:
    """`score(label)` [B]; on mixed pictures mix · score(label) + (1 - mix) · score(mixed_label)."""
    own = score(batch["label"].astype(jnp.int32))
    if "mixed_label" not in batch:
        return own
    mix = batch["mix"].astype(own.dtype)
    return mix * own + (1 - mix) * score(batch["mixed_label"].astype(jnp.int32))


def _classes(logits: jax.Array) -> jax.Array:
    """0..K-1 as int32 [1, K]."""
    return jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, :]


def _is_label(logits: jax.Array, label: jax.Array) -> jax.Array:
    """bool [B, K], true at the label."""
    return _classes(logits) == label[:, None]


def _of_label(values: jax.Array, label: jax.Array) -> jax.Array:
    """values [B, K] at label [B], as a masked sum: its gradient is no scatter, and it shards over classes."""
    return jnp.sum(jnp.where(_is_label(values, label), values, jnp.zeros_like(values)), axis=-1)
