"""The optimizer: a rate that is a function of the step, optax transformations by name, and rules by path.

The rate is an argument of every update, `schedule(s)`, and never comes from optax's own count: after updates
that were left out it is still the rate of step s, and many rates can enter as one array. An update is

    clip     of the whole gradient, frozen parameters apart, to a global norm of `clip_norm`
    optax    the transformation at this rate
    decay    − rate · weight_decay · multiplier · p: by default not of biases, scales and vectors
    rules    times the multiplier of the path in `lr_rules`; what is frozen stays as it is, bit by bit

and each group of `param_groups` has a transformation, a rate and a decay of its own, and perhaps a part of the run in
which alone it is trained; all in float32 (float64 where a parameter is float64); parameters keep their dtype.
"""

import dataclasses
import functools
import inspect
import math
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
    update: Callable[..., tuple[Any, Any, jax.Array]]
    """(grads, opt_state, params, rate float32 [], step int32 [] = None) → (params, opt_state, norm float32 []).
    `grads` are of the whole batch; the norm is theirs before clipping, without frozen parameters. The step tells the
    rates of `config.param_groups`; without them it is not needed."""


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """What the rules say of one parameter."""

    decay: float  # multiplier of the weight decay
    rate: float  # multiplier of the whole update
    frozen: bool
    group: int = 0  # 0: config.optimizer; n: config.param_groups[n - 1]


@dataclasses.dataclass(frozen=True)
class _Part:
    """config.optimizer: an optax builder and its options."""

    builder: Callable[..., optax.GradientTransformation]
    options: dict[str, Any]
    learning_rate: float
    weight_decay: float
    takes_decay: bool  # the builder has a weight decay of its own
    mask: str | None  # the builder's argument that limits it, where its decay is the one asked for
    schedule: Callable[[Any], jax.Array] | None = None  # of a group: step → rate float32 []
    since: int = 0  # first step at which it is trained
    until: int | None = None  # first step at which it is no more

    @property
    def decays(self) -> bool:
        """Unless the decay is known to be 0."""
        return not (isinstance(self.weight_decay, float) and self.weight_decay == 0)

    def __call__(self, rate: Any, decay: float, **mask: Any) -> optax.GradientTransformation:
        """The transformation at `rate`; its own weight decay times `decay`."""
        own = {"weight_decay": self.weight_decay * decay} if self.takes_decay else {}
        return self.builder(rate, **self.options, **own, **mask)


def build(
    config: Any,
    params: Any,
    total_steps: int,
    steps_of: StepsOf,
    values: Mapping[str, Any] | None = None,
    dtype: Any = jnp.float32,
) -> Optimizer:
    """The optimizer that the config describes, for `params` (nested dicts of arrays or ShapeDtypeStructs).

    Uses config.optimizer, param_groups, schedule, clip_norm, decay_rules, lr_rules and frozen. A path such as
    "block_1/conv/kernel" takes the multiplier of the first rule whose regular expression is found in it, and the first
    group whose `paths` is, else config.optimizer. `steps_of` turns a duration into steps; `dtype` is that of the
    computation, for builders that name it. Weight decay is decoupled (Loshchilov & Hutter, 2019): optax's own where its
    builder takes a mask, so that lamb and lars keep it inside the trust ratio; else ours. Raises
    UserError for an unknown name or option, a bad number, a rule that matches no parameter.

    `values` stand in for numbers of the config ("optimizer.momentum", "clip_norm"): traced float32 [], none of them 0.
    """
    values = values or {}
    parts = [
        _with(_part(config.optimizer, dtype=dtype), values),
        *(_group(config, number, total_steps, steps_of, dtype) for number in range(len(config.param_groups))),
    ]
    leaves = _leaves(params, config)
    clip = values.get("clip_norm", _number("config.clip_norm", config.clip_norm))
    schedule = _scheduled(config, parts[0].learning_rate, total_steps, steps_of)
    transformation = _transformation(parts, leaves, jax.tree.structure(params))

    def init(params: Any) -> Any:
        rates = [jnp.asarray(part.learning_rate, jnp.float32) for part in parts]
        start = transformation(rates).init(_cast(params, _dtype(params)))
        # Copies: some optimizers remember the parameters they began with, and a buffer is donated only once.
        return jax.tree.map(jnp.copy, start)

    def update(
        grads: Any, opt_state: Any, params: Any, learning_rate: Any, step: Any = None
    ) -> tuple[Any, Any, jax.Array]:
        dtype, wide = _dtype(params), _cast(params, _dtype(params))
        rates = _cast([learning_rate, *_rates_at(step, parts[1:])], dtype)
        trained = [_trained_at(step, part) for part in parts]
        grads, norm = _clipped(_cast(grads, dtype), leaves, clip, trained)
        updates, new_state = transformation(rates).update(grads, opt_state, wide)
        new = _applied(wide, updates, rates, parts, leaves, trained)
        new = jax.tree.map(lambda old, x: x.astype(old.dtype), params, new)
        return new, _kept(opt_state, new_state, trained), norm.astype(jnp.float32)

    return Optimizer(schedule, init, update)


