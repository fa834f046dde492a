"""The compiled program of a run: one step or a loop of them, and the metrics of the interval summed on the device."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from jaxtrain import sharding
from jaxtrain.errors import NonFiniteError
from jaxtrain.job import Job
from jaxtrain.loop.intake import batch_of
from jaxtrain.machine import compiling
from jaxtrain.metrics import as_monoids, empty, merge

Advance = Callable[[Any, Any, Any, int], tuple[Any, Any]]  # (state, sums, data, steps) -> (state, sums)


def plain_advance(job: Job) -> Advance:
    """One program for the whole run, the state donated; `data` is what an intake gives for that many steps."""
    step = functools.partial(_advance, job.steps.train, batch_of(job))
    compiled = functools.partial(
        jax.jit, donate_argnums=0, out_shardings=_shardings(job), compiler_options=compiling.options(job.mesh)
    )
    if job.steps_per_dispatch == 1:
        single = compiled(step)
        return lambda state, sums, data, steps: single(state, sums, data)
    fused = compiled(functools.partial(_repeat, step))
    number = functools.cache(lambda steps: jax.device_put(np.int32(steps), sharding.replicated(job.mesh)))
    return lambda state, sums, data, steps: fused(state, sums, data, number(steps))


def checked_advance(job: Job) -> Advance:
    """The same step with a check behind every operation: raises NonFiniteError naming the first that made a NaN."""
    step = functools.partial(_advance, job.steps.train, batch_of(job))
    checked = jax.jit(checkify.checkify(step, checkify.nan_checks))

    def advance(state: Any, sums: Any, data: Any, steps: int) -> tuple[Any, Any]:
        error, result = checked(state, sums, data)
        if message := error.get():
            first = message.splitlines()[0]
            raise NonFiniteError(f"--debug: in the step after step {int(state.step)}: {first}")
        return result

    return advance


def _advance(train: Callable[..., Any], find: Callable[..., Any], state: Any, sums: Any, data: Any) -> tuple[Any, Any]:
    state, metrics = train(state, find(data, state.step + state.offset))
    return state, merge(sums, as_monoids(metrics))


def _repeat(step: Callable[..., Any], state: Any, sums: Any, data: Any, steps: jax.Array) -> tuple[Any, Any]:
    """`steps` (int32 [], given at run time, so that one program serves them all) steps in a compiled loop."""

    def body(_: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        return step(*carry, data)

    return jax.lax.fori_loop(jnp.int32(0), steps, body, (state, sums))


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
