"""A small convolutional network for small pictures, quick on a CPU."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.models.layers import ConvNorm, Norm, max_pool, picture_shape
from jaxtrain.models.layers import dropout as dropout_layer

SMALLEST_MAP = 4  # pixels: below that a 3×3 convolution sees mostly padding
WIDEST = 8  # times `width`


class CNN(nnx.Module):
    """Stages of two 3×3 convolutions at doubling width, 2×2 max-pooling between them, mean over positions, linear head.

    The plan is that of VGG (Simonyan and Zisserman, 2014), with normalisation and without its dense layers.
    [B, H, W, C] of any number type -> logits [B, num_classes] in `dtype`; parameters float32. `depth` is the number of
    stages; 0 takes as many as leave the last map at least 4 pixels wide: 2 for 8×8 pictures, 3 for 28×28, 4 for 32×32.
    `dropout` acts before the head. `norm` is explained in `layers.normalisation`.
    """

    def __init__(
        self,
        num_classes: int,
        width: int = 32,
        depth: int = 0,
        dropout: float = 0.0,
        norm: Norm = "batch",
        *,
        input_shape: tuple[int, ...],
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        *size, channels = picture_shape("cnn", input_shape)
        self.stages: nnx.List = nnx.List()
        for stage in range(_checked_depth(depth, *size)):
            features = width * min(2**stage, WIDEST)
            self.stages.append(
                nnx.List(
                    ConvNorm(before, features, 3, norm=norm, dtype=dtype, rngs=rngs) for before in (channels, features)
                )
            )
            channels = features
        self.dropout = dropout_layer(dropout, rngs)
        self.head = nnx.Linear(channels, num_classes, dtype=dtype, rngs=rngs)
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.astype(self.dtype)  # [B, H, W, C]
        for index, stage in enumerate(self.stages):
            if index:
                x = max_pool(x)  # [B, H/2, W/2, C]
            for layer in stage:
                x = nnx.relu(layer(x))  # [B, H, W, features]
        x = x.mean(axis=(1, 2))  # [B, features]
        return self.head(self.dropout(x))  # [B, num_classes]


def _checked_depth(depth: int, height: int, width: int) -> int:
    side = min(height, width)
    if depth == 0:
        return max(1, (side // SMALLEST_MAP).bit_length())
    if not 0 < depth <= side.bit_length():
        raise UserError(
            f"model cnn: depth={depth} does not fit a picture of {height}×{width}, which can be halved "
            f"{side.bit_length() - 1} times; expected 1 to {side.bit_length()}, or 0 to choose by size"
        )
    return depth
