"""Recurrent networks: LSTM and GRU, as language models and as readers of a whole text."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.models.layers import Linear
from jaxtrain.models.layers import dropout as dropout_layer
from jaxtrain.models.transformer import restarting, wide

Cell = Literal["lstm", "gru"]
Carry = dict[str, jax.Array]  # what a layer remembers: {"hidden": [B, D]}, of an LSTM also "cell": [B, D]


class Recurrent(nnx.Module):
    """One layer over time, a `lax.scan`. [B, T, inputs] -> [B, T, width] in `dtype`; the carry is float32.

    "lstm": Hochreiter and Schmidhuber, "Long Short-Term Memory", 1997, with forget gates (Gers et al., 2000) whose bias
    starts at 1. "gru": Cho et al., 2014, in the form of cuDNN and PyTorch, where the reset gate acts on the product.
    """

    def __init__(self, inputs: int, width: int, cell: Cell, *, dtype: Any, rngs: nnx.Rngs):
        self.width, self.cell, self.dtype = width, cell, dtype
        gates = 4 if cell == "lstm" else 3
        uniform = nnx.initializers.uniform(2 / width**0.5)

        def kernel(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32, **_: Any) -> jax.Array:
            return uniform(key, shape, dtype) - jnp.asarray(1 / width**0.5, dtype)  # in ±1/√width, as PyTorch's

        def bias(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32, **_: Any) -> jax.Array:
            zeros = jnp.zeros(shape, dtype)
            return zeros.at[width : 2 * width].set(1) if cell == "lstm" else zeros  # order: input, forget, cell, output

        self.input = Linear(inputs, gates * width, kernel_init=kernel, bias_init=bias, dtype=dtype, rngs=rngs)
        self.recurrent = Linear(
            width, gates * width, use_bias=cell == "gru", kernel_init=kernel, dtype=dtype, rngs=rngs
        )

    def start(self, rows: int) -> Carry:
        names = ("hidden", "cell") if self.cell == "lstm" else ("hidden",)
        return {name: jnp.zeros((rows, self.width), wide(self.dtype)) for name in names}

    def __call__(
        self, x: jax.Array, carry: Carry, keep: jax.Array | None = None, valid: jax.Array | None = None
    ) -> tuple[jax.Array, Carry]:
        """keep: bool [B, T], false where a new text begins. valid: bool [B, T], false where the carry stays.

        Without them nothing is looked at, which saves a small network a tenth of its memory traffic.
        """
        kernel, bias = self.recurrent.kernel[...].astype(self.dtype), self.recurrent.bias
        added = None if bias is None else bias[...].astype(self.dtype)[None]
        step = _lstm if self.cell == "lstm" else _gru

        def advance(carry: Carry, at: tuple[Any, ...]) -> tuple[Carry, jax.Array]:
            x, keep, valid = at  # [B, gates · D], [B], [B]
            old = carry if keep is None else {name: jnp.where(keep[:, None], leaf, 0) for name, leaf in carry.items()}
            product = old["hidden"].astype(x.dtype) @ kernel
            new = step(x, product if added is None else product + added, old)
            if valid is not None:
                new = {name: jnp.where(valid[:, None], leaf, carry[name]) for name, leaf in new.items()}
            return new, new["hidden"].astype(x.dtype)

        over_time = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), (self.input(x), keep, valid))
        carry, outputs = jax.lax.scan(advance, carry, over_time)
        return jnp.swapaxes(outputs, 0, 1), carry


class RNN(nnx.Module):
    """A language model: embeddings, `depth` recurrent layers of `width` with dropout between, a linear head.

    tokens: integers [B, T] in 0..num_classes-1 -> logits [B, T, num_classes] in `dtype` of the token that follows each;
    parameters float32.
    """

    def __init__(
        self,
        num_classes: int,
        cell: Cell = "lstm",
        width: int = 256,
        depth: int = 2,
        dropout: float = 0.0,
        *,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.layers = _Layers(num_classes, cell, width, depth, dropout, dtype=dtype, rngs=rngs)
        self.head = Linear(width, num_classes, dtype=dtype, rngs=rngs)

    def __call__(
        self, tokens: jax.Array, segments: jax.Array | None = None, *, room: int = 0, cache: Any = None
    ) -> Any:
        """Logits [B, T, V]; with `room` or `cache` the pair (logits, cache), as of `decoder.Decoder`; any room does.

        segments: int [B, T], packed texts: the memory is empty where one begins.
        """
        keep = None if segments is None else restarting(segments) != 0
        outputs, carries = self.layers(tokens, cache, keep)
        logits = self.head(outputs)
        return (logits, carries) if room or cache is not None else logits


class RNNClassifier(nnx.Module):
    """Reads a text to its end; a linear head on the last layer's hidden state there.

    tokens: integers [B, T] in 0..vocabulary-1; length: int32 [B], tokens that are text, what stands behind them does
    not matter -> logits [B, num_classes] in `dtype`; parameters float32.
    """

    def __init__(
        self,
        num_classes: int,
        vocabulary: int = 256,
        cell: Cell = "lstm",
        width: int = 128,
        depth: int = 1,
        dropout: float = 0.0,
        *,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.layers = _Layers(vocabulary, cell, width, depth, dropout, dtype=dtype, rngs=rngs)
        self.head = Linear(width, num_classes, dtype=dtype, rngs=rngs)
        self.dropout = dropout_layer(dropout, rngs)
        self.dtype = dtype

    def __call__(self, tokens: jax.Array, length: jax.Array) -> jax.Array:
        valid = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :] < length[:, None]
        _, carries = self.layers(tokens, None, None, valid)
        return self.head(self.dropout(carries[-1]["hidden"].astype(self.dtype)))


class _Layers(nnx.Module):
    """Embeddings and the recurrent layers: tokens [B, T] -> [B, T, width], and each layer's carry."""

    def __init__(
        self, vocabulary: int, cell: Cell, width: int, depth: int, dropout: float, *, dtype: Any, rngs: nnx.Rngs
    ):
        self.embedding = nnx.Embed(vocabulary, width, dtype=dtype, rngs=rngs)
        self.recurrent = nnx.List(Recurrent(width, width, cell, dtype=dtype, rngs=rngs) for _ in range(depth))
        self.dropouts = nnx.List(dropout_layer(dropout, rngs) for _ in range(depth))

    def __call__(
        self, tokens: jax.Array, carries: Any, keep: jax.Array | None, valid: jax.Array | None = None
    ) -> tuple[jax.Array, tuple[Carry, ...]]:
        x = self.embedding(tokens.astype(jnp.int32))
        after = []
        for number, (layer, dropout) in enumerate(zip(self.recurrent, self.dropouts, strict=True)):
            x, carry = layer(x, layer.start(len(x)) if carries is None else carries[number], keep, valid)
            x = dropout(x)
            after.append(carry)
        return x, tuple(after)


def _lstm(x: jax.Array, product: jax.Array, carry: Carry) -> Carry:
    """Gates [B, 4 · D] of the input and of the hidden state."""
    wanted = (x + product).astype(carry["cell"].dtype)
    into, forget, new, out = jnp.split(wanted, 4, axis=-1)
    cell = nnx.sigmoid(forget) * carry["cell"] + nnx.sigmoid(into) * jnp.tanh(new)
    return {"hidden": nnx.sigmoid(out) * jnp.tanh(cell), "cell": cell}


def _gru(x: jax.Array, product: jax.Array, carry: Carry) -> Carry:
    """Gates [B, 3 · D] of the input and of the hidden state: reset, update, new."""
    dtype = carry["hidden"].dtype
    ours, theirs = (jnp.split(leaf.astype(dtype), 3, axis=-1) for leaf in (x, product))
    reset, update = nnx.sigmoid(ours[0] + theirs[0]), nnx.sigmoid(ours[1] + theirs[1])
    new = jnp.tanh(ours[2] + reset * theirs[2])
    return {"hidden": (1 - update) * new + update * carry["hidden"]}
