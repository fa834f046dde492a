"""Language models that read from left to right: in the style of GPT-2, and in that of Llama."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.models.layers import Linear
from jaxtrain.models.layers import dropout as dropout_layer
from jaxtrain.models.transformer import Block, Feed, Norm, Remat, Stack, norm_layer, normal, restarting


class Decoder(nnx.Module):
    """A causal transformer; the defaults are GPT-2's: Radford et al., "Language Models are Unsupervised Multitask
    Learners", 2019 (learnt positions, LayerNorm, GELU, biases, output weights tied to the embeddings).

    tokens: integers [B, T] in 0..num_classes-1 -> logits [B, T, num_classes] in `dtype` of the token that follows each;
    parameters float32. Options:

    context: the longest text that learnt positions reach; without them (rope > 0: the base of rotary ones) any length.
    kv_heads: heads of keys and values, 0: as many as `heads`. hidden: of the feed-forward part, 0: 4 · width (GELU), or
    8/3 · width in multiples of 64 (SwiGLU). dropout: on the embeddings and on what each block adds; attention_dropout:
    on the probabilities of the attention (GPT-2 was trained with 0.1 for both), which costs the fused kernels. epsilon:
    of the norms. scan, remat: of the blocks, see `transformer.Stack`. Raises UserError for sizes that do not fit
    together.
    """

    def __init__(
        self,
        num_classes: int,
        width: int = 768,
        depth: int = 12,
        heads: int = 12,
        context: int = 1024,
        kv_heads: int = 0,
        hidden: int = 0,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        norm: Norm = "layer",
        epsilon: float = 1e-5,
        feed: Feed = "gelu",
        bias: bool = True,
        rope: float = 0.0,
        qk_norm: bool = False,
        tied: bool = True,
        scan: bool = False,
        remat: Remat = "none",
        *,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.context, self.dtype = context, dtype
        self.embedding = nnx.Embed(num_classes, width, embedding_init=normal(0.02), dtype=dtype, rngs=rngs)
        self.positions = (
            None if rope else nnx.Embed(context, width, embedding_init=normal(0.02), dtype=dtype, rngs=rngs)
        )
        self.dropout = dropout_layer(dropout, rngs)

        def block(rngs: nnx.Rngs) -> Block:
            return Block(
                width,
                hidden or (4 * width if feed == "gelu" else -(-8 * width // 192) * 64),
                norm=norm,
                feed=feed,
                bias=bias,
                scale=0.02 / (2 * depth) ** 0.5,  # so that the stream's variance does not grow with depth: GPT-2
                dropout=dropout,
                attention_dropout=attention_dropout,
                epsilon=epsilon,
                dtype=dtype,
                rngs=rngs,
                heads=heads,
                kv_heads=kv_heads,
                rope=rope,
                qk_norm=qk_norm,
            )

        self.stack = Stack(block, depth, scan=scan, remat=remat, rngs=rngs)
        self.norm = norm_layer(norm, width, dtype, rngs, epsilon)
        self.head = (
            None
            if tied
            else Linear(width, num_classes, use_bias=False, kernel_init=normal(0.02), dtype=dtype, rngs=rngs)
        )
        # The numbers in a cache: [depth, B, room, key heads, width of a head].
        self.cached = (depth, kv_heads or heads, width // heads)

    def __call__(
        self, tokens: jax.Array, segments: jax.Array | None = None, *, room: int = 0, cache: Any = None
    ) -> Any:
        """Logits [B, T, V]; with `room` or `cache` the pair (logits, cache).

        segments: int [B, T], packed texts: a token sees those of its own segment only, and positions begin anew in
        each. To go on from a text: room=S makes a cache for S tokens in all, and `cache` is what an earlier call
        returned; the tokens given are those that are new.
        """
        if cache is None and room:
            depth, heads, size = self.cached
            zeros = jnp.zeros((depth, len(tokens), room, heads, size), self.dtype)
            cache = {"keys": zeros, "values": zeros, "length": jnp.zeros((), jnp.int32)}
        self._refuse(tokens, segments, cache)
        at = _at(tokens, segments, cache)
        x = self.embedding(tokens.astype(jnp.int32))  # [B, T, D]
        if self.positions is not None:
            x = x + self.positions(at[0])
        kept = None if cache is None else {name: cache[name] for name in ("keys", "values")}
        x, kept = self.stack(self.dropout(x), at, kept)
        x = self.norm(x).astype(self.dtype)
        logits = self.embedding.attend(x) if self.head is None else self.head(x)  # [B, T, V]
        return logits if cache is None else (logits, kept | {"length": cache["length"] + tokens.shape[1]})

    def _refuse(self, tokens: jax.Array, segments: jax.Array | None, cache: Any) -> None:
        length = tokens.shape[1] if cache is None else cache["keys"].shape[2]
        if self.positions is not None and length > self.context:
            raise UserError(
                f"a text of {length} tokens is longer than the model's learnt positions, {self.context}; "
                "set config.model.context, or rotary positions: config.model.rope=10000"
            )
        if cache is not None and segments is not None:
            raise UserError("a decoder with a cache was given segments too; give it one text a row")


def llama(
    num_classes: int,
    width: int = 2048,
    depth: int = 22,
    heads: int = 32,
    kv_heads: int = 4,
    hidden: int = 0,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    epsilon: float = 1e-5,
    rope: float = 10000.0,
    qk_norm: bool = False,
    tied: bool = False,
    scan: bool = False,
    remat: Remat = "none",
    *,
    dtype: Any = jnp.float32,
    rngs: nnx.Rngs,
) -> Decoder:
    """The same decoder as Touvron et al. made it, "LLaMA", 2023: RMSNorm, rotary positions, SwiGLU, no biases, fewer
    key heads than query heads. The defaults are TinyLlama's (Zhang et al., 2024), where hidden=5632; the first Llama
    has epsilon=1e-6.
    """
    return Decoder(
        num_classes,
        width,
        depth,
        heads,
        kv_heads=kv_heads,
        hidden=hidden,
        dropout=dropout,
        attention_dropout=attention_dropout,
        norm="rms",
        epsilon=epsilon,
        feed="swiglu",
        bias=False,
        rope=rope,
        qk_norm=qk_norm,
        tied=tied,
        scan=scan,
        remat=remat,
        dtype=dtype,
        rngs=rngs,
    )


def _at(tokens: jax.Array, segments: jax.Array | None, cache: Any) -> tuple[jax.Array, jax.Array | None, bool]:
    """Where each token stands and what it sees, as `transformer.Positions`."""
    place = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :], tokens.shape)
    if cache is not None:
        place = place + cache["length"]
        keys = jnp.arange(cache["keys"].shape[2], dtype=jnp.int32)
        return place, keys[None, None, None, :] <= place[:, None, :, None], False
    if segments is None:
        return place, None, True
    same = segments[:, None, :, None] == segments[:, None, None, :]  # [B, 1, T, T]
    return restarting(segments), same, True
