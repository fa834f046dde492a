"""`config.init_from`: weights to begin with, of another run or of PyTorch. They fit one to one, or no run starts."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.job import Job
from jaxtrain.sharding import path_string
from jaxtrain.storage.checkpoint import Checkpoints, locate
from jaxtrain.storage.mirror import fetched
from jaxtrain.weights import families, files, hub, names

TAKEN = ("params", "model_state")
HEAD = "params/head/"  # what a model of the zoo calls its last layer
POSITIONS = "params/positions"


def initialised(job: Job, state: Any, say: Any) -> Any:
    """`state` with the parameters and model state of `config.init_from`.

    That is a workdir or its folder of checkpoints, where the newest one counts, or one checkpoint; a file of PyTorch's
    weights (.safetensors, .pt, .pth, .bin, or the .index.json of several); or "hf://owner/name".
    `config.init_head="new"` keeps the head as it was drawn, `config.init_positions="resample"` fits a ViT's positions
    to another size of pictures. Raises UserError, before any step, where it is not there, or a tensor or its shape or
    dtype is not what the model needs;
    StorageError, where a checkpoint that was named is damaged. All of several members begin with the same.
    """
    if job.together is not None:
        told = [say, *[lambda text: None] * (len(job.together.members) - 1)]
        each = [
            initialised(job.together.alone(index), job.together.state(state, index), tell)
            for index, tell in enumerate(told)
        ]
        return job.together.whole(each)
    if not hasattr(state, "params"):
        raise UserError(f"config.init_from sets `params`, and the state of step {job.step_name} has none")
    wanted = {
        f"{part}/{path_string(path)}": leaf
        for part in TAKEN
        if hasattr(state, part)
        for path, leaf in jax.tree_util.tree_leaves_with_path(getattr(job.abstract, part))
    }
    if job.config.init_head == "new":
        wanted = _without_head(wanted)
    foreign = job.config.init_from.startswith(hub.PREFIX) or job.config.init_from.endswith(files.SUFFIXES)
    where, found = _of_torch(job, wanted) if foreign else _of_a_run(job.config.init_from, say)
    if job.config.init_head == "new":
        found = {name: array for name, array in found.items() if not name.startswith(HEAD)}
    if job.config.init_positions == "resample":
        found[POSITIONS] = _resampled(job, found, wanted)
    _refuse_differences(where, wanted, found)
    taken = {part: _put(part, getattr(state, part), getattr(job.abstract, part), found) for part in _parts(state)}
    say(f"{' and '.join(taken)} taken from {where}" + (", the head is new" if job.config.init_head == "new" else ""))
    if getattr(state, "ema", ()):
        return dataclasses.replace(state, ema=jax.tree.map(jnp.copy, taken), **taken)
    return dataclasses.replace(state, **taken)


def _parts(state: Any) -> list[str]:
    return [part for part in TAKEN if hasattr(state, part)]


def _put(part: str, state: Any, abstract: Any, found: dict[str, Any]) -> Any:
    """`found` on the devices, and what is not in it as it is in the state."""

    def one(path: Any, like: Any, old: Any) -> Any:
        array = found.get(f"{part}/{path_string(path)}")
        return old if array is None else jax.device_put(np.ascontiguousarray(array), like.sharding)

    return jax.tree_util.tree_map_with_path(one, abstract, state)


def _of_a_run(init_from: str, say: Any) -> tuple[str, dict[str, Any]]:
    """(which checkpoint, its arrays by name)"""
    folder, step = locate(fetched(init_from))
    checkpoints = Checkpoints(folder, say=say)
    if step is None and (step := checkpoints.latest()) is None:
        raise UserError(f"config.init_from is {init_from!r}, and every checkpoint in {folder} is damaged")
    arrays = checkpoints.restore_flat(step, "state")
    if any(name.startswith("state/members/") for name in arrays):
        raise UserError(
            f"config.init_from is {init_from!r}, a run of several members (config.replicas), and a run begins with the "
            "parameters of one: carry on from result.member(0).state in Python"
        )
    parts = tuple(f"state/{part}/" for part in TAKEN)
    return str(folder / str(step)), {
        name.removeprefix("state/"): array for name, array in arrays.items() if name.startswith(parts)
    }


def _of_torch(job: Job, wanted: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(which file, its tensors by our names, and those that we have no name for by theirs)"""
    if "model" in job.objects:
        raise UserError(
            f"config.init_from={job.config.init_from!r} maps names to those of config.model, not of an object"
        )
    given = job.config.init_from
    path = hub.fetched(given) if given.startswith(hub.PREFIX) else Path(given).expanduser()
    tensors = files.read(path)
    library, entries = families.matching(job.config.model.name, wanted, tensors)
    if job.config.init_head == "new":
        heads = {rule.theirs for rule in library.rules if rule.ours == "head"}
        tensors = {name: each for name, each in tensors.items() if name.rpartition(".")[0] not in heads}
    known = {entry.theirs for entry in entries}
    others = {
        name: each
        for name, each in tensors.items()
        if not (name in known or re.fullmatch(library.counted, name) or names.is_copy(library, name, tensors))
    }
    found = names.imported(entries, tensors)
    # Half precision is how weights are handed on; parameters are float32, which holds each of those numbers.
    found = {name: each.astype(wanted[name].dtype) if _is_half(each) else each for name, each in found.items()}
    return f"{path} ({library.library})", found | others


