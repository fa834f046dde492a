"""The network of the CIFAR-10 speed records: Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", 2024.

A whitening convolution, three groups of plain 3×3 convolutions, a linear head. What the records initialise and train in
ways of their own is left to the config: `initialise` (whitening, dirac, unit_std), `frozen`, `param_groups`.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.models.layers import max_pool, picture_shape

# Uniform within 1 / sqrt(fan_in): what PyTorch's layers begin with.
UNIFORM = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": functools.partial(nnx.gelu, approximate=False),
    "silu": nnx.silu,
}


class AirBench(nnx.Module):
    """float [B, H, W, C] -> logits [B, num_classes] in `dtype`; parameters float32. Pictures of 26 pixels or more.

    `widths` are those of the groups, each [3×3 convolution, 2×2 max-pooling, normalisation, activation, then depth − 1
    times (3×3 convolution, normalisation, activation)]; with `residual` the last two of a group have a shortcut. The
    stem is a `patch` × `patch` convolution without padding to twice as many channels as a patch has numbers, GELU after
    it. The batch normalisations have no gain, an `epsilon`, and averages that keep a share `momentum` of themselves a
    step. The logits are multiplied by `scale`; 0 takes 1 / (the last width).
    """

    def __init__(
        self,
        num_classes: int,
        widths: tuple[int, ...] = (64, 256, 256),
        depth: int = 2,
        residual: bool = False,
        activation: Literal["gelu", "silu"] = "gelu",
        patch: int = 2,
        momentum: float = 0.6,
        epsilon: float = 1e-12,
        scale: float = 0.0,
        *,
        input_shape: tuple[int, ...],
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        *size, channels = picture_shape("airbench", input_shape)
        _refuse_small("airbench", size, patch, widths)
        if depth < 1 or (residual and depth < 3):
            raise UserError(f"model airbench: depth={depth}, expected 1 or more, with residual 3 or more")
        if activation not in ACTIVATIONS:
            raise UserError(f"model airbench: activation={activation!r}, expected one of {', '.join(ACTIVATIONS)}")
        stem = 2 * patch * patch * channels
        options: dict[str, Any] = {"kernel_init": UNIFORM, "dtype": dtype, "rngs": rngs}
        self.stem = nnx.Conv(channels, stem, (patch, patch), padding="VALID", **options)
        self.groups = nnx.List(
            Group(before, after, depth, residual, activation, momentum, epsilon, dtype=dtype, rngs=rngs)
            for before, after in itertools.pairwise((stem, *widths))
        )
        self.head = nnx.Linear(widths[-1], num_classes, use_bias=False, **options)
        self.scale = scale or 1 / widths[-1]
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        x = ACTIVATIONS["gelu"](self.stem(x.astype(self.dtype)))  # [B, H - 1, W - 1, stem]
        for group in self.groups:
            x = group(x)  # [B, H / 2, W / 2, width]
        x = x.max(axis=(1, 2))  # [B, width]
        return self.head(x) * jnp.asarray(self.scale, self.dtype)  # [B, num_classes]


class Group(nnx.Module):
    """float [B, H, W, before] -> [B, H / 2, W / 2, after], see `AirBench`."""

    def __init__(
        self,
        before: int,
        after: int,
        depth: int,
        residual: bool,
        activation: str,
        momentum: float,
        epsilon: float,
        *,
        dtype: Any,
        rngs: nnx.Rngs,
    ):
        self.convs = nnx.List(
            nnx.Conv(
                after if place else before, after, (3, 3), use_bias=False, kernel_init=UNIFORM, dtype=dtype, rngs=rngs
            )
            for place in range(depth)
        )
        wide = jnp.float64 if dtype == jnp.float64 else jnp.float32  # means and variances of many numbers need that
        self.norms = nnx.List(
            nnx.BatchNorm(after, use_scale=False, momentum=momentum, epsilon=epsilon, dtype=wide, rngs=rngs)
            for _ in range(depth)
        )
        self.residual, self.activation, self.dtype = residual, activation, dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        act, last = ACTIVATIONS[self.activation], len(self.convs) - 1
        shortcut = x
        for place, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = conv(x)
            x = x if place else max_pool(x)
            x = norm(x).astype(self.dtype)
            if self.residual and place == last:
                x = x + shortcut
            x = act(x)
            shortcut = x if place == last - 2 else shortcut
        return x


def _refuse_small(model: str, size: list[int], patch: int, widths: tuple[int, ...]) -> None:
    if not widths or min(widths) < 1 or patch < 1:
        raise UserError(f"model {model}: widths={widths}, patch={patch}, expected numbers of 1 or more")
    side = (min(size) - patch + 1) >> len(widths)
    if side < 1:
        raise UserError(
            f"model {model} halves a picture {len(widths)} times after a convolution of {patch}×{patch} without "
            f"padding; one of {size[0]}×{size[1]} leaves nothing: give fewer widths"
        )
