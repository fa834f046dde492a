"""What several families of convolutional networks share."""

import math
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config.lookup import choices_hint
from jaxtrain.errors import UserError

Norm = Literal["batch", "group", "layer", "none"]


class ConvNorm(nnx.Module):
    """A square convolution, padded as PyTorch pads (kernel // 2 on each side), then a normalisation.

    float [B, H, W, C] -> [B, H / stride, W / stride, features] in `dtype`. The convolution has a bias only where
    there is no normalisation. Initialised for ReLU: He et al., "Delving Deep into Rectifiers", 2015.
    """

    def __init__(
        self,
        channels: int,
        features: int,
        kernel: int,
        stride: int = 1,
        *,
        norm: Norm = "batch",
        scale: float = 1.0,
        dtype: Any,
        rngs: nnx.Rngs,
    ):
        self.conv = nnx.Conv(
            channels,
            features,
            (kernel, kernel),
            stride,
            padding=kernel // 2,
            use_bias=norm == "none",
            kernel_init=nnx.initializers.variance_scaling(2.0, "fan_out", "normal"),
            dtype=dtype,
            rngs=rngs,
        )
        self.norm = normalisation(norm, features, scale, dtype=dtype, rngs=rngs)
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.conv(x)
        # Means and variances of many numbers need float32; what goes on from here is in the compute dtype again.
        return x if self.norm is None else self.norm(x).astype(self.dtype)


class Linear(nnx.Linear):
    """`nnx.Linear` as one product of matrices, whatever axes stand in front: float [..., inputs] -> [..., features].

    With several of them XLA's CPU code takes half as long again for the gradients; elsewhere it is the same.
    """

    def __call__(self, x: jax.Array) -> jax.Array:  # type: ignore[override]  # out_sharding would be of rows
        return super().__call__(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)


def max_pool(x: jax.Array) -> jax.Array:
    """The largest of each 2×2 pixels: [B, H, W, C] -> [B, H // 2, W // 2, C]; an odd last row or column is left out.

    As `nnx.max_pool`, but of four slices: XLA's gradient of a reduced window takes four times as long on a CPU.
    Equal pixels share the gradient.
    """
    height, width = x.shape[1] // 2 * 2, x.shape[2] // 2 * 2
    top, bottom = (jnp.maximum(x[:, row:height:2, 0:width:2], x[:, row:height:2, 1:width:2]) for row in (0, 1))
    return jnp.maximum(top, bottom)


def normalisation(
    name: Norm, features: int, scale: float = 1.0, *, epsilon: float = 1e-5, dtype: Any, rngs: nnx.Rngs
) -> Any:
    """The layer called `name` over the last axis, computing in float32 or wider; its gain starts at `scale`.

    "batch": Ioffe and Szegedy, 2015, over the whole global batch, running averages with momentum 0.9. "group": Wu and
    He, 2018, at most 8 groups. "layer": Ba et al., 2016, over the channels of each position. "none": None.
    Raises UserError for another name.
    """
    options: dict[str, Any] = {
        "epsilon": epsilon,
        "scale_init": nnx.initializers.constant(scale),
        "dtype": jnp.float64 if dtype == jnp.float64 else jnp.float32,
        "rngs": rngs,
    }
    match name:
        case "batch":
            return nnx.BatchNorm(features, momentum=0.9, **options)
        case "group":
            return nnx.GroupNorm(features, num_groups=math.gcd(features, 8), **options)
        case "layer":
            return nnx.LayerNorm(features, **options)
        case "none":
            return None
    raise UserError(f"unknown normalisation {name!r}.{choices_hint(name, get_args(Norm))}")


def dropout(rate: float, rngs: nnx.Rngs) -> nnx.Dropout:
    """Sets a share `rate` of the activations to zero in training: Srivastava et al., "Dropout", 2014.

    Raises UserError for a rate outside [0, 1).
    """
    if not 0 <= rate < 1:
        raise UserError(f"dropout is {rate}, expected a share of at least 0 and less than 1")
    return nnx.Dropout(rate, rngs=rngs)


class StochasticDepth(nnx.Module):
    """Leaves a residual branch out for a share `rate` of the examples in training, scaling it up for the others.

    Huang et al., "Deep Networks with Stochastic Depth", 2016. float [B, ...] kept; in evaluation the branch passes.
    """

    def __init__(self, rngs: nnx.Rngs):
        self.rngs = rngs.dropout.fork()
        self.deterministic = False

    def __call__(self, branch: jax.Array, rate: float | jax.Array) -> jax.Array:
        if self.deterministic:
            return branch
        kept = jax.random.bernoulli(self.rngs(), 1 - rate, (len(branch),) + (1,) * (branch.ndim - 1))
        return jnp.where(kept, branch / jnp.asarray(1 - rate, branch.dtype), jnp.zeros_like(branch))


def depth_rates(last: float, blocks: int) -> list[float]:
    """The rate of each block's stochastic depth: from 0 at the first linearly to `last` at the last.

    Raises UserError for a rate outside [0, 1).
    """
    if not 0 <= last < 1:
        raise UserError(f"stochastic_depth is {last}, expected a rate of at least 0 and less than 1")
    return [last * block / max(1, blocks - 1) for block in range(blocks)]


def picture_shape(model: str, input_shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(height, width, channels) of one input. Raises UserError for inputs that are no pictures."""
    if len(input_shape) != 3:
        raise UserError(f"model {model} takes pictures (H, W, C); the data has inputs of shape {tuple(input_shape)}")
    height, width, channels = input_shape
    return height, width, channels
