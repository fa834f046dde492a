"""Networks that tests name by import path, as a user would name theirs."""

import math

import jax.numpy as jnp
from flax import nnx


class Linear(nnx.Module):
    """One layer, no batch statistics: what gradient tests are about."""

    def __init__(self, num_classes, *, input_shape, dtype, rngs):
        self.head = nnx.Linear(math.prod(input_shape), num_classes, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.head(x.reshape(x.shape[0], -1))


class Dropout(nnx.Module):
    """Dropout and BatchNorm: every kind of state that a step must carry."""

    def __init__(self, num_classes, *, input_shape, dtype, rngs, rate: float = 0.5):
        self.hidden = nnx.Linear(math.prod(input_shape), 16, dtype=dtype, rngs=rngs)
        self.norm = nnx.BatchNorm(16, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.head = nnx.Linear(16, num_classes, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        x = self.dropout(nnx.relu(self.norm(self.hidden(x.reshape(x.shape[0], -1)))))
        return self.head(x)


class Scalar(nnx.Module):
    """One weight per class, starting at 1: what a test can follow by hand."""

    def __init__(self, num_classes, *, rngs):
        self.kernel = nnx.Param(jnp.ones((1, num_classes), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((num_classes,), jnp.float32))

    def __call__(self, x):
        total = x.reshape(x.shape[0], -1).mean(axis=1, keepdims=True)
        return total @ self.kernel[...] + self.bias[...][None]


class Bigrams(nnx.Module):
    """A language model of one table, which keeps no cache."""

    def __init__(self, num_classes, *, dtype, rngs):
        self.table = nnx.Embed(num_classes, num_classes, dtype=dtype, rngs=rngs)

    def __call__(self, tokens, segments=None):
        return self.table(tokens.astype(jnp.int32))
