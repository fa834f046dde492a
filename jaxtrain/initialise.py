"""`config.init_from`: weights of another run to begin with. They fit one to one, or the run does not start."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.checkpoint import Checkpoints
from jaxtrain.errors import UserError
from jaxtrain.job import Job
from jaxtrain.sharding import path_string

TAKEN = ("params", "model_state")


def initialised(job: Job, state: Any, say: Any) -> Any:
    """`state` with the parameters and model state of the newest checkpoint of the run in `config.init_from`.

    Raises UserError, before any step, where the folder, a tensor or its shape or dtype is not what the model needs.
    """
    if not hasattr(state, "params"):
        raise UserError(f"config.init_from sets `params`, and the state of step {job.step_name} has none")
    folder = Path(job.config.init_from).absolute()
    checkpoints = Checkpoints(folder / "checkpoints")
    step = checkpoints.latest() if checkpoints.folder.is_dir() else None
    if step is None:
        raise UserError(f"config.init_from is {str(folder)!r}; that is no workdir with a complete checkpoint")
    found = checkpoints.restore_flat(step, "state")
    taken = {}
    for part in [part for part in TAKEN if hasattr(state, part)]:
        wanted = getattr(job.abstract, part)
        _refuse_differences(f"{folder} step {step}", part, wanted, found)
        taken[part] = jax.tree_util.tree_map_with_path(
            lambda path, leaf, part=part: jax.device_put(found[_key(part, path)], leaf.sharding), wanted
        )
    say(f"{' and '.join(taken)} taken from step {step} of {folder}")
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
