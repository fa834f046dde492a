"""One mesh for everything, and rules that say how arrays lie on it."""

import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxtrain.errors import UserError

Rules = Sequence[tuple[str, Sequence[str | None]]]


def make_mesh(devices: Sequence[jax.Device], axes: Sequence[tuple[str, int]] = (("data", -1),)) -> Mesh:
    """A mesh over `devices`. One axis may have size -1: it takes what the others leave.

    The axes are `Auto`, so that a user's model needs no sharding annotations. Raises UserError when the sizes do
    not multiply to the number of devices.
    """
    names, sizes = [name for name, _ in axes], [size for _, size in axes]
    if "data" not in names or sizes.count(-1) > 1:
        raise UserError(f"config.mesh is {tuple(axes)}; it needs an axis named 'data' and at most one size of -1")
    known = int(np.prod([size for size in sizes if size != -1], dtype=np.int64))
    sizes = [len(devices) // known if size == -1 else size for size in sizes]
    if int(np.prod(sizes, dtype=np.int64)) != len(devices):
        raise UserError(
            f"config.mesh {tuple(axes)} does not fit {len(devices)} devices; its sizes must multiply to that"
        )
    return Mesh(np.asarray(devices).reshape(sizes), names, axis_types=(AxisType.Auto,) * len(names))


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def over_batch(mesh: Mesh) -> NamedSharding:
    """The leading axis is split over the mesh axis "data"."""
    return NamedSharding(mesh, PartitionSpec("data"))


def gathered(mesh: Mesh, tree: Any) -> Any:
    """The arrays of `tree` as NumPy's, whole in every process; of several processes all must call it."""
    if jax.process_count() > 1:
        tree = jax.jit(_same, out_shardings=replicated(mesh))(tree)
    return jax.device_get(tree)


def _same(tree: Any) -> Any:
    return tree


def path_string(path: Sequence[Any]) -> str:
    """ "params/dense/kernel" for a JAX key path."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def paths(tree: Any) -> tuple[list[str], Any]:
    """The path of each leaf of a tree, in order, and the tree's structure."""
    flat, structure = jax.tree_util.tree_flatten_with_path(tree)
    return [path_string(path) for path, _ in flat], structure


def of_state(mesh: Mesh, state: Any, rules: Rules = ()) -> Any:
    """A tree of shardings for `state` (arrays or ShapeDtypeStructs): the first rule whose regular expression is
    found in a leaf's path, else replicated.

    A rule reaches the parameter, its moments and its average alike, for their paths all end in the parameter's.
    Raises UserError for an unknown axis, a dimension that does not divide, or a rule that matches nothing.
    """
    used: set[str] = set()

    def one(path: Sequence[Any], leaf: Any) -> NamedSharding:
        name = path_string(path)
        for pattern, axes in rules:
            if re.search(pattern, name) and len(axes) == len(leaf.shape):
                used.add(pattern)
                return _checked(mesh, name, leaf.shape, axes)
        return replicated(mesh)

    shardings = jax.tree_util.tree_map_with_path(one, state)
    for pattern, axes in rules:
        if pattern not in used:
            raise UserError(
                f"config.sharding_rules: {pattern!r} matches no array of {len(axes)} dimensions in the state"
            )
    return shardings


def _checked(mesh: Mesh, name: str, shape: Sequence[int], axes: Sequence[str | None]) -> NamedSharding:
    for size, axis in zip(shape, axes, strict=True):
        if axis is not None and axis not in mesh.shape:
            raise UserError(f"config.sharding_rules names axis {axis!r}; the mesh has {', '.join(mesh.axis_names)}")
        if axis is not None and size % mesh.shape[axis]:
            raise UserError(
                f"config.sharding_rules: {name} has shape {tuple(shape)}; {size} does not divide over the "
                f"{mesh.shape[axis]} devices of axis {axis!r}"
            )
    return NamedSharding(mesh, PartitionSpec(*axes))