def rate_schedule(config: Any, total_steps: int, steps_of: StepsOf) -> Callable[[Any], jax.Array]:
    """step (int32 []) → learning rate (float32 []), as a run of `total_steps` applies it. Raises UserError."""
    return _scheduled(config, _part(config.optimizer).learning_rate, total_steps, steps_of)


def _scheduled(config: Any, peak: Any, total_steps: int, steps_of: StepsOf) -> Callable[[Any], jax.Array]:
    shape = _shape(config.schedule, total_steps, steps_of)
    return lambda step: peak * jnp.asarray(shape(step), jnp.float32)


def all_rates(config: Any, total_steps: int, steps_of: StepsOf) -> list[Callable[[Any], jax.Array]]:
    """As `rate_schedule`, and then that of each of config.param_groups, 0 where it does not train."""

    def of_group(number: int) -> Callable[[Any], jax.Array]:
        group = _group(config, number, total_steps, steps_of, jnp.float32)

        def rate(step: Any) -> jax.Array:
            (found,), trained = _rates_at(step, [group]), _trained_at(step, group)
            return found if trained is None else jnp.where(trained, found, 0)

        return rate

    return [rate_schedule(config, total_steps, steps_of), *map(of_group, range(len(config.param_groups)))]


def _shape(schedule: Any, total_steps: int, steps_of: StepsOf) -> Callable[[Any], jax.Array]:
    supplied = {"total_steps": total_steps, "steps_of": steps_of}
    return lookup.build(schedule, lookup.SCHEDULES, "schedule", **supplied)


def _group(config: Any, number: int, total_steps: int, steps_of: StepsOf, dtype: Any) -> _Part:
    """What trains the parameters of config.param_groups[number], with its own rate over the steps in which it does."""
    where = f"config.param_groups[{number}]"
    given = lookup.checked(config.param_groups[number], lookup.PARAM_GROUP, where, fill=False)
    own = {key: given.pop(key) for key in lookup.OF_A_GROUP if key in given}
    part = _part(given, where, dtype)
    since, until = (math.ceil(steps_of(own[key])) if own.get(key) else None for key in ("since", "until"))
    first, last = since or 0, total_steps if until is None else until
    if first >= last:
        raise UserError(f"{where} is trained from step {first} until step {last}; expected since to come before until")
    shape = _shape(own.get("schedule") or config.schedule, last - first, steps_of)
    peak = part.learning_rate

    def schedule(step: Any) -> jax.Array:
        return peak * jnp.asarray(shape(jnp.asarray(step, jnp.int32) - first), jnp.float32)

    return dataclasses.replace(part, schedule=schedule, since=first, until=until)


def _rates_at(step: Any, groups: Sequence[_Part]) -> list[jax.Array]:
    if groups and step is None:
        raise UserError(
            "config.param_groups have rates of their own, and the step gives none to tell them; call "
            "optimizer.update(grads, opt_state, params, rate, state.step)"
        )
    return [group.schedule(step) for group in groups if group.schedule is not None]


def _trained_at(step: Any, part: _Part) -> jax.Array | None:
    """Whether a part is trained at the step, bool []; None: always."""
    if not part.since and part.until is None:
        return None
    step = jnp.asarray(step, jnp.int32)
    return (step >= part.since) & (True if part.until is None else step < part.until)


