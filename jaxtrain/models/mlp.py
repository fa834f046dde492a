"""The multi-layer perceptron."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.models.layers import dropout as dropout_layer


class MLP(nnx.Module):
    """Dense layers of the sizes `hidden`, each with ReLU and dropout, then a linear head.

    [B, ...] of any number type, flattened -> logits [B, num_classes] in `dtype`; parameters float32. `dropout` is the
    share of activations set to zero in training.
    """

    def __init__(
        self,
        num_classes: int,
        hidden: tuple[int, ...] = (256, 256),
        dropout: float = 0.0,
        *,
        input_shape: tuple[int, ...],
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        sizes = (math.prod(input_shape), *hidden)
        self.layers = nnx.List(
            nnx.Linear(before, after, kernel_init=nnx.initializers.he_normal(), dtype=dtype, rngs=rngs)
            for before, after in itertools.pairwise(sizes)
        )
        self.dropouts = nnx.List(dropout_layer(dropout, rngs) for _ in hidden)
        self.head = nnx.Linear(sizes[-1], num_classes, dtype=dtype, rngs=rngs)
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], -1).astype(self.dtype)  # [B, H·W·C]
        for layer, dropout in zip(self.layers, self.dropouts, strict=True):
            x = dropout(nnx.relu(layer(x)))  # [B, hidden]
        return self.head(x)  # [B, num_classes]
