"""The members of a run that trains several: the job of each, and how they make one job together."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxtrain import flops, metrics, replicas, supply
from jaxtrain.config import checked, grid
from jaxtrain.data import sources
from jaxtrain.errors import UserError
from jaxtrain.step import Steps
from jaxtrain.supply import Supply

Job = Any  # a jaxtrain.job.Job, which is built of this


@dataclasses.dataclass(frozen=True)
class Together:
    """The members of a job that trains several in one program."""

    members: tuple[grid.Member, ...]
    layout: replicas.Layout
    alone: Callable[[int], Job]  # the job of one member, as a single run has it
    evaluation: Callable[[Any], Any]  # an evaluation step of one → of all
    abstract: Any  # the states of all

    @property
    def names(self) -> list[str]:
        """What reports call the members."""
        return [each.name for each in self.members]

    def state(self, state: replicas.Replicas, index: int) -> Any:
        """The state of one member, on the mesh, as its single run has it; a copy."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.alone(index).abstract)
        return jax.jit(replicas.member, out_shardings=shardings)(state, np.int32(index))

    def whole(self, states: Sequence[Any]) -> Any:
        """The states of all members as one, on the mesh."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract)
        return jax.jit(replicas.together, out_shardings=shardings)(states)

    def evaluate(self, name: str, state: Any, interrupt: Callable[[], None]) -> dict[str, Any]:
        """What a user's function finds for each member: of numbers also mean and standard deviation."""
        each = [
            self.alone(index).evaluate(name, self.state(state, index), interrupt) for index in range(len(self.members))
        ]
        found: dict[str, Any] = {}
        for key, value in each[0].items():
            values = [other[key] for other in each]
            is_text = isinstance(value, str)
            found |= {f"{key}/{r}": text for r, text in enumerate(values)} if is_text else metrics.spread(key, values)
        return found


def together(whole: Job, supplied: Callable[[ConfigDict], Supply]) -> Job:
    """The job of all members, made of the parts of a single one; `supplied(config)` gives what a step is built of."""
    members = grid.members(whole.config)
    _refuse_varied_source(whole, members)

    @functools.cache
    def made(numbers: tuple[tuple[str, float], ...]) -> tuple[Supply, Steps]:
        """Members that differ by the seed alone have the same steps."""
        own = supplied(checked(grid.config_of(whole.config, grid.Member(dict(numbers)))))
        return own, supply.steps(own, whole.builder)

    @functools.cache
    def alone(index: int) -> Job:
        config = grid.config_of(whole.config, members[index])
        own, steps = made(tuple(members[index].numbers.items()))
        return dataclasses.replace(whole, config=config, supply=own, steps=steps)

    first, layout = alone(0), _layout(alone(0), whole.config)
    columns = {
        key: np.asarray([each.values[key] for each in members], whole.policy.param) for key in members[0].numbers
    }
    group = replicas.Group(
        alone=[alone(index).steps for index in range(len(members))],
        traced=lambda values: supply.steps(supply.varied(first.supply, values), whole.builder),
        values={key: column for key, column in columns.items() if len(set(column)) > 1},
        layout=layout,
    )
    _refuse_constants(first, group)
    abstract = replicas.stacked(whole.abstract, len(members), layout)
    return dataclasses.replace(
        whole,
        steps=replicas.replicated(group),
        abstract=abstract,
        together=Together(members, layout, alone, functools.partial(replicas.evaluation, group), abstract),
    )


def are_spread(config: ConfigDict, mesh: Mesh) -> bool:
    """Whether each device has members of its own: where their number divides, and no member needs several devices."""
    count, devices = len(grid.members(config)), mesh.shape["data"]
    return count > 1 and devices > 1 and count % devices == 0 and mesh.size == devices and not config.sharding_rules


def _layout(alone: Job, config: ConfigDict) -> replicas.Layout:
    """A fixed rule over program and devices: convolutions are slow under vmap, everything else gains by it."""
    unrolled = "conv_general_dilated" in flops.primitives(alone.traced[0])
    return replicas.Layout("unrolled" if unrolled else "vmap", alone.mesh, are_spread(config, alone.mesh))


def _refuse_varied_source(job: Job, members: Sequence[grid.Member]) -> None:
    seeds = {each.values.get("seed") for each in members}
    if isinstance(job.sources["train"], sources.VaryingSource) and len(seeds) > 1:
        raise UserError(
            f"config.replicas varies 'seed', by which data set {job.dataset.name} draws its examples on the host, for "
            "one seed at a time; vary other values, or start a run for each seed"
        )


def _refuse_constants(first: Job, group: replicas.Group) -> None:
    """Raises UserError for a key whose value the step, or what it is made of, must know in Python."""

    def train(key: str, state: Any, batch: Any, value: Any) -> Any:
        return group.traced({key: value}).train(state, batch)

    for key, column in group.values.items():
        try:
            jax.eval_shape(functools.partial(train, key), first.abstract, first.abstract_batch, column[0])
        except (TypeError, ValueError) as error:  # among them what JAX raises for a traced bool or float
            raise UserError(
                f"config.replicas varies {key!r}, which step {first.step_name} with {first.config.optimizer.name} "
                f"does not take as a traced number ({type(error).__name__}); start a run for each value"
            ) from error