def _part(optimizer: Any, where: str = "config.optimizer", dtype: Any = jnp.float32) -> _Part:
    options = lookup.checked(optimizer, lookup.OPTIMIZER, where, fill=False)
    name = options.pop("name")
    builder = lookup.resolve(name, lookup.OPTIMIZERS, "optimizer")
    takes = inspect.signature(builder).parameters
    known = builder.__name__ if getattr(builder, "__module__", "").startswith("optax.") else ""
    default = lookup.options_of(lookup.OPTIMIZER, name)["weight_decay"].default
    weight_decay = _number(f"{where}.weight_decay", options.pop("weight_decay", default))
    if known in WITHOUT_DECAY and weight_decay:
        raise UserError(
            f"{where}.weight_decay is {weight_decay:g}, but the steps of {known} are not of the size "
            "of learning_rate, and a decoupled decay does not go with them; set it to 0"
        )
    masks = [each for each in MASKS if each in takes and "weight_decay" in takes and known not in NOT_DECOUPLED]
    part = _Part(
        builder=builder,
        learning_rate=_number(f"{where}.learning_rate", options.pop("learning_rate")),
        weight_decay=weight_decay,
        options=options | ({"dtype": dtype} if "dtype" in takes else {}),
        takes_decay="weight_decay" in takes,
        mask=masks[0] if masks else None,
    )
    try:
        part(np.float32(part.learning_rate), 0.0)
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: {name} refuses {options}: {lookup.described(error)}") from error
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
    groups: dict[str, int] = {}
    for number, group in enumerate(config.param_groups, 1):
        key = f"config.param_groups[{number - 1}].paths"
        matched = lookup.matching(key, group["paths"], paths)
        if not set(matched) - groups.keys():
            raise UserError(f"{key}: {group['paths']!r} matches nothing that the groups before it leave")
        groups = dict.fromkeys(matched, number) | groups
    return [
        _Leaf(
            decay=decay.get(path, float(_is_kernel(path, leaf.ndim))),
            rate=rate.get(path, 1.0),
            frozen=path in frozen,
            group=groups.get(path, 0),
        )
        for path, leaf in flat
    ]


def _is_kernel(path: str, ndim: int) -> bool:
    """Not a vector, nor a bias or scale of several axes, as attention and stacked layers have."""
    return ndim >= 2 and path.rsplit("/", 1)[-1] not in ("bias", "scale")


def _multipliers(key: str, rules: Rules, paths: Sequence[str]) -> dict[str, float]:
    """path → the multiplier of the first rule found in it; a path that no rule matches is left out."""
    found: dict[str, float] = {}
    for pattern, multiplier in rules:
        matched = lookup.matching(key, pattern, paths)
        number = _number(f"{key}: the multiplier of {pattern!r}", multiplier)
        found = dict.fromkeys(matched, number) | found  # what an earlier rule said stays
    return found


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise UserError(f"{key} is {value!r}; expected a number, 0 or more")
    return float(value)


def _transformation(
    parts: Sequence[_Part], leaves: Sequence[_Leaf], structure: Any
) -> Callable[[Sequence[Any]], optax.GradientTransformation]:
    """A rate for each part → the transformation of all parameters. The structure of its state is that of any rates.

    One transformation where a mask of bools says which parameters decay; else one for each multiplier, which
    is exact also where the decay is inside a trust ratio. Frozen parameters have no optimizer state.
    """
    if len(parts) > 1:
        return _transformation_by_group(parts, leaves, structure)
    (part,) = parts
    if all(leaf.frozen for leaf in leaves):
        return lambda rates: optax.set_to_zero()
    levels = [FROZEN if leaf.frozen else leaf.decay if part.mask else 0.0 for leaf in leaves]
    names = {level: f"decay_{i}" for i, level in enumerate(sorted({*levels} - {FROZEN}))} | {FROZEN: "frozen"}
    labels = jax.tree.unflatten(structure, [names[level] for level in levels])
    mask = jax.tree.unflatten(structure, [level == 1.0 for level in levels])

    def transformation(rates: Sequence[Any]) -> optax.GradientTransformation:
        (rate,) = rates
        if part.mask and set(levels) <= {0.0, 1.0}:
            return part(rate, 1.0, **{part.mask: mask})
        if len(set(levels)) == 1:
            return part(rate, levels[0])
        groups = {names[level]: part(rate, level) for level in sorted({*levels} - {FROZEN})}
        return optax.partition(groups | {names[FROZEN]: optax.set_to_zero()}, labels)

    return transformation


