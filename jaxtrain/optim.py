"""The optimizer: a rate that is a function of the step, an optax transformation by name, and rules by path.

The rate is an argument of every update, `schedule(s)`, and never comes from optax's own count: after updates
that were left out it is still the rate of step s, and many rates can enter as one array. An update is

    clip     of the whole gradient, frozen parameters apart, to a global norm of `clip_norm`
    optax    the transformation at this rate
    decay    − rate · weight_decay · multiplier · p: by default not of biases, scales and vectors
    rules    times the multiplier of the path in `lr_rules`; what is frozen stays as it is, bit by bit

all in float32 (float64 where a parameter is float64); parameters keep their dtype.
"""

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.config import lookup
from jaxtrain.errors import UserError
from jaxtrain.schedules import StepsOf
from jaxtrain.sharding import path_string

Rules = Sequence[tuple[str, float]]

# Arguments of builders that take a tree of bools: which parameters the builder's own weight decay reaches.
MASKS = ("mask", "weight_decay_mask")
# Of optax's own weight decays, these are an L2 term in the gradient, or leave out what Muon gives to Adam.
NOT_DECOUPLED = ("adadelta", "muon")
# These find the size of their steps themselves, so that rate · weight_decay is no size of a decay; madgrad
# averages from where it began, and would take a decay back.
WITHOUT_DECAY = ("dadapt_adamw", "dog", "dowg", "madgrad", "prodigy")

