"""Vision transformers: Dosovitskiy et al., "An Image is Worth 16x16 Words", 2020; sizes Ti and S: Touvron et al., 2020.

Options from later work: mean and attention pooling (Zhai et al., "Scaling Vision Transformers", 2021), registers
(Darcet et al., "Vision Transformers Need Registers", 2023), stochastic depth (as in Touvron et al., "Training
data-efficient image transformers", 2020).
"""

import functools
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config.lookup import choices_hint
from jaxtrain.errors import UserError
from jaxtrain.models.attention import attend
from jaxtrain.models.layers import Linear, StochasticDepth, depth_rates, normalisation, picture_shape
from jaxtrain.models.layers import dropout as dropout_layer

Size = Literal["Ti", "S", "B", "L"]
Pool = Literal["cls", "mean", "map"]
Remat = Literal["none", "full", "dots"]
SIZES = {"Ti": (192, 12, 3), "S": (384, 12, 6), "B": (768, 12, 12), "L": (1024, 24, 16)}  # width, depth, heads
XAVIER = nnx.initializers.xavier_uniform()

# What a block keeps for its backward pass; the rest is computed again. "dots": the results of its matrix products.
POLICIES = {"full": None, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}


class ViT(nnx.Module):
    """ViT of `size` Ti, S, B or L on patches of `patch` × `patch` pixels: "B" with 16 is ViT-B/16.

    [B, H, W, C] of any number type -> logits [B, num_classes] in `dtype`; parameters float32. `width`, `depth` and
    `heads` replace those of the size, where not 0. `pool`: "cls", a token of its own; "mean" over the patches; "map",
    a learnt query that attends to them. `registers` are learnt tokens without a place, thrown away at the end.
    Positions are learnt; weights for another picture size: `resample_positions`. `epsilon` is that of the norms: timm's
    and torchvision's; Hugging Face has 1e-12.

    `dropout` acts on the embedded patches and on what each half of a block adds; `stochastic_depth` is the rate at
    which the last block is left out. `scan` keeps the parameters of all blocks as stacks [depth, ...] and compiles one
    block, in a loop over them. `remat`: what a block computes again in its backward pass: nothing ("none"), all of it
    ("full") or all but its matrix products ("dots").
    """

    def __init__(
        self,
        num_classes: int,
        size: Size = "Ti",
        patch: int = 16,
        pool: Pool = "cls",
        registers: int = 0,
        width: int = 0,
        depth: int = 0,
        heads: int = 0,
        dropout: float = 0.0,
        stochastic_depth: float = 0.0,
        epsilon: float = 1e-6,
        scan: bool = False,
        remat: Remat = "none",
        *,
        input_shape: tuple[int, ...],
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        *sides, channels = picture_shape("vit", input_shape)
        _refuse_unknown(size=(size, Size), pool=(pool, Pool), remat=(remat, Remat))
        if patch < 1 or any(side % patch for side in sides):
            raise UserError(f"model vit: patch={patch} does not divide a picture of {sides[0]}×{sides[1]}")
        width, depth, heads = (own or usual for own, usual in zip((width, depth, heads), SIZES[size], strict=True))
        options: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        self.embed = nnx.Conv(channels, width, (patch, patch), patch, padding="VALID", **options)
        self.cls = nnx.Param(jnp.zeros((1, 1, width), jnp.float32)) if pool == "cls" else None
        tokens = sides[0] // patch * (sides[1] // patch) + (pool == "cls")
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (1, tokens, width), jnp.float32))
        self.registers = (
            nnx.Param(0.02 * jax.random.normal(rngs.params(), (1, registers, width), jnp.float32))
            if registers
            else None
        )
        self.dropout = dropout_layer(dropout, rngs)
        make = functools.partial(Block, width, heads, dropout, stochastic_depth > 0, epsilon, dtype=dtype)
        self.blocks: Any = (
            nnx.split_rngs(splits=depth)(nnx.vmap(lambda rngs: make(rngs=rngs)))(rngs)
            if scan
            else nnx.List(make(rngs=rngs) for _ in range(depth))
        )
        self.norm = normalisation("layer", width, epsilon=epsilon, **options)
        self.pool = AttentionPool(width, heads, epsilon, **options) if pool == "map" else None
        self.head = Linear(width, num_classes, kernel_init=nnx.initializers.zeros, **options)
        self.rates = tuple(depth_rates(stochastic_depth, depth))
        self.tokens, self.scan, self.remat, self.dtype = tokens, scan, remat, dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.embed(x.astype(self.dtype))  # [B, H / patch, W / patch, width]
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        x = self._with(self.cls, x, first=True) + self.positions[...].astype(self.dtype)  # [B, tokens, width]
        x = self._layers(self.dropout(self._with(self.registers, x)))
        x = self.norm(x[:, : self.tokens]).astype(self.dtype)  # without the registers
        return self.head(self._pooled(x))  # [B, num_classes]

    def _pooled(self, x: jax.Array) -> jax.Array:
        """[B, tokens, width] -> [B, width]"""
        if self.cls is not None:
            return x[:, 0]
        return x.mean(axis=1) if self.pool is None else self.pool(x)

    def _with(self, token: Any, x: jax.Array, first: bool = False) -> jax.Array:
        """x [B, N, width] and the learnt tokens [1, n, width], the same in all rows, before or after it."""
        if token is None:
            return x
        learnt = jnp.broadcast_to(token[...].astype(self.dtype), (x.shape[0], *token.shape[1:]))
        return jnp.concatenate([learnt, x] if first else [x, learnt], axis=1)

    def _layers(self, x: jax.Array) -> jax.Array:
        if not self.scan:
            for block, rate in zip(self.blocks, self.rates, strict=True):
                x = self._layer(block, x, rate)
            return x
        graph, params, rest = _split(self.blocks)
        rates = jnp.asarray(self.rates, jnp.float32)
        x, rest = jax.lax.scan(self._body(graph), x, (params, rest, rates))
        nnx.update(self.blocks, rest)  # counters of random streams: the next call draws anew
        return x

    def _layer(self, block: nnx.Module, x: jax.Array, rate: float) -> jax.Array:
        if self.remat == "none":
            return block(x, rate)
        graph, params, rest = _split(block)
        x, rest = self._body(graph)(x, (params, rest, jnp.float32(rate)))
        nnx.update(block, rest)
        return x

    def _body(self, graph: Any) -> Any:
        """One block as a pure function (x, (params, other state, rate)) -> (x, other state)."""

        def body(x: jax.Array, layer: Any) -> tuple[jax.Array, Any]:
            params, rest, rate = layer
            block = nnx.merge(graph, params, rest)
            return block(x, rate), _split(block)[2]

        if self.remat == "none":
            return body
        # In a loop nothing can be merged with the forward pass, and the barrier against it would cost speed.
        return jax.checkpoint(body, policy=POLICIES[self.remat], prevent_cse=not self.scan)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): float [B, N, width] kept."""

    def __init__(
        self, width: int, heads: int, dropout: float, drops: bool, epsilon: float, *, dtype: Any, rngs: nnx.Rngs
    ):
        options: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        self.attention_norm = normalisation("layer", width, epsilon=epsilon, **options)
        self.attention = Attention(width, heads, **options)
        self.mlp_norm = normalisation("layer", width, epsilon=epsilon, **options)
        self.mlp = MLP(width, dropout, **options)
        self.dropout = dropout_layer(dropout, rngs)
        self.depth = StochasticDepth(rngs) if drops else None
        self.dtype = dtype

    def __call__(self, x: jax.Array, rate: float | jax.Array) -> jax.Array:
        """`rate` is that of the stochastic depth."""
        x = x + self._dropped(self.attention(self.attention_norm(x).astype(self.dtype)), rate)
        return x + self._dropped(self.mlp(self.mlp_norm(x).astype(self.dtype)), rate)

    def _dropped(self, branch: jax.Array, rate: float | jax.Array) -> jax.Array:
        branch = self.dropout(branch)
        return branch if self.depth is None else self.depth(branch, rate)


class Attention(nnx.Module):
    """Multi-head self-attention: Vaswani et al., "Attention Is All You Need", 2017. float [B, N, width] kept."""

    def __init__(self, width: int, heads: int, *, dtype: Any, rngs: nnx.Rngs):
        _refuse_uneven(width, heads)
        options: dict[str, Any] = {"kernel_init": XAVIER, "dtype": dtype, "rngs": rngs}
        self.query = Linear(width, width, **options)
        self.key = Linear(width, width, **options)
        self.value = Linear(width, width, **options)
        self.out = Linear(width, width, **options)
        self.heads = heads

    def __call__(self, x: jax.Array, query: jax.Array | None = None) -> jax.Array:
        """[B, N, width], and queries [B, M, width] where they are not those of x itself, to [B, M, width]."""
        query = x if query is None else query
        heads = self._split(self.query(query)), self._split(self.key(x)), self._split(self.value(x))
        found = attend(*heads)
        return self.out(found.reshape(query.shape))

    def _split(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], self.heads, -1)  # [B, N, heads, width / heads]


class MLP(nnx.Module):
    """Four times as wide with GELU, and back: float [..., width] kept."""

    def __init__(self, width: int, dropout: float = 0.0, *, dtype: Any, rngs: nnx.Rngs):
        options: dict[str, Any] = {"kernel_init": XAVIER, "dtype": dtype, "rngs": rngs}
        self.wide = Linear(width, 4 * width, **options)
        self.narrow = Linear(4 * width, width, **options)
        self.dropout = dropout_layer(dropout, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.narrow(self.dropout(nnx.gelu(self.wide(x), approximate=False)))


class AttentionPool(nnx.Module):
    """A learnt query that attends to all tokens, then an MLP: float [B, N, width] -> [B, width]. Zhai et al., 2021."""

    def __init__(self, width: int, heads: int, epsilon: float, *, dtype: Any, rngs: nnx.Rngs):
        self.query = nnx.Param(XAVIER(rngs.params(), (1, 1, width), jnp.float32))
        self.attention = Attention(width, heads, dtype=dtype, rngs=rngs)
        self.norm = normalisation("layer", width, epsilon=epsilon, dtype=dtype, rngs=rngs)
        self.mlp = MLP(width, dtype=dtype, rngs=rngs)
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        query = jnp.broadcast_to(self.query[...].astype(self.dtype), (x.shape[0], 1, x.shape[-1]))
        found = self.attention(x, query)  # [B, 1, width]
        return (found + self.mlp(self.norm(found).astype(self.dtype)))[:, 0]


def resample_positions(positions: jax.Array, before: tuple[int, int], after: tuple[int, int]) -> jax.Array:
    """Learnt positions [1, P + h · w, D] of a grid `before` = (h, w), for another: [1, P + h' · w', D], bicubic.

    The first P, of a CLS token, stay as they are. For weights of another picture size: a grid is the picture's sides
    divided by the patch. Raises UserError where there are fewer positions than the grid has places.
    """
    own = positions.shape[1] - before[0] * before[1]
    if positions.ndim != 3 or own < 0:
        raise UserError(
            f"positions {list(positions.shape)} do not fit a grid of {before[0]}×{before[1]}; expected [1, "
            f"{before[0] * before[1]} or more, width]"
        )
    if before == after:
        return positions
    width = positions.shape[-1]
    grid = positions[:, own:].reshape(1, *before, width)
    grid = jax.image.resize(grid, (1, *after, width), "bicubic")
    return jnp.concatenate([positions[:, :own], grid.reshape(1, -1, width)], axis=1)


def _split(block: nnx.Module) -> tuple[Any, Any, Any]:
    """(static graph, parameters, other state) of a block or of a stack of them."""
    parts: Any = nnx.split(block, nnx.Param, ...)
    return parts


def _refuse_unknown(**given: tuple[str, Any]) -> None:
    for name, (value, allowed) in given.items():
        if value not in get_args(allowed):
            raise UserError(f"model vit has no {name} {value!r}.{choices_hint(value, get_args(allowed))}")


def _refuse_uneven(width: int, heads: int) -> None:
    if width % heads:
        raise UserError(f"model vit: {heads} heads do not divide a width of {width}; choose another width or heads")
