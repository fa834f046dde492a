"""Whether a state is finite: asked of the device at once, read when somebody can wait.

The answer is a few bytes of its own, so that the state may be donated to the next step meanwhile.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import NonFiniteError
from jaxtrain.sharding import path_string


@jax.jit
def all_finite(tree: Any) -> jax.Array:
    """bool [L]: of each of the L leaves of `tree`, in its order, whether it has neither NaN nor infinity.

    A scalar may be infinite, as "the best so far" of an optimizer is at first. What is not floating point passes.
    Compiled; returns at once.
    """
    return jnp.stack([jnp.ones((), bool), *map(_sound, jax.tree.leaves(tree))])[1:]


def refusal(tree: Any, step: int, members: Sequence[str] = ()) -> Callable[[], None]:
    """What to call later, from any thread: waits for the device; raises NonFiniteError, naming the first leaf.

    Returns at once and keeps nothing of `tree`. For `Checkpoints.save(before_commit=…)`, so that no state that is
    not finite becomes a checkpoint. `members` names those whose states are stacked in `tree.members`.
    """
    if members:
        tree = tree.members
    paths = [path_string(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    leaves = jax.tree.leaves(tree)
    flags = _all_finite_of_each(leaves) if members else all_finite(leaves)[None]  # [members, leaves]

    def refuse() -> None:
        for found, name in zip(np.asarray(flags), members or ("",), strict=True):
            wrong = [path for path, sound in zip(paths, found, strict=True) if not sound]
            if wrong:
                more = f", and {len(wrong) - 1} more arrays" if len(wrong) > 1 else ""
                who = f" of {name}" if name else ""
                raise NonFiniteError(f"the state of step {step}{who} is not finite: {wrong[0]}{more}", step)

    return refuse


_all_finite_of_each = jax.jit(jax.vmap(all_finite))


def _sound(leaf: Any) -> jax.Array:
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return jnp.ones((), bool)
    if leaf.ndim == 0:
        return ~jnp.isnan(leaf)
    # Differences are 0 or NaN, and so is their sum, over devices too, where a maximum may lose a NaN on the way. The
    # obvious `isfinite(leaf).all()` takes several times as long on a CPU.
    return jnp.sum(leaf - leaf) == 0
