"""A loss that is NaN at chosen data positions, made from outside: a column beside the batch says where."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain import contract
from jaxtrain.errors import UserError

COLUMN = "poison"  # bool [B]
_PLACES = 16  # of data positions in a program, used or not: so that all starts have one program


class Poisoned:
    """A task whose losses are NaN where the column is true, in batches that have one."""

    def __init__(self, task: Any):
        self._task = task

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def losses(self, outputs: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
        losses = self._task.losses(outputs, batch)
        if COLUMN not in batch:
            return losses
        # A product, so that the gradient is NaN too.
        return losses * jnp.where(batch[COLUMN] if losses.ndim else batch[COLUMN].any(), jnp.nan, 1)


def poisonable(original: Callable[..., Any], builder: Any, *args: Any, **options: Any) -> Any:
    """Stands around `jaxtrain.supply.for_step`. Raises UserError for a step that is not made of a task."""
    supply = original(builder, *args, **options)
    if supply.parts is None:
        raise UserError(
            f"--inject=nan makes the losses of config.task NaN, and step {contract.label(builder)} is not made of "
            "one; leave nan out, or let the step builder ask for `parts`"
        )
    return dataclasses.replace(supply, parts=dataclasses.replace(supply.parts, task=Poisoned(supply.parts.task)))


def found(positions: Collection[int], original: Callable[..., Any], job: Any) -> Callable[..., Any]:
    """Stands around `jaxtrain.loop.intake.batch_of`: each batch that it finds gets the column."""
    find = original(job)

    def dosed(data: Any, position: jax.Array) -> dict[str, jax.Array]:
        return dose(find(data, position), position, positions)

    return dosed


def again(positions: Collection[int], original: Callable[..., Any], job: Any, position: int) -> dict[str, jax.Array]:
    """Stands around `jaxtrain.loop.nonfinite.batch_at`."""
    with jax.transfer_guard("allow"):
        return dose(original(job, position), jnp.int32(position), positions)


def dose(batch: Mapping[str, jax.Array], position: jax.Array, positions: Collection[int]) -> dict[str, jax.Array]:
    """The batch with the column, true in the first row at those data positions."""
    first = jnp.arange(batch["id"].shape[0], dtype=jnp.int32) == 0
    chosen = np.full(max(_PLACES, len(positions)), -1, np.int32)
    chosen[: len(positions)] = sorted(positions)
    return {**batch, COLUMN: first & (position == chosen).any()}
