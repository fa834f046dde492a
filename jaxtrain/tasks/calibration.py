"""The expected calibration error as a monoid: does a model that is 80 % sure turn out right in 80 of 100 cases?"""

import math
from dataclasses import dataclass
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

BINS = 15  # as in the paper


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Calibration:
    """Computes to the expected calibration error: Guo et al., "On Calibration of Modern Neural Networks", 2017.

    The range of confidences (0, 1] is cut into 15 equal bins; the error is the mean over examples of |accuracy -
    confidence| of their bin. What merges are the bins' sums, so that batches of any size give the error of the whole.
    """

    count: jax.Array  # int32 [BINS]
    hits: jax.Array  # float32 [BINS]
    confidence: jax.Array  # float32 [BINS], summed

    @classmethod
    def of(cls, confidence: jax.Array, hits: jax.Array, mask: jax.Array) -> Self:
        """Over confidence in [0, 1] and hits (1 where right, shares where labels are mixed), float [B], where `mask`.

        A confidence that is no number counts in the lowest bin as 0.
        """
        confidence = jnp.nan_to_num(confidence.astype(jnp.float32), nan=0.0)
        place = jnp.clip(jnp.ceil(confidence * BINS).astype(jnp.int32) - 1, 0, BINS - 1)
        inside = (place[:, None] == jnp.arange(BINS, dtype=jnp.int32)[None]) & mask[:, None]  # [B, BINS]

        def summed(values: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(inside, values.astype(jnp.float32)[:, None], jnp.float32(0)), axis=0)

        return cls(jnp.sum(inside, axis=0, dtype=jnp.int32), summed(hits), summed(confidence))

    def merge(self, other: Self) -> Self:
        return type(self)(self.count + other.count, self.hits + other.hits, self.confidence + other.confidence)

    def compute(self) -> float:
        count = int(np.sum(self.count, dtype=np.int64))
        gaps = np.abs(np.asarray(self.hits, np.float64) - np.asarray(self.confidence, np.float64))
        return float(gaps.sum() / count) if count else math.nan
