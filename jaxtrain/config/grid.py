"""`config.replicas`: the members of a run that trains several in one program, and what may differ between them."""

import dataclasses
import itertools
import typing
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from jaxtrain.config import lookup
from jaxtrain.errors import UserError

Number = int | float


@dataclasses.dataclass(frozen=True)
class Member:
    """One of them: "seed 3, learning_rate 0.2", and its values by key of the config."""

    values: Mapping[str, Number]

    @property
    def name(self) -> str:
        """What reports call it."""
        return ", ".join(f"{key.rpartition('.')[2]} {value:g}" for key, value in self.values.items())

    @property
    def numbers(self) -> dict[str, Number]:
        """What differs beside the seed."""
        return {key: value for key, value in self.values.items() if key != "seed"}


def members(config: ConfigDict) -> tuple[Member, ...]:
    """Every combination of the grid, the last key varying fastest; a single one, of no values, without replicas.

    Raises UserError, one line, for a key that may not vary, and for values that are none of its.
    """
    wanted = (("seed", config.replicas),) if isinstance(config.replicas, int) else config.replicas
    if config.replicas == 1:
        return (Member({}),)
    keys = [key for key, _ in wanted]
    if twice := {key for key in keys if keys.count(key) > 1}:
        raise UserError(f"config.replicas has {twice.pop()!r} twice, expected each key once")
    values = [_values(config, key, given) for key, given in wanted]
    found = tuple(Member(dict(zip(keys, each, strict=True))) for each in itertools.product(*values))
    if len(found) == 1:
        raise UserError(f"config.replicas has one member, {found[0].name}; set those keys themselves, and replicas=1")
    return found


def config_of(config: ConfigDict, member: Member) -> ConfigDict:
    """The config of the run that this member would be alone."""
    alone = config.copy_and_resolve_references()
    alone.replicas = 1
    for key, value in member.values.items():
        group, _, name = key.rpartition(".")
        (alone[group] if group else alone)[name] = value
    return alone


def may_vary(config: ConfigDict) -> list[str]:
    """The keys whose values enter the program as numbers, whatever they are."""
    options = lookup.options_of(lookup.OPTIMIZER, config.optimizer.name)
    floats = [name for name, option in options.items() if float in _kinds(option.annotation)]
    return ["seed", "clip_norm", *(f"optimizer.{name}" for name in sorted(floats))]


def _values(config: ConfigDict, key: str, given: int | tuple[Number, ...]) -> tuple[Number, ...]:
    if key not in (legal := may_vary(config)):
        near = lookup.nearest(key, legal)
        hint = f"; did you mean {near!r}?" if near and near.endswith(key.rpartition(".")[2]) else ""
        raise UserError(
            f"config.replicas varies {key!r}, which is no number that a program can be given; those that may vary are "
            f"{', '.join(legal)}{hint}"
        )
    if isinstance(given, int):
        if key != "seed" or given < 1:
            raise UserError(f"config.replicas has {given!r} for {key!r}, expected a tuple of values, or how many seeds")
        given = tuple(range(config.seed, config.seed + given))
    if not given or len(set(given)) < len(given):
        raise UserError(f"config.replicas has {given!r} for {key!r}, expected one value or more, each once")
    return tuple(_conformed(config, key, value) for value in given)


def _conformed(config: ConfigDict, key: str, value: Number) -> Number:
    """The value as the config would hold it."""
    if key == "seed":
        if not isinstance(value, int) or not 0 <= value < 2**31:
            raise UserError(f"config.replicas has seed {value!r}, expected 0 to 2³¹ - 1")
        return value
    if value < 0 or (key == "clip_norm" and value == 0):
        raise UserError(f"config.replicas has {key} {value!r}, expected {'more than 0' if value == 0 else '0 or more'}")
    return float(value)


def _kinds(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation itself."""
    return typing.get_args(annotation) or (annotation,)
