"""What transformers of text are made of: attention, a feed-forward part, blocks, and a stack of them."""

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config.lookup import choices_hint
from jaxtrain.errors import UserError
from jaxtrain.models.attention import Implementation, attend
from jaxtrain.models.layers import Linear
from jaxtrain.models.layers import dropout as dropout_layer

Norm = Literal["layer", "rms"]
Feed = Literal["gelu", "swiglu"]
Remat = Literal["none", "full", "dots"]
Cache = Any  # {"keys", "values": [B, S, K, H]} of a block, [L, B, S, K, H] of a stack
Positions = tuple[jax.Array, jax.Array | None, bool]  # int32 [B, T], mask bool [B, 1, T, S] or None, causal

# What a block keeps for its backward pass; the rest is computed again. "dots": the results of its matrix products.
_POLICIES = {"full": None, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}


def norm_layer(kind: Norm, width: int, dtype: Any, rngs: nnx.Rngs, epsilon: float = 1e-5) -> nnx.Module:
    """LayerNorm (Ba et al., 2016) or RMSNorm (Zhang and Sennrich, 2019); computes in float32, or float64."""
    options: dict[str, Any] = {"epsilon": epsilon, "dtype": wide(dtype), "rngs": rngs}
    return nnx.LayerNorm(width, **options) if kind == "layer" else nnx.RMSNorm(width, **options)


def wide(dtype: Any) -> Any:
    """The dtype of sums and angles, which bfloat16 is too short for."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def normal(scale: float) -> Any:
    """Initial weights of GPT-2: a normal distribution of this standard deviation."""
    return nnx.initializers.normal(scale)


def rotate(x: jax.Array, positions: jax.Array, base: float) -> jax.Array:
    """Rotary positions: Su et al., "RoFormer", 2021. x [B, T, N, H], positions int32 [B, T] -> as x.

    Pairs are (i, i + H/2), as in the weights of Llama that Hugging Face keeps.
    """
    dtype = wide(x.dtype)
    half = x.shape[-1] // 2
    frequency = jnp.exp(jnp.arange(half, dtype=dtype) * (-jnp.log(jnp.asarray(base, dtype)) / half))
    angle = positions.astype(dtype)[:, :, None, None] * frequency[None, None, None, :]  # [B, T, 1, H/2]
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    left, right = jnp.split(x.astype(dtype), 2, axis=-1)
    return jnp.concatenate([left * cosine - right * sine, right * cosine + left * sine], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    """Multi-head attention: Vaswani et al., 2017. Fewer key than query heads: Ainslie et al., "GQA", 2023.

    [B, T, D] -> [B, T, D] in `dtype`. rope: base of the rotary positions, 0: none. qk_norm: RMSNorm of each head's
    queries and keys (Dehghani et al., 2023, with the norm of Llama's family). dropout: of the weights, see `attend`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int = 0,
        *,
        bias: bool = True,
        rope: float = 0.0,
        qk_norm: bool = False,
        dropout: float = 0.0,
        epsilon: float = 1e-5,
        scale: float = 0.02,
        dtype: Any,
        rngs: nnx.Rngs,
    ):
        self.heads, self.kv_heads, self.size, self.rope, self.dtype = (
            heads,
            kv_heads or heads,
            width // heads,
            rope,
            dtype,
        )
        _refuse_heads(width, heads, self.kv_heads, rope)

        def linear(features: int, scale: float = 0.02, inputs: int = width) -> nnx.Linear:
            return Linear(inputs, features, use_bias=bias, kernel_init=normal(scale), dtype=dtype, rngs=rngs)

        self.query = linear(width)
        self.key = linear(self.kv_heads * self.size)
        self.value = linear(self.kv_heads * self.size)
        self.out = linear(width, scale)
        self.query_norm = norm_layer("rms", self.size, dtype, rngs, epsilon) if qk_norm else None
        self.key_norm = norm_layer("rms", self.size, dtype, rngs, epsilon) if qk_norm else None
        self.dropout = dropout_layer(dropout, rngs) if dropout else None

    def __call__(self, x: jax.Array, at: Positions, cache: Cache = None) -> tuple[jax.Array, Cache]:
        positions, mask, causal = at
        query = self._heads(self.query(x), self.heads, self.query_norm, positions)  # [B, T, N, H]
        key = self._heads(self.key(x), self.kv_heads, self.key_norm, positions)  # [B, T, K, H]
        value = self.value(x).reshape(*x.shape[:2], self.kv_heads, self.size)
        if cache is not None:
            cache = {"keys": _put(cache["keys"], key, positions), "values": _put(cache["values"], value, positions)}
            key, value = cache["keys"], cache["values"]  # [B, S, K, H]
        kernel = _implementation(self.dtype, self.size)
        found = attend(query, key, value, mask=mask, causal=causal, dropout=self.dropout, implementation=kernel)
        return self.out(found.reshape(*x.shape[:2], -1)), cache

    def _heads(self, x: jax.Array, heads: int, norm: Any, positions: jax.Array) -> jax.Array:
        x = x.reshape(*x.shape[:2], heads, self.size)
        if norm is not None:
            x = norm(x).astype(self.dtype)
        return rotate(x, positions, self.rope) if self.rope else x


