"""The same small network as users write it, in each way that jaxtrain takes: hidden layer, BatchNorm, dropout, head."""

import math

import jax
import jax.numpy as jnp
import keras
from flax import linen, nnx

WIDTH = 16


class Nnx(nnx.Module):
    def __init__(self, num_classes, norm: bool = True, rate: float = 0.5, *, input_shape, rngs):
        self.hidden = nnx.Linear(math.prod(input_shape), WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.9, rngs=rngs) if norm else None
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.head = nnx.Linear(WIDTH, num_classes, rngs=rngs)

    def __call__(self, x):
        x = self.hidden(x.reshape(len(x), -1))
        x = x if self.norm is None else self.norm(x)
        return self.head(self.dropout(nnx.relu(x)))


class Linen(linen.Module):
    num_classes: int
    norm: bool = True
    rate: float = 0.5

    @linen.compact
    def __call__(self, x, train: bool):
        x = linen.Dense(WIDTH)(x.reshape(len(x), -1))
        if self.norm:
            x = linen.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = linen.Dropout(self.rate)(linen.relu(x), deterministic=not train)
        return linen.Dense(self.num_classes)(x)


def keras_functional(num_classes, norm: bool = True, rate: float = 0.5, *, input_shape):
    x = inputs = keras.Input(input_shape)
    x = keras.layers.Dense(WIDTH)(keras.layers.Flatten()(x))
    x = keras.layers.BatchNormalization(momentum=0.9)(x) if norm else x
    x = keras.layers.Dropout(rate)(keras.layers.ReLU()(x))
    return keras.Model(inputs, keras.layers.Dense(num_classes)(x))


class KerasClass(keras.Model):
    def __init__(self, num_classes, norm: bool = True, rate: float = 0.5):
        super().__init__()
        self.flatten, self.hidden = keras.layers.Flatten(), keras.layers.Dense(WIDTH)
        self.norm = keras.layers.BatchNormalization(momentum=0.9) if norm else None
        self.dropout, self.head = keras.layers.Dropout(rate), keras.layers.Dense(num_classes)

    def call(self, x, training=False):
        x = self.hidden(self.flatten(x))
        x = x if self.norm is None else self.norm(x, training=training)
        return self.head(self.dropout(keras.ops.relu(x), training=training))


def pair(num_classes, norm: bool = True, rate: float = 0.5, *, input_shape):
    """(init, apply) by hand."""

    def init(key, example):
        del example
        keys = jax.random.split(key)
        sizes = {"hidden": (math.prod(input_shape), WIDTH), "head": (WIDTH, num_classes)}
        params = {
            name: {"kernel": 0.2 * jax.random.normal(each, size, jnp.float32), "bias": jnp.zeros(size[1:], jnp.float32)}
            for each, (name, size) in zip(keys, sizes.items(), strict=True)
        }
        state = {"mean": jnp.zeros(WIDTH, jnp.float32), "var": jnp.ones(WIDTH, jnp.float32)}
        return params, {"norm": state} if norm else {}

    def layer(params, x):
        return x @ params["kernel"] + params["bias"][None]

    def apply(params, model_state, x, *, key, train):
        x = layer(params["hidden"], x.reshape(len(x), -1))
        if norm:
            state = model_state["norm"]
            now = {"mean": x.mean(0), "var": x.var(0)} if train else state
            x = (x - now["mean"][None]) * jax.lax.rsqrt(now["var"] + 1e-5)[None]
            model_state = {"norm": jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, state, now)}
        x = jax.nn.relu(x)
        if train and rate:
            x = jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)
        return layer(params["head"], x), model_state if train else model_state

    return init, apply
