"""Residual networks: He et al., "Deep Residual Learning for Image Recognition", 2015, in today's usual form (v1.5).

The differences from the paper: a bottleneck strides in its 3×3 convolution (v1.5, as in Goyal et al., 2017, "Accurate,
Large Minibatch SGD", and in PyTorch), and the last gain of each block starts at zero, so that a block starts as the
identity (Goyal et al.).
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.models.layers import ConvNorm, StochasticDepth, depth_rates, picture_shape

# Blocks in each stage. The first family is the paper's for ImageNet, the second its narrow one for CIFAR-10.
IMAGENET = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
CIFAR = {20: (3, 3, 3), 32: (5, 5, 5), 44: (7, 7, 7), 56: (9, 9, 9), 110: (18, 18, 18)}
BLOCKS = IMAGENET | CIFAR


class ResNet(nnx.Module):
    """ResNet of `depth` 18, 34, 50, 101, 152 (four stages), or 20, 32, 44, 56, 110 (three, for CIFAR-10).

    [B, H, W, C] of any number type -> logits [B, num_classes] in `dtype`; parameters float32. `width` is that of
    the first stage; 0 takes the paper's, 64 or 16. `stem` "imagenet" is a 7×7 convolution and a pooling that
    leave a quarter of each side, "cifar" one 3×3 convolution at full size; "auto": the first from 64 pixels on.
    `stochastic_depth` is the rate at which the last block is left out in training, see `layers.StochasticDepth`.
    """

    def __init__(
        self,
        num_classes: int,
        depth: Literal[18, 20, 32, 34, 44, 50, 56, 101, 110, 152] = 18,
        width: int = 0,
        stem: Literal["auto", "cifar", "imagenet"] = "auto",
        stochastic_depth: float = 0.0,
        *,
        input_shape: tuple[int, ...],
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        *size, channels = picture_shape("resnet", input_shape)
        if depth not in BLOCKS:
            raise UserError(f"model resnet has no depth {depth}; known: {', '.join(map(str, sorted(BLOCKS)))}")
        if stem == "auto":
            stem = "imagenet" if min(size) >= 64 else "cifar"
        width = width or (16 if depth in CIFAR else 64)
        kernel, stride = (7, 2) if stem == "imagenet" else (3, 1)
        self.stem = ConvNorm(channels, width, kernel, stride, dtype=dtype, rngs=rngs)
        self.pool = stem == "imagenet"
        self.stages: nnx.List = nnx.List()
        channels = width
        rates = iter(depth_rates(stochastic_depth, sum(BLOCKS[depth])))
        for stage, blocks in enumerate(BLOCKS[depth]):
            self.stages.append(nnx.List())
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                made, channels = _block(depth, channels, width * 2**stage, stride, next(rates), dtype=dtype, rngs=rngs)
                self.stages[-1].append(made)
        self.head = nnx.Linear(channels, num_classes, kernel_init=nnx.initializers.normal(0.01), dtype=dtype, rngs=rngs)
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.stem(x.astype(self.dtype)))  # [B, H, W, width]
        if self.pool:
            x = nnx.max_pool(x, (3, 3), (2, 2), padding=((1, 1), (1, 1)))  # [B, H/4, W/4, width]
        for stage in self.stages:
            for block in stage:
                x = block(x)  # [B, H, W, features], halved at the start of each stage but the first
        x = x.mean(axis=(1, 2))  # [B, features]
        return self.head(x)  # [B, num_classes]


class Block(nnx.Module):
    """relu(shortcut(x) + f(x)), f being `layers` with ReLU between them: float [B, H, W, C] -> [B, H', W', C']."""

    def __init__(self, layers: list[ConvNorm], shortcut: nnx.Module | None, rate: float, rngs: nnx.Rngs):
        self.layers = nnx.List(layers)
        self.shortcut = shortcut
        self.depth = StochasticDepth(rngs) if rate else None
        self.rate = rate

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x
        for layer in self.layers[:-1]:
            y = nnx.relu(layer(y))
        y = self.layers[-1](y)
        y = y if self.depth is None else self.depth(y, self.rate)
        return nnx.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class Subsampled(nnx.Module):
    """The paper's shortcut without parameters (option A): every `stride`-th pixel, new channels zero."""

    def __init__(self, channels: int, features: int, stride: int):
        self.stride, self.new = stride, features - channels

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x[:, :: self.stride, :: self.stride]
        return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, self.new)))


def _block(depth: int, channels: int, width: int, stride: int, rate: float, **options: Any) -> tuple[Block, int]:
    """One block of the ResNet of `depth`, and its number of output channels."""
    if depth < 50 or depth in CIFAR:  # two 3×3 convolutions
        features = width
        layers = [
            ConvNorm(channels, width, 3, stride, **options),
            ConvNorm(width, width, 3, scale=0.0, **options),
        ]
    else:  # the bottleneck: 1×1 down, 3×3, 1×1 up
        features = 4 * width
        layers = [
            ConvNorm(channels, width, 1, **options),
            ConvNorm(width, width, 3, stride, **options),
            ConvNorm(width, features, 1, scale=0.0, **options),
        ]
    shortcut: nnx.Module | None = None
    if depth in CIFAR and channels != features:
        shortcut = Subsampled(channels, features, stride)
    elif channels != features:
        shortcut = ConvNorm(channels, features, 1, stride, **options)
    return Block(layers, shortcut, rate, options["rngs"]), features
