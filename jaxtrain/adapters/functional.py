"""A model is a pair of pure functions. What every adapter to that form needs: named arrays, and a state of one form."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.errors import UserError
from jaxtrain.sharding import path_string

Tree = dict[str, Any]  # nested dicts with string keys, arrays at the leaves
Named = dict[str, Any]  # "layers/0/kernel" -> leaf


@dataclasses.dataclass(frozen=True)
class Model:
    """What a run needs to know of a network.

    init(key, example) -> (params, model_state): nested dicts of arrays; `example` is an input, batch axis included.
    apply(params, model_state, inputs, *, key, train) -> (outputs, model_state): `inputs` is an array, or a dict of
        arrays that the network takes as keyword arguments; `outputs` is an array or a tree of arrays. The same key
        draws the same dropout masks. Where `train` is False, `key` may be None: what still draws then, always draws
        the same.
    """

    init: Callable[[jax.Array, Any], tuple[Tree, Tree]]
    apply: Callable[..., tuple[Any, Tree]]


def named(tree: Tree) -> Named:
    """The leaves of a tree by their paths."""
    return {path_string(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def nested(leaves: Mapping[str, Any]) -> Tree:
    """The tree behind `named`."""
    tree: Tree = {}
    for path, leaf in leaves.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def refuse_others(expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raises UserError where `found` has not the names that are expected."""
    if different := set(expected) ^ set(found):
        raise UserError(
            f"these are not the arrays of this model: {', '.join(sorted(different)[:3])} is in only one of the two"
        )


def as_before(label: str, before: Named, after: Named) -> Named:
    """The state after a call, in the form it had before: a step is compiled once, for one form.

    Raises UserError for a variable that came, went, or changed its shape or kind.
    """
    if changed := sorted(after.keys() ^ before.keys()):
        raise UserError(
            f"{label} made or removed its variable {changed[0]} in a call; a state keeps its form: "
            "make all variables in __init__"
        )
    same = {}
    for path, value in after.items():
        old = before[path]
        if value.dtype != old.dtype and all(jnp.issubdtype(x.dtype, jnp.floating) for x in (value, old)):
            value = value.astype(old.dtype)  # written by a layer that computes in fewer bits
        if (value.shape, value.dtype) != (old.shape, old.dtype):
            raise UserError(
                f"{label} turned its variable {path} from {old.dtype}{list(old.shape)} into "
                f"{value.dtype}{list(value.shape)} in a call; shape and type stay as __init__ made them"
            )
        same[path] = value
    return same


def arrays(label: str, outputs: Any) -> Any:
    """`outputs`, where they are a JAX array or a tree of them. Raises UserError for anything else."""
    leaves = jax.tree.leaves(outputs, is_leaf=lambda leaf: leaf is None)
    wrong = [leaf for leaf in leaves if not isinstance(leaf, jax.Array)]
    if wrong or not leaves:
        found = type(wrong[0] if wrong else outputs).__name__
        raise UserError(f"{label} returned {found}; expected a JAX array, or a tree of them")
    return outputs
