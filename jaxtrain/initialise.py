"""`config.init_from`: weights of another run to begin with. They fit one to one, or the run does not start."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.errors import UserError
from jaxtrain.job import Job
from jaxtrain.sharding import path_string
from jaxtrain.storage.checkpoint import Checkpoints, locate
from jaxtrain.storage.mirror import fetched

TAKEN = ("params", "model_state")


def initialised(job: Job, state: Any, say: Any) -> Any:
    """`state` with the parameters and model state of the checkpoint in `config.init_from`.

    That is a workdir or its folder of checkpoints, where the newest one counts, or one checkpoint. Raises UserError,
    before any step, where it is not there, or a tensor or its shape or dtype is not what the model needs;
    StorageError, where a checkpoint that was named is damaged.
    """
    if not hasattr(state, "params"):
        raise UserError(f"config.init_from sets `params`, and the state of step {job.step_name} has none")
    folder, step = locate(fetched(job.config.init_from))
    checkpoints = Checkpoints(folder, say=say)
    if step is None and (step := checkpoints.latest()) is None:
        raise UserError(f"config.init_from is {job.config.init_from!r}, and every checkpoint in {folder} is damaged")
    found = checkpoints.restore_flat(step, "state")
    taken = {}
    for part in [part for part in TAKEN if hasattr(state, part)]:
        wanted = getattr(job.abstract, part)
        _refuse_differences(str(folder / str(step)), part, wanted, found)
        taken[part] = jax.tree_util.tree_map_with_path(
            lambda path, leaf, part=part: jax.device_put(found[_key(part, path)], leaf.sharding), wanted
        )
    say(f"{' and '.join(taken)} taken from {folder / str(step)}")
    if getattr(state, "ema", ()):
        return dataclasses.replace(state, ema=jax.tree.map(jnp.copy, taken), **taken)
    return dataclasses.replace(state, **taken)


def _refuse_differences(where: str, part: str, wanted: Any, found: dict[str, Any]) -> None:
    leaves = {_key(part, path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(wanted)}
    there = {key for key in found if key.startswith(f"state/{part}/")}
    wrong = [f"{key} is missing" for key in leaves.keys() - there]
    wrong += [f"{key} is not in this model" for key in there - leaves.keys()]
    wrong += [
        f"{key} has {found[key].dtype}{list(found[key].shape)}, expected {leaf.dtype}{list(leaf.shape)}"
        for key, leaf in leaves.items()
        if key in there and (found[key].shape, found[key].dtype) != (leaf.shape, leaf.dtype)
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise UserError(f"config.init_from: {where} does not fit: {'; '.join(sorted(wrong)[:3])}{more}")


def _key(part: str, path: Any) -> str:
    return f"state/{part}/{path_string(path)}"
