"""Text out of a language model: temperature, top-k, top-p, one token after the other with a cache.

    python -m jaxtrain.sample --workdir=runs/gpt-1a2b3c4d --prompt='ROMEO:' --tokens=500

During training: `config.evals = {"sample": dict(fn="sample", every="500st")}` shows a text in the log.
"""

import argparse
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain import commandline, precision, sharding
from jaxtrain import main as entry
from jaxtrain.data.vocabulary import Vocabulary, vocabulary
from jaxtrain.errors import UserError
from jaxtrain.job import Job

DURING_TRAINING = 200  # tokens of a text in a report


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn from its probabilities.

    temperature: of the logits; 0 takes the most probable token. top_k: only the k most probable, 0: all. top_p: only
    the most probable that have this share of the probability together (Holtzman et al., "The Curious Case of Neural
    Text Degeneration", 2019), 1: all. Raises UserError for anything else.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature is {self.temperature}, expected 0 (the most probable token) or more")
        if self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}, expected 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}, expected more than 0, and at most 1 (all tokens)")

    def __call__(self, key: jax.Array, logits: jax.Array) -> jax.Array:
        """Of logits [B, V] the tokens drawn, int32 [B]."""
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        logits = self.allowed(logits / self.temperature)
        return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)

    def allowed(self, logits: jax.Array) -> jax.Array:
        """The logits [B, V], minus infinity where a token may not be drawn."""
        ordered = jnp.sort(logits, axis=-1, descending=True)  # [B, V]
        least = ordered[:, -1:]
        if 0 < self.top_k < logits.shape[-1]:
            least = ordered[:, self.top_k - 1 : self.top_k]
        if self.top_p < 1:
            share = jax.nn.softmax(jnp.where(ordered < least, -jnp.inf, ordered), axis=-1)
            before = jnp.cumsum(share, axis=-1) - share  # of the tokens in front; 0 for the first, which always stays
            last = jnp.sum(before < self.top_p, axis=-1, keepdims=True) - 1
            least = jnp.maximum(least, jnp.take_along_axis(ordered, last, axis=-1))
        return jnp.where(logits < least, -jnp.inf, logits)


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Goes on from a text with the network of a job; its step with a cache is compiled once."""

    job: Job
    sampling: Sampling

    def tokens(self, state: Any, prompt: Sequence[int], *, seed: int = 0) -> Iterator[tuple[int, float]]:
        """Without end: each next token, and how probable (log p, nats) the model held it.

        The cache has room for as many tokens as the texts of the training had. Where it is full, the text goes on from
        its last half, read anew. Raises UserError for an empty prompt, and for a model that keeps no cache.
        """
        if not len(prompt):
            raise UserError("there is nothing to go on from: give a prompt of one token or more")
        weights = getattr(state, "ema", ()) or {"params": state.params, "model_state": state.model_state}
        everywhere = sharding.replicated(self.job.mesh)
        step = functools.partial(_step, self._network, self.sampling, everywhere, weights)
        root, text = jax.random.key(seed, impl="threefry2x32"), [int(token) for token in prompt]
        empty = self._empty_cache(weights)
        waiting, used, cache = text[-self.room :], 0, jax.device_put(empty, everywhere)
        while True:
            for token in waiting:
                key = jax.random.fold_in(root, len(text))
                found, cache = step(cache, np.full((1, 1), token, np.int32), key)
            used += len(waiting)
            (token,), (probability,) = jax.device_get(found)
            yield int(token), float(probability)
            text.append(int(token))
            waiting = text[-1:]
            if used == self.room:
                waiting, used, cache = text[-max(1, self.room // 2) :], 0, jax.device_put(empty, everywhere)

    @property
    def room(self) -> int:
        """Tokens that the model has seen at once in training."""
        return int(self.job.dataset.spec["tokens"].shape[0]) - 1

    def _empty_cache(self, weights: Any) -> Any:
        begin = functools.partial(_applied, self._network, room=self.room)
        try:
            _, shapes = jax.eval_shape(begin, weights, tokens=jax.ShapeDtypeStruct((1, 1), np.int32))
        except TypeError as error:
            raise UserError(
                f"model {self.job.config.model.name} does not take `room` and return (logits, cache), as sampling "
                f"needs ({error}); take gpt, llama or rnn, or see jaxtrain.models.decoder.Decoder.__call__"
            ) from None
        return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)

    @property
    def _network(self) -> Callable[..., Any]:
        assert self.job.parts is not None
        return self.job.parts.model.apply


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def _step(
    apply: Callable[..., Any],
    sampling: Sampling,
    where: Any,
    weights: Any,
    cache: Any,
    tokens: jax.Array,
    key: jax.Array,
) -> Any:
    """tokens int32 [1, 1] -> ((the next token [1], its log p [1]), cache). One program, also where it goes on."""
    logits, cache = _applied(apply, weights, tokens=tokens, cache=cache)
    logits = logits[:, -1].astype(jnp.float32)  # [1, V]
    token = sampling(key, logits)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], axis=-1)[:, 0]
    return jax.lax.with_sharding_constraint(((token, chosen), cache), where)


def _applied(apply: Callable[..., Any], weights: Any, **inputs: Any) -> Any:
    outputs, _ = apply(weights["params"], weights["model_state"], inputs, key=None, train=False)
    return outputs


def report(predict: Any, source: Any, *, job: Job, state: Any) -> dict[str, Any]:
    """An evaluation: {"text": what the model writes after the first words of `source`, "entropy": …}.

    The entropy is that of the text, in nats a token, as the model sees it. The same state writes the same text.
    """
    words, sampler = words_of(job), Sampler(job, Sampling())
    prompt = source.get(np.arange(1))["tokens"][0][: max(1, sampler.room // 8)].tolist()
    drawn = list(_until_end(sampler.tokens(state, prompt), words, DURING_TRAINING))
    text = words.decode([*prompt, *(token for token, _ in drawn if token != words.end)])
    return {"text": text, "entropy": -float(np.mean([value for _, value in drawn]))}


def words_of(job: Job, tokenizer: str = "") -> Vocabulary:
    """What the numbers of a job's data set mean. Raises UserError where nothing says so."""
    if "tokens" not in job.dataset.spec or job.parts is None:
        raise UserError(f"data set {job.dataset.name} has no tokens: sampling takes the run of a language model")
    words = vocabulary(tokenizer or job.config.data.get("tokenizer", ""))
    if words.size != job.dataset.num_classes:
        raise UserError(
            f"the model knows {job.dataset.num_classes} tokens, and {tokenizer or 'what its data set names'} has "
            f"{words.size}; give --tokenizer=tokenizer.json, the one that made its tokens"
        )
    return words