def _is_half(array: np.ndarray) -> bool:
    return array.dtype.itemsize == 2 and jnp.issubdtype(array.dtype, jnp.floating)


def _resampled(job: Job, found: dict[str, Any], wanted: dict[str, Any]) -> Any:
    """The positions found, on the grid of the pictures of this run; they were on a square one."""
    from jaxtrain.models.vit import resample_positions

    if POSITIONS not in wanted or POSITIONS not in found or job.parts is None:
        raise UserError("config.init_positions is 'resample', and the model or the weights have no `positions`")
    old, patch = np.asarray(found[POSITIONS], np.float32), job.config.model.patch
    height, width = (side // patch for side in job.parts.example.shape[1:3])
    own = wanted[POSITIONS].shape[1] - height * width  # of a CLS token
    side = math.isqrt(old.shape[1] - own)
    return np.asarray(resample_positions(jnp.asarray(old), (side, side), (height, width)))


def _without_head(wanted: dict[str, Any]) -> dict[str, Any]:
    kept = {name: leaf for name, leaf in wanted.items() if not name.startswith(HEAD)}
    if len(kept) == len(wanted):
        raise UserError("config.init_head is 'new', and this model has no layer called `head`; set it to 'same'")
    return kept


def _refuse_differences(where: str, wanted: dict[str, Any], found: dict[str, Any]) -> None:
    wrong = [f"{name} is missing" for name in wanted.keys() - found.keys()]
    wrong += [f"{name} is not in this model" for name in found.keys() - wanted.keys()]
    different = [
        name
        for name, leaf in wanted.items()
        if name in found and (tuple(found[name].shape), found[name].dtype) != (leaf.shape, leaf.dtype)
    ]
    wrong += [
        f"{name} has {found[name].dtype}{list(found[name].shape)}, expected {wanted[name].dtype}"
        f"{list(wanted[name].shape)}"
        for name in different
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        hint = _remedy(different)
        raise UserError(f"config.init_from: {where} does not fit: {'; '.join(sorted(wrong)[:3])}{more}{hint}")


def _remedy(different: list[str]) -> str:
    """What to ask for where only that differs."""
    if different and all(name.startswith(HEAD) for name in different):
        return "; for other classes ask for a new head: config.init_head='new'"
    if different == [POSITIONS]:
        return "; for another size of pictures: config.init_positions='resample'"
    return ""