FROZEN = -1.0  # in the place of a multiplier of the decay


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Three pure functions; see `build`."""

    schedule: Callable[[Any], jax.Array]
    """step, int32 [] → float32 []: the rate of the update that makes state step + 1."""
    init: Callable[[Any], Any]
    """params → opt_state: arrays only, none of them shared with `params`."""
    update: Callable[[Any, Any, Any, Any], tuple[Any, Any, jax.Array]]
    """(grads, opt_state, params, rate float32 []) → (params, opt_state, norm float32 []). `grads` are of the
    whole batch; the norm is theirs before clipping, without frozen parameters."""


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """What the rules say of one parameter."""

    decay: float  # multiplier of the weight decay
    rate: float  # multiplier of the whole update
    frozen: bool


@dataclasses.dataclass(frozen=True)
class _Part:
    """config.optimizer: an optax builder and its options."""

    builder: Callable[..., optax.GradientTransformation]
    options: dict[str, Any]
    learning_rate: float
    weight_decay: float
    takes_decay: bool  # the builder has a weight decay of its own
    mask: str | None  # the builder's argument that limits it, where its decay is the one asked for

    @property
    def decays(self) -> bool:
        """Unless the decay is known to be 0."""
        return not (isinstance(self.weight_decay, float) and self.weight_decay == 0)

    def __call__(self, rate: Any, decay: float, **mask: Any) -> optax.GradientTransformation:
        """The transformation at `rate`; its own weight decay times `decay`."""
        own = {"weight_decay": self.weight_decay * decay} if self.takes_decay else {}
        return self.builder(rate, **self.options, **own, **mask)


def build(
    config: Any, params: Any, total_steps: int, steps_of: StepsOf, values: Mapping[str, Any] | None = None
) -> Optimizer:
    """The optimizer that the config describes, for `params` (nested dicts of arrays or ShapeDtypeStructs).

    Uses config.optimizer, schedule, clip_norm, decay_rules, lr_rules and frozen. A path such as
    "block_1/conv/kernel" takes the multiplier of the first rule whose regular expression is found in it.
    `steps_of` turns a duration into steps. Weight decay is decoupled (Loshchilov & Hutter, 2019): optax's own
    where its builder takes a mask, so that lamb and lars keep it inside the trust ratio; else ours. Raises
    UserError for an unknown name or option, a bad number, a rule that matches no parameter.

    `values` stand in for numbers of the config ("optimizer.momentum", "clip_norm"): traced float32 [], none of them 0.
    """
    values = values or {}
    part = _with(_part(config.optimizer), values)
    leaves = _leaves(params, config)
    clip = values.get("clip_norm", _number("config.clip_norm", config.clip_norm))
    schedule = _scheduled(config, part.learning_rate, total_steps, steps_of)
    transformation = _transformation(part, leaves, jax.tree.structure(params))

    def init(params: Any) -> Any:
        start = transformation(jnp.asarray(part.learning_rate, jnp.float32)).init(_cast(params, _dtype(params)))
        # Copies: some optimizers remember the parameters they began with, and a buffer is donated only once.
        return jax.tree.map(jnp.copy, start)

    def update(grads: Any, opt_state: Any, params: Any, learning_rate: Any) -> tuple[Any, Any, jax.Array]:
        dtype = _dtype(params)
        rate, wide = jnp.asarray(learning_rate, dtype), _cast(params, dtype)
        grads, norm = _clipped(_cast(grads, dtype), leaves, clip)
        updates, opt_state = transformation(rate).update(grads, opt_state, wide)
        new = _applied(wide, updates, rate, part, leaves)
        new = jax.tree.map(lambda old, x: x.astype(old.dtype), params, new)
        return new, opt_state, norm.astype(jnp.float32)

    return Optimizer(schedule, init, update)


def rate_schedule(config: Any, total_steps: int, steps_of: StepsOf) -> Callable[[Any], jax.Array]:
    """step (int32 []) → learning rate (float32 []), as a run of `total_steps` applies it. Raises UserError."""
    return _scheduled(config, _part(config.optimizer).learning_rate, total_steps, steps_of)


def _scheduled(config: Any, peak: Any, total_steps: int, steps_of: StepsOf) -> Callable[[Any], jax.Array]:
    supplied = {"total_steps": total_steps, "steps_of": steps_of}
    shape = lookup.build(config.schedule, lookup.SCHEDULES, "schedule", **supplied)
    return lambda step: peak * jnp.asarray(shape(step), jnp.float32)


def _part(optimizer: Any) -> _Part:
    options = lookup.checked(optimizer, lookup.OPTIMIZER, "config.optimizer", fill=False)
    name = options.pop("name")
    builder = lookup.resolve(name, lookup.OPTIMIZERS, "optimizer")
    takes = inspect.signature(builder).parameters
    known = builder.__name__ if getattr(builder, "__module__", "").startswith("optax.") else ""
    default = lookup.options_of(lookup.OPTIMIZER, name)["weight_decay"].default
    weight_decay = _number("config.optimizer.weight_decay", options.pop("weight_decay", default))
    if known in WITHOUT_DECAY and weight_decay:
        raise UserError(
            f"config.optimizer.weight_decay is {weight_decay:g}, but the steps of {known} are not of the size "
            "of learning_rate, and a decoupled decay does not go with them; set it to 0"
        )
    masks = [each for each in MASKS if each in takes and "weight_decay" in takes and known not in NOT_DECOUPLED]
    part = _Part(
        builder=builder,
        learning_rate=_number("config.optimizer.learning_rate", options.pop("learning_rate")),
        weight_decay=weight_decay,
        options=options,
        takes_decay="weight_decay" in takes,
        mask=masks[0] if masks else None,
    )
    try:
        part(np.float32(part.learning_rate), 0.0)
    except (TypeError, ValueError) as error:
        raise UserError(f"config.optimizer: {name} refuses {options}: {lookup.described(error)}") from error
    return part


def _with(part: _Part, values: Mapping[str, Any]) -> _Part:
    """The part with values in the place of its own numbers."""
    given = {key.removeprefix("optimizer."): value for key, value in values.items() if key.startswith("optimizer.")}
    own = {name: given.pop(name) for name in ("learning_rate", "weight_decay") if name in given}
    return dataclasses.replace(part, options=part.options | given, **own)


def _leaves(params: Any, config: Any) -> list[_Leaf]:
    """One entry a parameter, in the order of jax.tree.leaves."""
    flat = [(path_string(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)]
    paths = [path for path, _ in flat]
    decay = _multipliers("config.decay_rules", config.decay_rules, paths)
    rate = _multipliers("config.lr_rules", config.lr_rules, paths)
    frozen = _multipliers("config.frozen", [(pattern, 0.0) for pattern in config.frozen], paths)
    if paths and len(frozen) == len(paths):
        raise UserError(f"config.frozen {tuple(config.frozen)} matches every parameter; leave one to train")
    return [
        _Leaf(decay.get(path, float(_is_kernel(path, leaf.ndim))), rate.get(path, 1.0), path in frozen)
        for path, leaf in flat
    ]


def _is_kernel(path: str, ndim: int) -> bool:
    """Not a vector, nor a bias or scale of several axes, as attention and stacked layers have."""
    return ndim >= 2 and path.rsplit("/", 1)[-1] not in ("bias", "scale")


def _multipliers(key: str, rules: Rules, paths: Sequence[str]) -> dict[str, float]:
    """path → the multiplier of the first rule found in it; a path that no rule matches is left out."""
    found: dict[str, float] = {}
    for pattern, multiplier in rules:
        try:
            matched = [path for path in paths if re.search(pattern, path)]
        except re.error as error:
            raise UserError(f"{key}: {pattern!r} is not a regular expression: {error}") from None
        if not matched:
            some = ", ".join(paths[:8]) + (", …" if len(paths) > 8 else "")
            raise UserError(f"{key}: {pattern!r} matches no parameter. There are {some}")
        number = _number(f"{key}: the multiplier of {pattern!r}", multiplier)
        found = dict.fromkeys(matched, number) | found  # what an earlier rule said stays
    return found


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise UserError(f"{key} is {value!r}; expected a number, 0 or more")
    return float(value)


def _transformation(
    part: _Part, leaves: Sequence[_Leaf], structure: Any
) -> Callable[[Any], optax.GradientTransformation]:
    """rate → the transformation of all parameters. The structure of its state does not depend on the rate.

    One transformation where a mask of bools says which parameters decay; else one for each multiplier, which
    is exact also where the decay is inside a trust ratio. Frozen parameters have no optimizer state.
    """
    levels = [FROZEN if leaf.frozen else leaf.decay if part.mask else 0.0 for leaf in leaves]
    names = {level: f"decay_{i}" for i, level in enumerate(sorted({*levels} - {FROZEN}))} | {FROZEN: "frozen"}
    labels = jax.tree.unflatten(structure, [names[level] for level in levels])
    mask = jax.tree.unflatten(structure, [level == 1.0 for level in levels])

    def transformation(rate: Any) -> optax.GradientTransformation:
        if part.mask and set(levels) <= {0.0, 1.0}:
            return part(rate, 1.0, **{part.mask: mask})
        if len(set(levels)) == 1:
            return part(rate, levels[0])
        groups = {names[level]: part(rate, level) for level in sorted({*levels} - {FROZEN})}
        return optax.partition(groups | {names[FROZEN]: optax.set_to_zero()}, labels)

    return transformation


def _clipped(grads: Any, leaves: Sequence[_Leaf], clip: Any) -> tuple[Any, jax.Array]:
    """Gradients scaled to a norm of at most `clip` (0: off), zero where frozen; and the norm before."""
    flat, structure = jax.tree.flatten(grads)
    flat = [jnp.zeros_like(g) if leaf.frozen else g for g, leaf in zip(flat, leaves, strict=True)]
    norm = jnp.sqrt(jnp.asarray(sum(jnp.sum(jnp.square(g)) for g in flat)))
    if not (isinstance(clip, float) and clip == 0):
        flat = [g * (clip / jnp.maximum(norm, clip)) for g in flat]
    return jax.tree.unflatten(structure, flat), norm


def _applied(params: Any, updates: Any, rate: jax.Array, part: _Part, leaves: Sequence[_Leaf]) -> Any:
    """params + updates, with our own decay where the builder's is not used and the rules' multipliers."""

    def one(p: jax.Array, u: jax.Array, leaf: _Leaf) -> jax.Array:
        if leaf.frozen:
            return p
        if part.decays and leaf.decay and not part.mask:
            u = u - rate * (part.weight_decay * leaf.decay) * p
        return p + (u if leaf.rate == 1.0 else u * leaf.rate)

    flat, structure = jax.tree.flatten(params)
    new = [one(*each) for each in zip(flat, jax.tree.leaves(updates), leaves, strict=True)]
    return jax.tree.unflatten(structure, new)


def _dtype(params: Any) -> Any:
    """What an update is computed in: float32, or float64 where a parameter is float64."""
    return jnp.float64 if any(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(params)) else jnp.float32


def _cast(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)
