"""Several runs of one step in one program: a `Steps` over their states, stacked.

    state.members[r], metrics[r] = step(state.members[r], batch[r])        r = 0 … R − 1

Each member sees what it would see alone: its own batch, its own keys. One after the other in the program, their
arithmetic is that of a single run, bit by bit; under vmap it is the same but for the rounding of sums.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.metrics import Members, as_monoids
from jaxtrain.step import Batch, Metrics, Steps

Mode = Literal["vmap", "unrolled"]
Call = Callable[[Any, Batch, Any], Any]  # (state of a member, its rows, its values) → what its step returns


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Replicas:
    """The state of R members. What every run needs stands in front; they have it in common."""

    step: jax.Array  # int32 []
    offset: jax.Array  # int32 []; this one counts, whatever the members' own say
    key: jax.Array  # typed threefry key []: the first member's
    members: Any  # their states, each leaf [R, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """How R members lie in the program, and on the devices of its mesh.

    spread: each device has R / devices members of its own, and none waits for another's; else every device has all
    members, and rows of each one's batch.
    """

    mode: Mode
    mesh: Mesh
    spread: bool


@dataclasses.dataclass(frozen=True)
class Group:
    """The members: the steps of each, and `traced(values)`, which makes those for numbers that are only traced.

    values: key of the config → float32 [R], of what differs beside the seed.
    """

    alone: Sequence[Steps]
    traced: Callable[[Mapping[str, Any]], Steps]
    values: Mapping[str, np.ndarray]
    layout: Layout

    @property
    def constants(self) -> bool:
        """Whether each member may have its numbers as constants, as a single run has."""
        return not self.values or (self.layout.mode == "unrolled" and not self.layout.spread)

    def calls(self, name: str) -> list[Call]:
        """The step function `name` of each member; equal ones are one function, which JAX traces and lowers once."""
        if not self.constants:
            made = functools.partial(_traced, self.traced, name)
            return [jax.jit(made)] * len(self.alone)
        jitted = {id(steps): jax.jit(functools.partial(_constant, steps, name)) for steps in self.alone}
        return [jitted[id(steps)] for steps in self.alone]


def replicated(group: Group) -> Steps:
    """Steps over `Replicas`; init takes the root keys [R].

    train takes batches of R · B rows, one member's after the other's; evaluate and predict show all the same rows.
    Metrics are `Members`; predictions are [B, R, ...].
    """
    first = group.alone[0]
    return Steps(
        init=functools.partial(_init, group),
        train=functools.partial(_train, group, group.calls("train")),
        evaluate=first.evaluate and functools.partial(_evaluate, group, group.calls("evaluate")),
        predict=first.predict and functools.partial(_predict, group, group.calls("predict")),
    )


def member(state: Replicas, index: Any) -> Any:
    """The state of one member, as its single run has it. `index`: int32 []."""
    own = jax.tree.map(lambda leaf: leaf[index], state.members)
    return dataclasses.replace(own, offset=state.offset)


def together(states: Sequence[Any]) -> Replicas:
    """The states of all members as one."""
    first, stacked = states[0], jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    return Replicas(first.step, first.offset, first.key, stacked)


def stacked(alone: Any, size: int, layout: Layout) -> Replicas:
    """The state of `size` members, of ShapeDtypeStructs with shardings, as that of one."""

    def one(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = PartitionSpec("data") if layout.spread else PartitionSpec(None, *leaf.sharding.spec)
        where = NamedSharding(layout.mesh, spec)
        return jax.ShapeDtypeStruct((size, *leaf.shape), leaf.dtype, sharding=where)

    return Replicas(alone.step, alone.offset, alone.key, jax.tree.map(one, alone))


def evaluation(group: Group, evaluate: Callable[[Any, Batch], Metrics]) -> Callable[[Any, Batch], Metrics]:
    """An evaluation step of one member, for all."""
    call = jax.jit(functools.partial(_constant, dataclasses.replace(group.alone[0], evaluate=evaluate), "evaluate"))
    return functools.partial(_evaluate, group, [call] * len(group.alone))


def _init(group: Group, keys: jax.Array) -> Replicas:
    return together([steps.init(keys[index]) for index, steps in enumerate(group.alone)])


def _train(group: Group, calls: list[Call], state: Replicas, batch: Batch) -> tuple[Replicas, Metrics]:
    members, metrics = _over(group, calls, state, batch, own_rows=True)
    alike = set() if "optimizer.learning_rate" in group.values else {"learning_rate"}
    found = {name: Members(each, name in alike) for name, each in metrics.items()}
    return dataclasses.replace(state, step=state.step + 1, members=members), found


def _evaluate(group: Group, calls: list[Call], state: Replicas, batch: Batch) -> Metrics:
    return {name: Members(each) for name, each in _over(group, calls, state, batch, own_rows=False).items()}


def _predict(group: Group, calls: list[Call], state: Replicas, batch: Batch) -> dict[str, jax.Array]:
    found = _over(group, calls, state, batch, own_rows=False)
    return {name: jnp.moveaxis(array, 0, 1) for name, array in found.items()}


def _over(group: Group, calls: list[Call], state: Replicas, batch: Batch, own_rows: bool) -> Any:
    """What the members return, each leaf [R, ...]."""
    layout, size = group.layout, len(group.alone)
    members = dataclasses.replace(state.members, offset=jnp.broadcast_to(state.offset, (size,)))
    values = {} if group.constants else dict(group.values)
    local = functools.partial(_local, calls, layout.mode, own_rows)
    if own_rows:
        batch = {name: x.reshape(size, x.shape[0] // size, *x.shape[1:]) for name, x in batch.items()}  # [R, B, ...]
    if layout.spread:
        own = PartitionSpec("data")
        rows = own if own_rows else PartitionSpec()
        local = jax.shard_map(local, mesh=layout.mesh, in_specs=(own, rows, own), out_specs=own, check_vma=False)
    elif own_rows:
        where = NamedSharding(layout.mesh, PartitionSpec(None, "data"))
        batch = jax.lax.with_sharding_constraint(batch, where)
    return local(members, batch, values)


def _local(calls: list[Call], mode: Mode, own_rows: bool, members: Any, batch: Any, values: Any) -> Any:
    """The members of one device, or all: each leaf [r, ...], and so is what is returned."""
    if mode == "vmap":
        return jax.vmap(calls[0], in_axes=(0, 0 if own_rows else None, 0))(members, batch, values)
    results = []
    for index in range(len(jax.tree.leaves(members)[0])):
        one = jax.tree.map(lambda leaf, r=index: leaf[r], (members, values))
        rows = jax.tree.map(lambda leaf, r=index: leaf[r], batch) if own_rows else batch
        # Barriers: whatever XLA fuses, it fuses within a member, as in the program of a single run.
        state, rows, numbers = jax.lax.optimization_barrier((one[0], rows, one[1]))
        results.append(jax.lax.optimization_barrier(calls[index](state, rows, numbers)))
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)


def _traced(make: Callable[[Mapping[str, Any]], Steps], name: str, state: Any, rows: Batch, values: Any) -> Any:
    return _called(getattr(make(values), name), name, state, rows)


def _constant(steps: Steps, name: str, state: Any, rows: Batch, values: Any) -> Any:
    return _called(getattr(steps, name), name, state, rows)


def _called(function: Callable[[Any, Batch], Any], name: str, state: Any, rows: Batch) -> Any:
    """What it returns, metrics as monoids."""
    found = function(state, rows)
    if name == "train":
        return found[0], as_monoids(found[1])
    return as_monoids(found) if name == "evaluate" else found