def _until_end(drawn: Iterator[tuple[int, float]], words: Vocabulary, most: int) -> Iterator[tuple[int, float]]:
    """Up to `most` tokens, or to the one that ends a text."""
    for _ in range(most):
        token, probability = next(drawn)
        yield token, probability
        if token == words.end:
            return


def run(argv: Sequence[str]) -> int:
    """The command. Returns the exit code; raises what is a mistake."""
    flags = _parser().parse_args(argv)
    sampling = Sampling(flags.temperature, flags.top_k, flags.top_p)
    if flags.tokens < 1:
        raise UserError(f"--tokens={flags.tokens}, expected 1 or more")
    from jaxtrain.result import load

    trained = load(flags.workdir, trust=flags.trust).only(flags.member)
    words = words_of(trained.job, flags.tokenizer)
    ((prompt, _),) = words.encode([flags.prompt.encode()])
    drawn = Sampler(trained.job, sampling).tokens(trained.state, prompt.tolist(), seed=flags.seed)
    with precision.scope(trained.job.policy):
        _print(words, prompt.tolist(), _until_end(drawn, words, flags.tokens))
    return 0


def _print(words: Vocabulary, text: list[int], drawn: Iterator[tuple[int, float]]) -> None:
    """Shows the text as it grows; a character once all of its bytes are there."""
    shown = ""
    for token, _ in drawn:
        if token != words.end:
            text.append(token)
        now = words.decode(text)
        if not now.endswith("\ufffd"):
            print(now.removeprefix(shown), end="", flush=True)
            shown = now
    print(words.decode(text).removeprefix(shown))


def _parser() -> argparse.ArgumentParser:
    parser = commandline.Parser(
        prog="python -m jaxtrain.sample",
        description="Text out of a trained language model.",
        epilog="exit codes: 0 done; 2 a mistake, told in one line",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--workdir", metavar="DIR", required=True, help="of the run that trained it")
    add("--prompt", default="\n", help="text to go on from (a new line)")
    add("--tokens", type=int, default=500, help="to write, at most (500)")
    add("--temperature", type=float, default=0.8, help="0: always the most probable token (0.8)")
    add("--top_k", type=int, default=0, help="only the k most probable tokens (0: all)")
    add("--top_p", type=float, default=1.0, help="only the most probable ones with this share in all (1: all)")
    add("--seed", type=int, default=0, help="another one writes another text (0)")
    add("--tokenizer", default="", help="tokenizer.json, where the data set of the run names none")
    add("--member", type=int, help="number of the member, where config.replicas trained several")
    add("--trust", action="store_true", help="run code of others that the workdir names")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line. Returns the exit code."""
    return entry.guarded(run, argv)


if __name__ == "__main__":
    sys.exit(main())
