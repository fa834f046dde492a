"""The next token of a text."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.metrics import Mean, Metrics

Batch = Mapping[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Perplexity(Mean):
    """e to the mean of all values ever seen."""

    def compute(self) -> float:
        mean = super().compute()
        return math.exp(mean) if not mean > 700 else math.inf  # NaN stays NaN


@dataclass(frozen=True, kw_only=True)
class LanguageModelling:
    """Cross-entropy of each token given those before it, over a vocabulary of `num_classes`. A `jaxtrain.tasks.Task`.

    z_loss: weight of log² of the softmax's denominator in the training loss, which keeps logits from drifting
        (Chowdhery et al., "PaLM", 2022: 1e-4). Metrics are without it.

    The batch holds `tokens`, integers [B, T + 1]: the model sees the first T and is asked for the last T. Where texts
    are packed, `segments` int32 [B, T + 1] numbers them from 1 (0: padding), the model gets them too, and no token is
    asked for across a border. `bytes` int32 [B], of the tokens asked for, is what bits per byte are counted by.
    Outputs are logits [B, T, num_classes] of any float dtype; all arithmetic on them is float32, or float64.

    The mean is over tokens, not texts: see `counts`. A token outside 0..num_classes-1 is refused on the host.
    """

    num_classes: int
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if not self.num_classes or self.num_classes < 2:
            raise UserError(
                f"language modelling: the data has a vocabulary of {self.num_classes}, expected 2 or more: take a data "
                "set of text"
            )
        if not 0 <= self.z_loss < math.inf:
            raise UserError(f"language modelling: z_loss={self.z_loss}, expected 0 or more")

    def inputs(self, batch: Batch) -> Any:
        """tokens [B, T]; with packed texts {"tokens", "segments"}."""
        if "tokens" not in batch:
            raise UserError(f"language modelling: needs batch['tokens'], found {', '.join(batch)}")
        if "segments" not in batch:
            return batch["tokens"][:, :-1]
        return {"tokens": batch["tokens"][:, :-1], "segments": batch["segments"][:, :-1]}

    def counts(self, batch: Batch) -> jax.Array:
        """Tokens asked for in each text, int32 [B]: the step divides by their sum over the global batch."""
        return jnp.sum(_asked(batch), axis=1, dtype=jnp.int32)

    def losses(self, outputs: jax.Array, batch: Batch) -> jax.Array:
        """The summed training loss of each text's tokens, float32 [B]."""
        nats, normaliser, _ = self._tokens(outputs, batch)
        each = nats + self.z_loss * jnp.square(normaliser) if self.z_loss else nats
        return jnp.sum(jnp.where(_asked(batch), each, 0), axis=1)

    def metrics(self, outputs: jax.Array, batch: Batch, mask: jax.Array) -> Metrics:
        """loss (nats a token, without z_loss), perplexity, accuracy, bits_per_byte where the batch holds `bytes`."""
        nats, _, hits = self._tokens(outputs, batch)
        asked = _asked(batch) & mask[:, None]
        loss = Mean.of(nats, asked)
        found: Metrics = {
            "loss": loss,
            "accuracy": Mean.of(hits, asked),
            "perplexity": Perplexity(loss.total, loss.count),
        }
        if "bytes" in batch:
            count = jnp.sum(jnp.where(mask, batch["bytes"], 0), dtype=jnp.int32)
            found["bits_per_byte"] = Mean(loss.total / jnp.float32(math.log(2)), count)
        return found

    def predict(self, outputs: jax.Array) -> dict[str, jax.Array]:
        """token int32 [B, T], the most probable next one after each; probability float32 [B, T] of it."""
        logits = self._logits(outputs)
        return {
            "token": jnp.argmax(logits, axis=-1).astype(jnp.int32),
            "probability": jnp.max(jax.nn.softmax(logits), axis=-1).astype(jnp.float32),
        }

    def check(self, batch: Mapping[str, np.ndarray]) -> None:
        """Refuse a host batch without integer tokens in 0..num_classes-1. Raises UserError naming the ids."""
        tokens = batch.get("tokens")
        if tokens is None or not np.issubdtype(tokens.dtype, np.integer) or tokens.ndim != 2:
            found = {name: f"{value.dtype}{list(value.shape)}" for name, value in batch.items()}
            raise UserError(f"language modelling: needs batch['tokens'], integers [B, T + 1], found {found}")
        bad = ((tokens < 0) | (tokens >= self.num_classes)).any(axis=1) & batch.get("mask", np.True_)
        if bad.any():
            row = int(np.argmax(bad))
            number = batch.get("id", np.arange(len(tokens)))[row]
            raise UserError(
                f"language modelling: tokens go from 0 to {self.num_classes - 1}, but example {number} holds "
                f"{tokens[row].min()} to {tokens[row].max()}: mend the data set, or its vocabulary"
            )

    def _tokens(self, outputs: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Of each token asked for, [B, T]: -log p, the log of the softmax's denominator, and whether it came first."""
        logits, wanted = self._logits(outputs), batch["tokens"][:, 1:].astype(jnp.int32)
        if logits.shape[:2] != wanted.shape:
            raise UserError(
                f"language modelling: the model's outputs are {list(outputs.shape)} for inputs {list(wanted.shape)}, "
                f"expected {[*wanted.shape, self.num_classes]}: logits after each token"
            )
        normaliser = jax.nn.logsumexp(logits, axis=-1)
        # A masked sum: its gradient is no scatter, and it shards over the vocabulary.
        token = jnp.arange(self.num_classes, dtype=jnp.int32)[None, None, :]
        chosen = jnp.sum(jnp.where(token == wanted[:, :, None], logits, 0), axis=-1)
        # What `argmax` would say, of equals the first; XLA's own for CPUs is slow enough to show in a step's time.
        largest = jnp.max(logits, axis=-1)
        before = jnp.any((logits == largest[:, :, None]) & (token < wanted[:, :, None]), axis=-1)
        return normaliser - chosen, normaliser, (chosen == largest) & ~before

    def _logits(self, outputs: jax.Array) -> jax.Array:
        if outputs.ndim != 3 or outputs.shape[-1] != self.num_classes:
            raise UserError(
                f"language modelling: the model's outputs are {list(outputs.shape)}, expected [batch, tokens, "
                f"{self.num_classes}]: take a language model (gpt, llama, rnn)"
            )
        return outputs.astype(jnp.float64 if outputs.dtype == jnp.float64 else jnp.float32)


def _asked(batch: Batch) -> jax.Array:
    """Which of the last T tokens are to be predicted, bool [B, T]."""
    if "segments" not in batch:
        return jnp.ones(batch["tokens"][:, 1:].shape, bool)
    before, after = batch["segments"][:, :-1], batch["segments"][:, 1:]
    return (before == after) & (after > 0)
