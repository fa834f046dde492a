"""The confusion matrix as a monoid, and what is read off it: accuracy of each class, mean intersection over union."""

import math
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Confusion:
    """How often class i was taken for class j: counts that merge exactly, in any grouping.

    Computes to the share of each class that was recognised: {"0": …, "1": …}, NaN for a class that was not seen.
    """

    counts: jax.Array  # int32 [K, K], [true, predicted]

    @classmethod
    def of(cls, label: jax.Array, predicted: jax.Array, mask: jax.Array, num_classes: int) -> Self:
        """Over label and predicted, integers of one shape, where `mask` (bool, same shape) is true.

        What is no class, of either, counts nowhere.
        """
        valid = mask & _is_class(label, num_classes) & _is_class(predicted, num_classes)
        cell = jnp.where(valid, label.astype(jnp.int32) * num_classes + predicted.astype(jnp.int32), 0)
        counts = jnp.zeros((num_classes**2,), jnp.int32).at[cell.ravel()].add(valid.ravel().astype(jnp.int32))
        return cls(counts.reshape(num_classes, num_classes))

    def merge(self, other: Self) -> Self:
        return type(self)(self.counts + other.counts)

    def compute(self) -> Any:
        counts = np.asarray(self.counts, np.int64)
        return {str(k): _share(row[k], row.sum()) for k, row in enumerate(counts)}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MeanIoU(Confusion):
    """The same counts; computes to the mean over classes of intersection / union, as in Pascal VOC.

    Everingham et al., "The Pascal Visual Object Classes Challenge", 2015. Classes that are neither in the labels nor
    in the predictions have no union and do not count; where there is none at all, NaN.
    """

    def compute(self) -> Any:
        counts = np.asarray(self.counts, np.int64)
        intersection = np.diagonal(counts)
        union = counts.sum(axis=0) + counts.sum(axis=1) - intersection
        shares = intersection[union > 0] / union[union > 0]
        return float(shares.mean()) if len(shares) else math.nan


def _is_class(value: jax.Array, num_classes: int) -> jax.Array:
    return (value >= 0) & (value < num_classes)


def _share(part: Any, whole: Any) -> float:
    return int(part) / int(whole) if int(whole) else math.nan
