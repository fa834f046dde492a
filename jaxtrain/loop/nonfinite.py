"""What made a loss or gradient non-finite: found by computing the step again, and kept for study.

nonfinite/<step>/report.json   the first arrays that were not finite, and the examples to blame
nonfinite/<step>/batch.npz     the batch as it was loaded, with the ids of its examples
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain import sharding
from jaxtrain.errors import StorageError
from jaxtrain.job import Job
from jaxtrain.machine import distributed
from jaxtrain.sharding import path_string
from jaxtrain.step import Parts, forward, gradients, micro_batches, prepare

SHOWN = 8  # ids in a message


def study(job: Job, halted: Any, step: int, folder: Path | None) -> str:
    """What to say of the update at `step`, computed again. Where there is a workdir, also writes it there.

    halted: the state that the fault left untouched but for its counters (`Parts.halt`).
    Raises StorageError where the workdir cannot be written.
    """
    assert job.parts is not None
    before = dataclasses.replace(halted, step=jnp.full_like(halted.step, step - 1))
    position = step - 1 + int(before.offset)
    batch = batch_at(job, position)
    found, rows = sharding.gathered(job.mesh, _flags(job.parts, before, batch))
    wrong = [path for stage, flags in zip(STAGES, found, strict=True) for path in _not_finite(stage, flags)]
    loaded = sharding.gathered(job.mesh, batch)
    ids = loaded["id"][~rows].tolist() if rows.shape == loaded["id"].shape else []
    if folder is not None and distributed.is_first():
        report = {"step": step, "position": position, "not_finite": wrong, "examples": ids}
        _write(folder / "nonfinite" / str(step), report, loaded)
    where = f"; see {folder / 'nonfinite' / str(step)}" if folder is not None else ""
    if not wrong:
        return f"; computed again, everything is finite: the device or the step is not deterministic{where}"
    of = f"examples {_listed(ids)}" if 0 < len(ids) < len(rows) else f"all {len(loaded['id'])} examples"
    return f"; first in {wrong[0]}{f', with {of} of the batch' if ids else ''}{where}"


def batch_at(job: Job, position: int) -> dict[str, jax.Array]:
    """The batch at a data position, read again."""
    with job.batches(position, position + 1) as batches:
        return next(batches)


STAGES = ("params", "model_state", "batch", "outputs", "losses", "gradients", "grad_norm")  # in this order computed


def _flags(parts: Parts, state: Any, batch: Mapping[str, jax.Array]) -> tuple[list[Any], jax.Array]:
    """For each stage whether its arrays are finite, and whether the loss of each row is (bool [B], or [])."""

    def flags(state: Any, batch: Any) -> tuple[list[Any], jax.Array]:
        prepared = prepare(batch, parts, state)
        mask = prepared.get("mask", jnp.ones(batch["id"].shape, bool))
        losses, outputs = _forward(parts, state, dict(prepared, mask=mask))
        grads = gradients(state, prepared, parts)[0]
        losses = jnp.where(mask, losses, 0) if losses.ndim else losses
        stages = [state.params, state.model_state, prepared, outputs, losses, grads, optax.tree.norm(grads)]
        return [jax.tree.map(_finite, stage) for stage in stages], jnp.isfinite(losses)

    return jax.jit(flags)(state, batch)


def _forward(parts: Parts, state: Any, prepared: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
    """(losses, outputs) as the step computes them, micro-batch by micro-batch; losses in the order of the rows."""
    dropout = state.stream("dropout")
    if parts.accumulate == 1:
        losses, outputs, _ = forward(state.params, state.model_state, prepared, dropout, parts)
        return losses, outputs
    micro = micro_batches(prepared, parts.accumulate)
    model_state, made = state.model_state, []
    for index in range(parts.accumulate):
        rows = jax.tree.map(lambda x, index=index: x[index], micro)
        key = jax.random.fold_in(dropout, index)
        losses, outputs, model_state = forward(state.params, model_state, rows, key, parts)
        made.append((losses, outputs))
    return jnp.stack([losses for losses, _ in made], axis=1).reshape(-1), [outputs for _, outputs in made]


def _finite(leaf: jax.Array) -> jax.Array:
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return jnp.ones((), bool)
    return jnp.isfinite(leaf).all()


def _not_finite(stage: str, flags: Any) -> Iterator[str]:
    for path, finite in jax.tree_util.tree_leaves_with_path(flags):
        if not finite:
            yield f"{stage}/{path_string(path)}".rstrip("/")


def _write(folder: Path, report: Mapping[str, Any], batch: Mapping[str, np.ndarray]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(folder / "batch.npz", allow_pickle=False, **batch)
        (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    except OSError as error:
        raise StorageError(f"cannot write {folder}: {error.strerror}") from error


def _listed(ids: list[int]) -> str:
    more = f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else ""
    return ", ".join(map(str, ids[:SHOWN])) + more
