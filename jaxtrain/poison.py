"""A loss that is NaN at chosen data positions, made from outside: a column beside the batch, of ones or of NaN."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import numpy as np

from jaxtrain import contract
from jaxtrain.errors import UserError

COLUMN = "poison"  # float32 [B]


class Poisoned:
    """A task whose losses are multiplied by the column, where the batch has one."""

    def __init__(self, task: Any):
        self._task = task

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def losses(self, outputs: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
        losses = self._task.losses(outputs, batch)
        if COLUMN not in batch:
            return losses
        return losses * (batch[COLUMN] if losses.ndim else batch[COLUMN].mean())


def poisonable(original: Callable[..., Any], builder: Any, *args: Any, **options: Any) -> Any:
    """Stands around `jaxtrain.supply.for_step`. Raises UserError for a step that is not made of a task."""
    supply = original(builder, *args, **options)
    if supply.parts is None:
        raise UserError(
            f"--inject=nan makes the losses of config.task NaN, and step {contract.label(builder)} is not made of "
            "one; leave nan out, or let the step builder ask for `parts`"
        )
    return dataclasses.replace(supply, parts=dataclasses.replace(supply.parts, task=Poisoned(supply.parts.task)))


def dose(batch: Mapping[str, jax.Array], position: int, positions: Collection[int]) -> dict[str, jax.Array]:
    """The batch with the column: NaN at those data positions, else 1."""
    ids = batch["id"]
    column = np.full(ids.shape, np.nan if position in positions else 1, np.float32)
    with jax.transfer_guard("allow"):
        return {**batch, COLUMN: jax.device_put(column, ids.sharding)}
