"""One label for each pixel."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.metrics import Mean, Metrics
from jaxtrain.tasks.confusion import Confusion, MeanIoU

Batch = Mapping[str, jax.Array]


@dataclass(frozen=True, kw_only=True)
class Segmentation:
    """Softmax cross-entropy of each pixel over `num_classes`, which the data set gives. A `jaxtrain.tasks.Task`.

    ignore_label: pixels that carry it count nowhere; 255 as in Pascal VOC and Cityscapes, -1 in ADE20K's usual form.
    per_class: adds the accuracy of each class, "class_accuracy/<class>".

    The batch holds `image` [B, H, W, C] and `label` [B, H, W], integers 0..K-1 or `ignore_label`. Model outputs are
    logits [B, H, W, K] of any float dtype; arithmetic on them is float32 or wider. Losses are means over the pixels
    of the whole global batch that are not ignored: a picture weighs by its pixels that count.
    """

    num_classes: int
    ignore_label: int = 255
    per_class: bool = False

    def __post_init__(self) -> None:
        if not self.num_classes or self.num_classes < 2:
            raise UserError(f"segmentation: the data has {self.num_classes} classes, expected 2 or more: pick a task")
        if 0 <= self.ignore_label < self.num_classes:
            raise UserError(
                f"segmentation: ignore_label={self.ignore_label} is one of the {self.num_classes} classes; expected "
                "a number below 0, or at least as large as their number"
            )

    def inputs(self, batch: Batch) -> jax.Array:
        """The pictures [B, H, W, C]."""
        return batch["image"]

    def counts(self, batch: Batch) -> jax.Array:
        """How many pixels of each picture count: int32 [B]."""
        return jnp.sum(batch["label"] != self.ignore_label, axis=(1, 2), dtype=jnp.int32)

    def losses(self, outputs: jax.Array, batch: Batch) -> jax.Array:
        """The sum over the pixels that count of each picture, float32 [B]."""
        return self._cross_entropy(self._logits(outputs, batch["label"]), batch["label"]).sum(axis=(1, 2))

    def metrics(self, outputs: jax.Array, batch: Batch, mask: jax.Array) -> Metrics:
        """loss, accuracy (both over pixels), mean_iou, class_accuracy, of the pictures where `mask` is true."""
        label = batch["label"]
        logits = self._logits(outputs, label)
        counted = mask[:, None, None] & (label != self.ignore_label)  # [B, H, W]
        predicted = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        found: Metrics = {
            "loss": Mean.of(self._cross_entropy(logits, label), counted),
            "accuracy": Mean.of(predicted == label, counted),
            "mean_iou": MeanIoU.of(label, predicted, counted, self.num_classes),
        }
        if self.per_class:
            found["class_accuracy"] = Confusion.of(label, predicted, counted, self.num_classes)
        return found

    def predict(self, outputs: jax.Array) -> dict[str, jax.Array]:
        """label int32 [B, H, W], the most probable class of each pixel."""
        return {"label": jnp.argmax(outputs, axis=-1).astype(jnp.int32)}

    def check(self, batch: Mapping[str, np.ndarray]) -> None:
        """Refuse a host batch whose label maps are no integers in 0..K-1 or `ignore_label`, where `mask` is true.

        Raises UserError naming the ids (rows of the batch where it has no `id`) and labels found.
        """
        label = batch.get("label")
        if label is None or not np.issubdtype(label.dtype, np.integer) or label.ndim != 3:
            found = {name: f"{value.dtype}{list(value.shape)}" for name, value in batch.items()}
            raise UserError(f"segmentation: needs batch['label'] integers [B, H, W], found {found}")
        bad = ((label < 0) | (label >= self.num_classes)) & (label != self.ignore_label)
        rows = np.flatnonzero(bad.any(axis=(1, 2)) & batch.get("mask", np.True_))
        if not len(rows):
            return
        ids = batch.get("id", np.arange(len(label)))
        shown = ", ".join(f"{ids[row]} has {label[row][bad[row]][0]}" for row in rows[:5])
        more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
        raise UserError(
            f"segmentation: labels go from 0 to {self.num_classes - 1}, {self.ignore_label} is ignored, but example "
            f"{shown}{more}: mend the data set, or set config.task.ignore_label"
        )

    def _logits(self, outputs: jax.Array, label: jax.Array) -> jax.Array:
        """[B, H, W, K] in float32, or float64 if the outputs are; checks the shape once, when traced."""
        expected = (*label.shape, self.num_classes)
        if outputs.shape != expected:
            raise UserError(
                f"segmentation: the model's outputs are {list(outputs.shape)}, expected {list(expected)} for labels "
                f"{list(label.shape)}: give the model an output a class and pixel, such as model 'unet'"
            )
        return outputs.astype(jnp.float64 if outputs.dtype == jnp.float64 else jnp.float32)

    def _cross_entropy(self, logits: jax.Array, label: jax.Array) -> jax.Array:
        """-log p of each pixel's label; 0 where it is ignored, NaN where it is no class: [B, H, W]."""
        classes = jnp.arange(self.num_classes, dtype=jnp.int32)[None, None, None]
        is_label = classes == label.astype(jnp.int32)[..., None]
        # A masked sum, not a gather: its gradient is no scatter.
        log_p = jnp.sum(jnp.where(is_label, jax.nn.log_softmax(logits), jnp.zeros_like(logits)), axis=-1)
        known = jnp.where(jnp.any(is_label, axis=-1), -log_p, jnp.asarray(jnp.nan, logits.dtype))
        return jnp.where(label == self.ignore_label, jnp.zeros_like(known), known)
