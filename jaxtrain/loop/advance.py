"""The compiled program of a run: one step, and the metrics of the report interval summed on the device."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import checkify

from jaxtrain import sharding
from jaxtrain.errors import NonFiniteError
from jaxtrain.job import Job
from jaxtrain.metrics import as_monoids, empty, merge


def plain_advance(job: Job) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """(state, sums, batch) -> (state, sums): one program for the whole run, the state donated."""
    return jax.jit(functools.partial(_advance, job.steps.train), donate_argnums=0, out_shardings=_shardings(job))


def checked_advance(job: Job) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """The same step with a check behind every operation: raises NonFiniteError naming the first that made a NaN."""
    checked = jax.jit(checkify.checkify(functools.partial(_advance, job.steps.train), checkify.nan_checks))

    def advance(state: Any, sums: Any, batch: Any) -> tuple[Any, Any]:
        error, result = checked(state, sums, batch)
        if message := error.get():
            first = message.splitlines()[0]
            raise NonFiniteError(f"--debug: in the step after step {int(state.step)}: {first}")
        return result

    return advance


def _advance(step: Callable[..., Any], state: Any, sums: Any, batch: Any) -> tuple[Any, Any]:
    state, metrics = step(state, batch)
    return state, merge(sums, as_monoids(metrics))


def _shardings(job: Job) -> tuple[Any, Any]:
    return jax.tree.map(lambda leaf: leaf.sharding, (job.abstract, abstract_sums(job)))


def abstract_sums(job: Job) -> Any:
    """The metrics of one step as ShapeDtypeStructs, on every device."""
    shapes = jax.eval_shape(as_monoids, job.outcome)
    everywhere = sharding.replicated(job.mesh)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), shapes)


def zero_sums(job: Job) -> Any:
    """Metrics of no step at all: where a report interval begins."""
    shapes = abstract_sums(job)
    return jax.jit(lambda: empty(shapes), out_shardings=jax.tree.map(lambda leaf: leaf.sharding, shapes))()