def _transformation_by_group(
    parts: Sequence[_Part], leaves: Sequence[_Leaf], structure: Any
) -> Callable[[Sequence[Any]], optax.GradientTransformation]:
    """The same where there are groups, which keep their states apart: a tuple, one for each part."""

    def of_one(number: int) -> Callable[[Sequence[Any]], optax.GradientTransformation]:
        others = [dataclasses.replace(leaf, frozen=leaf.frozen or leaf.group != number) for leaf in leaves]
        return _transformation(parts[number : number + 1], others, structure)

    own = [of_one(number) for number in range(len(parts))]

    def transformation(rates: Sequence[Any]) -> optax.GradientTransformation:
        each = [one([rate]) for one, rate in zip(own, rates, strict=True)]

        def update(grads: Any, states: Any, params: Any = None) -> tuple[Any, Any]:
            found = [one.update(grads, state, params) for one, state in zip(each, states, strict=True)]
            flat = [jax.tree.leaves(updates) for updates, _ in found]
            chosen = [flat[leaf.group][place] for place, leaf in enumerate(leaves)]
            return jax.tree.unflatten(structure, chosen), tuple(state for _, state in found)

        return optax.GradientTransformation(lambda params: tuple(one.init(params) for one in each), update)

    return transformation


def _clipped(
    grads: Any, leaves: Sequence[_Leaf], clip: Any, trained: Sequence[jax.Array | None]
) -> tuple[Any, jax.Array]:
    """Gradients scaled to a norm of at most `clip` (0: off), zero where frozen; and the norm before."""
    flat, structure = jax.tree.flatten(grads)

    def one(g: jax.Array, leaf: _Leaf) -> jax.Array:
        now = trained[leaf.group]
        return jnp.zeros_like(g) if leaf.frozen else g if now is None else jnp.where(now, g, 0)

    flat = [one(g, leaf) for g, leaf in zip(flat, leaves, strict=True)]
    norm = jnp.sqrt(jnp.asarray(sum(jnp.sum(jnp.square(g)) for g in flat)))
    if not (isinstance(clip, float) and clip == 0):
        flat = [g * (clip / jnp.maximum(norm, clip)) for g in flat]
    return jax.tree.unflatten(structure, flat), norm


def _kept(old: Any, new: Any, trained: Sequence[jax.Array | None]) -> Any:
    """The new optimizer state, the old one of each group that is not trained now."""
    if all(now is None for now in trained):
        return new
    return tuple(
        after if now is None else jax.tree.map(functools.partial(jnp.where, now), after, before)
        for before, after, now in zip(old, new, trained, strict=True)
    )


def _applied(
    params: Any,
    updates: Any,
    rates: Sequence[jax.Array],
    parts: Sequence[_Part],
    leaves: Sequence[_Leaf],
    trained: Sequence[jax.Array | None],
) -> Any:
    """params + updates, with our own decay where the builder's is not used and the rules' multipliers."""

    def one(p: jax.Array, u: jax.Array, leaf: _Leaf) -> jax.Array:
        if leaf.frozen:
            return p
        part, rate, now = parts[leaf.group], rates[leaf.group], trained[leaf.group]
        if part.decays and leaf.decay and not part.mask:
            u = u - rate * (part.weight_decay * leaf.decay) * p
        new = p + (u if leaf.rate == 1.0 else u * leaf.rate)
        return new if now is None else jnp.where(now, new, p)

    flat, structure = jax.tree.flatten(params)
    new = [one(*each) for each in zip(flat, jax.tree.leaves(updates), leaves, strict=True)]
    return jax.tree.unflatten(structure, new)


def _dtype(params: Any) -> Any:
    """What an update is computed in: float32, or float64 where a parameter is float64."""
    return jnp.float64 if any(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(params)) else jnp.float32


def _cast(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)