class FeedForward(nnx.Module):
    """Two layers with GELU (Hendrycks and Gimpel, 2016; the tanh form of GPT-2), or gated: Shazeer's SwiGLU, 2020."""

    def __init__(
        self, width: int, hidden: int, kind: Feed, *, bias: bool, scale: float = 0.02, dtype: Any, rngs: nnx.Rngs
    ):
        def linear(inputs: int, features: int, scale: float = 0.02) -> nnx.Linear:
            return Linear(inputs, features, use_bias=bias, kernel_init=normal(scale), dtype=dtype, rngs=rngs)

        self.up = linear(width, hidden)
        self.gate = linear(width, hidden) if kind == "swiglu" else None
        self.down = linear(hidden, width, scale)

    def __call__(self, x: jax.Array) -> jax.Array:
        up = self.up(x)  # [B, T, hidden]
        return self.down(nnx.gelu(up) if self.gate is None else nnx.silu(self.gate(x)) * up)


class Block(nnx.Module):
    """Attention, then feed-forward, each on the normalised stream and added to it ("pre-norm": GPT-2).

    `dropout` acts on what is added, `attention_dropout` on the probabilities of the attention.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        norm: Norm,
        feed: Feed,
        bias: bool,
        scale: float,
        dropout: float,
        attention_dropout: float,
        epsilon: float = 1e-5,
        dtype: Any,
        rngs: nnx.Rngs,
        **attention: Any,
    ):
        attention |= {"dropout": attention_dropout, "epsilon": epsilon}
        self.attention_norm = norm_layer(norm, width, dtype, rngs, epsilon)
        self.attention = Attention(width, bias=bias, scale=scale, dtype=dtype, rngs=rngs, **attention)
        self.feed_norm = norm_layer(norm, width, dtype, rngs, epsilon)
        self.feed = FeedForward(width, hidden, feed, bias=bias, scale=scale, dtype=dtype, rngs=rngs)
        self.dropout = dropout_layer(dropout, rngs)
        self.dtype = dtype

    def __call__(self, x: jax.Array, at: Positions, cache: Cache = None) -> tuple[jax.Array, Cache]:
        added, cache = self.attention(self.attention_norm(x).astype(self.dtype), at, cache)
        x = x + self.dropout(added)
        return x + self.dropout(self.feed(self.feed_norm(x).astype(self.dtype))), cache


class Stack(nnx.Module):
    """`depth` blocks of one form, one after the other.

    scan: their parameters are stacked, [depth, ...], and one block is compiled, in a loop over them. remat: what the
    backward pass computes again: nothing ("none"), all but a block's input ("full"), all but matrix products ("dots").
    """

    def __init__(
        self,
        block: Callable[[nnx.Rngs], Block],
        depth: int,
        *,
        scan: bool = False,
        remat: Remat = "none",
        rngs: nnx.Rngs,
    ):
        if remat not in get_args(Remat):
            raise UserError(f"remat is {remat!r}, unknown.{choices_hint(remat, get_args(Remat))}")
        if depth < 1:
            raise UserError(f"depth is {depth}, expected 1 block or more")
        self.depth, self.scan, self.remat = depth, scan, remat
        self.blocks: Any
        if scan:
            self.blocks = nnx.split_rngs(splits=depth)(nnx.vmap(block, in_axes=0, out_axes=0))(rngs)
        else:
            self.blocks = nnx.List(block(rngs) for _ in range(depth))

    def __call__(self, x: jax.Array, at: Positions, cache: Cache = None) -> tuple[jax.Array, Cache]:
        """[B, T, D] -> [B, T, D], and the caches [depth, ...] with what was added to them."""
        if self.scan:
            graph, state = nnx.split(self.blocks)
            return jax.lax.scan(self._body(graph, at), x, (state, cache))
        caches = []
        for number, block in enumerate(self.blocks):
            graph, state = nnx.split(block)
            x, new = self._body(graph, at)(x, (state, jax.tree.map(lambda leaf, n=number: leaf[n], cache)))
            caches.append(new)
        return x, cache if cache is None else jax.tree.map(lambda *leaves: jnp.stack(leaves), *caches)

    def _body(self, graph: Any, at: Positions) -> Callable[[jax.Array, Any], tuple[jax.Array, Cache]]:
        positions, mask, causal = at

        def body(x: jax.Array, layer: Any) -> tuple[jax.Array, Cache]:
            state, cache = layer
            return nnx.merge(graph, state)(x, (positions, mask, causal), cache)

        if self.remat == "none":
            return body
        # In a loop nothing can be merged with the forward pass, and the barrier against it would cost speed.
        return jax.checkpoint(body, policy=_POLICIES[self.remat], prevent_cse=not self.scan)


def restarting(segments: jax.Array) -> jax.Array:
    """Positions int32 [B, T] that begin at 0 in each segment of int [B, T]."""
    place = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32)[None, :], segments.shape)
    starts = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return place - jax.lax.cummax(jnp.where(starts, place, 0), axis=1)


def _put(cache: jax.Array, new: jax.Array, positions: jax.Array) -> jax.Array:
    """cache [B, S, K, H] with `new` [B, T, K, H] from the first of `positions` on, which are the same in all rows."""
    return jax.lax.dynamic_update_slice_in_dim(cache, new, positions[0, 0], axis=1)


def _implementation(dtype: Any, size: int) -> Implementation:
    """cuDNN's fused kernel where there is one; JAX itself never chooses it."""
    fits = dtype in (jnp.bfloat16, jnp.float16) and size % 8 == 0 and size <= 128
    return "cudnn" if fits and jax.default_backend() == "gpu" else None


def _refuse_heads(width: int, heads: int, kv_heads: int, rope: float) -> None:
    if width % heads or heads % kv_heads:
        raise UserError(
            f"{heads} heads and {kv_heads} key heads do not fit a width of {width}; expected heads to divide the "
            "width, and key heads to divide the heads"
        )
    if rope and width // heads % 2:
        raise UserError(
            f"rotary positions turn pairs, and a head has {width // heads} numbers; expected an even number"
        )
