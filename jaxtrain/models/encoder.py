"""A transformer that reads a whole text at once, and says one thing of it."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.models.layers import Linear
from jaxtrain.models.layers import dropout as dropout_layer
from jaxtrain.models.transformer import Block, Remat, Stack, norm_layer, normal

Pool = Literal["mean", "cls"]


class Encoder(nnx.Module):
    """A bidirectional transformer and a linear head: Devlin et al., "BERT", 2018, with the norm before each part.

    tokens: integers [B, T] in 0..vocabulary-1; length: int32 [B], tokens that are text, what stands behind them does
    not matter -> logits [B, num_classes] in `dtype`; parameters float32. pool: "mean" over the text, or "cls": a learnt
    token of its own in front of it. context: the longest T. hidden: of the feed-forward part, 0: 4 · width. dropout: on
    the embeddings and on what each block adds; attention_dropout: on the probabilities of the attention (BERT was
    trained with 0.1 for both), which costs the fused kernels. scan, remat: of the blocks, see `transformer.Stack`.
    Raises UserError for sizes that do not fit together.
    """

    def __init__(
        self,
        num_classes: int,
        vocabulary: int = 256,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        context: int = 512,
        hidden: int = 0,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        pool: Pool = "mean",
        scan: bool = False,
        remat: Remat = "none",
        *,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.context, self.dtype = context, dtype
        self.embedding = nnx.Embed(vocabulary, width, embedding_init=normal(0.02), dtype=dtype, rngs=rngs)
        self.positions = nnx.Embed(context, width, embedding_init=normal(0.02), dtype=dtype, rngs=rngs)
        self.first = nnx.Param(normal(0.02)(rngs.params(), (1, 1, width), jnp.float32)) if pool == "cls" else None
        self.dropout = dropout_layer(dropout, rngs)

        def block(rngs: nnx.Rngs) -> Block:
            return Block(
                width,
                hidden or 4 * width,
                norm="layer",
                feed="gelu",
                bias=True,
                scale=0.02 / (2 * depth) ** 0.5,
                dropout=dropout,
                attention_dropout=attention_dropout,
                dtype=dtype,
                rngs=rngs,
                heads=heads,
            )

        self.stack = Stack(block, depth, scan=scan, remat=remat, rngs=rngs)
        self.norm = norm_layer("layer", width, dtype, rngs)
        self.head = Linear(width, num_classes, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array, length: jax.Array) -> jax.Array:
        if tokens.shape[1] > self.context:
            raise UserError(
                f"a text of {tokens.shape[1]} tokens is longer than the encoder's positions, {self.context}; "
                "set config.model.context"
            )
        place = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :], tokens.shape)
        x = self.embedding(tokens.astype(jnp.int32)) + self.positions(place)  # [B, T, D]
        text = place < length[:, None]  # [B, T]
        if self.first is not None:
            first = jnp.broadcast_to(self.first[...].astype(self.dtype), (len(x), 1, x.shape[-1]))
            x, text = jnp.concatenate([first, x], axis=1), jnp.pad(text, ((0, 0), (1, 0)), constant_values=True)
        x, _ = self.stack(self.dropout(x), (place, text[:, None, None, :], False))
        x = self.norm(x)  # in float32, as a mean of many numbers should be
        pooled = x[:, 0] if self.first is not None else masked_mean(x, text)
        return self.head(pooled.astype(self.dtype))


def masked_mean(x: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean of x [B, T, D] over the places of `mask` [B, T]: [B, D]. Of no place: zeros."""
    total = jnp.where(mask[:, :, None], x, 0).sum(axis=1)
    return total / jnp.maximum(mask.sum(axis=1), 1).astype(x.dtype)[:, None]
