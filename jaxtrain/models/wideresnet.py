"""Wide residual networks: Zagoruyko and Komodakis, "Wide Residual Networks", 2016."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.models.layers import StochasticDepth, depth_rates, normalisation, picture_shape
from jaxtrain.models.layers import dropout as dropout_layer

STEM = 16  # channels of the first convolution


class WideResNet(nnx.Module):
    """WRN-`depth`-`widen`: three stages of (depth - 4) / 6 pre-activated blocks, 16, 32 and 64 · `widen` channels.

    [B, H, W, C] of any number type -> logits [B, num_classes] in `dtype`; parameters float32. For small pictures: the
    stem is a 3×3 convolution at full size, and the later stages halve it. `dropout` acts between the convolutions of
    a block, as in the paper; `stochastic_depth` is the rate at which the last block is left out.
    """

    def __init__(
        self,
        num_classes: int,
        depth: int = 28,
        widen: int = 10,
        dropout: float = 0.0,
        stochastic_depth: float = 0.0,
        *,
        input_shape: tuple[int, ...],
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        *_, channels = picture_shape("wideresnet", input_shape)
        blocks, rest = divmod(depth - 4, 6)
        if rest or blocks < 1:
            raise UserError(f"model wideresnet: depth={depth}, expected 6n + 4: 10, 16, 22, 28, 34, 40, …")
        self.stem = _conv(channels, STEM, 3, dtype=dtype, rngs=rngs)
        self.blocks: nnx.List = nnx.List()
        channels = STEM
        for number, rate in enumerate(depth_rates(stochastic_depth, 3 * blocks)):
            stage, position = divmod(number, blocks)
            features, stride = STEM * widen * 2**stage, 2 if stage and not position else 1
            self.blocks.append(Block(channels, features, stride, dropout, rate, dtype=dtype, rngs=rngs))
            channels = features
        self.norm = normalisation("batch", channels, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(channels, num_classes, kernel_init=nnx.initializers.normal(0.01), dtype=dtype, rngs=rngs)
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.stem(x.astype(self.dtype))  # [B, H, W, 16]
        for block in self.blocks:
            x = block(x)  # [B, H, W, features], halved at the start of the second and third stage
        x = nnx.relu(self.norm(x)).astype(self.dtype)
        return self.head(x.mean(axis=(1, 2)))  # [B, num_classes]


class Block(nnx.Module):
    """shortcut(x) + f(x), f: norm, ReLU, 3×3, norm, ReLU, dropout, 3×3. float [B, H, W, C] -> [B, H', W', features].

    Where the size changes, the shortcut is a 1×1 convolution of what the first norm and ReLU leave.
    """

    def __init__(
        self, channels: int, features: int, stride: int, dropout: float, rate: float, *, dtype: Any, rngs: nnx.Rngs
    ):
        self.norms = nnx.List(normalisation("batch", each, dtype=dtype, rngs=rngs) for each in (channels, features))
        self.first = _conv(channels, features, 3, stride, dtype=dtype, rngs=rngs)
        self.second = _conv(features, features, 3, dtype=dtype, rngs=rngs)
        same = channels == features
        self.shortcut = None if same else _conv(channels, features, 1, stride, dtype=dtype, rngs=rngs)
        self.dropout = dropout_layer(dropout, rngs)
        self.depth = StochasticDepth(rngs) if rate else None
        self.rate = rate
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        active = nnx.relu(self.norms[0](x)).astype(self.dtype)
        y = nnx.relu(self.norms[1](self.first(active))).astype(self.dtype)
        y = self.second(self.dropout(y))
        y = y if self.depth is None else self.depth(y, self.rate)
        return y + (x if self.shortcut is None else self.shortcut(active))


def _conv(channels: int, features: int, kernel: int, stride: int = 1, *, dtype: Any, rngs: nnx.Rngs) -> nnx.Conv:
    return nnx.Conv(
        channels,
        features,
        (kernel, kernel),
        stride,
        padding=kernel // 2,
        use_bias=False,
        kernel_init=nnx.initializers.variance_scaling(2.0, "fan_out", "normal"),
        dtype=dtype,
        rngs=rngs,
    )
