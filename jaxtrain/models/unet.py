"""U-Net: Ronneberger et al., "U-Net: Convolutional Networks for Biomedical Image Segmentation", 2015.

The differences from the paper, all usual today: convolutions are padded, so that the output is as large as the
picture, and normalised.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.models.layers import ConvNorm, Norm, max_pool, picture_shape
from jaxtrain.models.layers import dropout as dropout_layer


class UNet(nnx.Module):
    """A contracting path of `depth` halvings at doubling width, and back up, joined at each size to what went down.

    [B, H, W, C] of any number type -> logits [B, H, W, num_classes] in `dtype`; parameters float32. `width` is that at
    full size, 64 in the paper; each side of the picture must be a multiple of 2^depth. `dropout` acts at the lowest
    size. `norm` is explained in `layers.normalisation`.
    """

    def __init__(
        self,
        num_classes: int,
        width: int = 64,
        depth: int = 4,
        dropout: float = 0.0,
        norm: Norm = "batch",
        *,
        input_shape: tuple[int, ...],
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        *size, channels = picture_shape("unet", input_shape)
        if depth < 1 or any(side % 2**depth for side in size):
            raise UserError(
                f"model unet: depth={depth} halves each side of a picture that often; expected 1 or more, and sides "
                f"that are multiples of {2 ** max(depth, 1)}, found {size[0]}×{size[1]}"
            )
        options: dict[str, Any] = {"norm": norm, "dtype": dtype, "rngs": rngs}
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nnx.List(
            Pair(before, after, **options) for before, after in itertools.pairwise([channels, *widths])
        )
        self.up: nnx.List = nnx.List()
        self.join: nnx.List = nnx.List()
        for fine, coarse in zip(widths[-2::-1], widths[:0:-1], strict=True):
            self.up.append(nnx.ConvTranspose(coarse, fine, (2, 2), (2, 2), dtype=dtype, rngs=rngs))
            self.join.append(Pair(2 * fine, fine, **options))
        self.dropout = dropout_layer(dropout, rngs)
        self.head = nnx.Conv(width, num_classes, (1, 1), dtype=dtype, rngs=rngs)
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.astype(self.dtype)  # [B, H, W, C]
        passed = []
        for level, pair in enumerate(self.down):
            if level:
                passed.append(x)
                x = max_pool(x)
            x = pair(x)  # [B, H / 2^level, W / 2^level, width · 2^level]
        x = self.dropout(x)
        for up, join in zip(self.up, self.join, strict=True):
            x = join(jnp.concatenate([passed.pop(), up(x)], axis=-1))
        return self.head(x)  # [B, H, W, num_classes]


class Pair(nnx.Module):
    """Two 3×3 convolutions, each normalised, with ReLU: float [B, H, W, channels] -> [B, H, W, features]."""

    def __init__(self, channels: int, features: int, **options: Any):
        self.layers = nnx.List(ConvNorm(before, features, 3, **options) for before in (channels, features))

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return x
