"""ConvNeXt: Liu et al., "A ConvNet for the 2020s", 2022."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config.lookup import choices_hint
from jaxtrain.errors import UserError
from jaxtrain.models.layers import Linear, StochasticDepth, depth_rates, normalisation, picture_shape

# Blocks in each of the four stages, and the width of the first.
SIZES = {"T": ((3, 3, 9, 3), 96), "S": ((3, 3, 27, 3), 96), "B": ((3, 3, 27, 3), 128), "L": ((3, 3, 27, 3), 192)}
EPSILON = 1e-6
INIT = nnx.initializers.truncated_normal(0.02)


class ConvNeXt(nnx.Module):
    """ConvNeXt of `size` T, S, B or L.

    [B, H, W, C] of any number type -> logits [B, num_classes] in `dtype`; parameters float32. The stem cuts the picture
    into squares of `patch` pixels, and each later stage halves what is left: sides must be at least 8 · patch. `width`
    is that of the first stage and `blocks` those of each stage, 0 and () for the size's. `layer_scale` is where the
    gain of each channel of a block starts; `stochastic_depth` the rate at which the last block is left out, 0.1 for T
    in the paper.
    """

    def __init__(
        self,
        num_classes: int,
        size: Literal["T", "S", "B", "L"] = "T",
        patch: int = 4,
        width: int = 0,
        blocks: tuple[int, ...] = (),
        layer_scale: float = 1e-6,
        stochastic_depth: float = 0.0,
        *,
        input_shape: tuple[int, ...],
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        *sides, channels = picture_shape("convnext", input_shape)
        if size not in SIZES:
            raise UserError(f"model convnext has no size {size!r}.{choices_hint(size, SIZES)}")
        blocks, width = blocks or SIZES[size][0], width or SIZES[size][1]
        smallest = patch * 2 ** (len(blocks) - 1)
        if patch < 1 or min(sides) < smallest:
            raise UserError(
                f"model convnext: patch={patch} and {len(blocks)} stages take pictures of {smallest} pixels or more a "
                f"side, found {sides[0]}×{sides[1]}; take a smaller patch"
            )
        rates = iter(depth_rates(stochastic_depth, sum(blocks)))
        options: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        self.shrinks: nnx.List = nnx.List()
        self.stages: nnx.List = nnx.List()
        for stage, count in enumerate(blocks):
            features = width * 2**stage
            self.shrinks.append(Shrink(channels, features, 2 if stage else patch, norm_first=stage > 0, **options))
            self.stages.append(nnx.List(Block(features, layer_scale, next(rates), **options) for _ in range(count)))
            channels = features
        self.norm = normalisation("layer", channels, epsilon=EPSILON, dtype=dtype, rngs=rngs)
        self.head = Linear(channels, num_classes, kernel_init=INIT, dtype=dtype, rngs=rngs)
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.astype(self.dtype)  # [B, H, W, C]
        for shrink, stage in zip(self.shrinks, self.stages, strict=True):
            x = shrink(x)  # [B, H / patch / 2^stage, W / patch / 2^stage, width · 2^stage]
            for block in stage:
                x = block(x)
        x = self.norm(x.mean(axis=(1, 2))).astype(self.dtype)  # [B, features]
        return self.head(x)  # [B, num_classes]


class Shrink(nnx.Module):
    """A convolution of squares that do not overlap, and a layer normalisation before it, or after it in the stem."""

    def __init__(self, channels: int, features: int, side: int, *, norm_first: bool, dtype: Any, rngs: nnx.Rngs):
        normed = channels if norm_first else features
        self.conv = nnx.Conv(
            channels, features, (side, side), side, padding="VALID", kernel_init=INIT, dtype=dtype, rngs=rngs
        )
        self.norm = normalisation("layer", normed, epsilon=EPSILON, dtype=dtype, rngs=rngs)
        self.norm_first = norm_first
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.norm_first:
            return self.conv(self.norm(x).astype(self.dtype))
        return self.norm(self.conv(x)).astype(self.dtype)


class Block(nnx.Module):
    """x + scale · f(x), f: depthwise 7×7, layer norm, four times as wide with GELU, and back. [B, H, W, C] kept."""

    def __init__(self, features: int, layer_scale: float, rate: float, *, dtype: Any, rngs: nnx.Rngs):
        self.spatial = nnx.Conv(
            features,
            features,
            (7, 7),
            padding=3,
            feature_group_count=features,
            kernel_init=INIT,
            dtype=dtype,
            rngs=rngs,
        )
        self.norm = normalisation("layer", features, epsilon=EPSILON, dtype=dtype, rngs=rngs)
        self.wide = Linear(features, 4 * features, kernel_init=INIT, dtype=dtype, rngs=rngs)
        self.narrow = Linear(4 * features, features, kernel_init=INIT, dtype=dtype, rngs=rngs)
        self.scale = nnx.Param(jnp.full((features,), layer_scale, jnp.float32))
        self.depth = StochasticDepth(rngs) if rate else None
        self.rate = rate
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norm(self.spatial(x)).astype(self.dtype)
        y = self.narrow(nnx.gelu(self.wide(y), approximate=False))
        y = y * self.scale[...].astype(self.dtype)[None, None, None]
        return x + (y if self.depth is None else self.depth(y, self.rate))
