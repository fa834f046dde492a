"""Flax NNX modules as pure functions: split into graph and variables, merged again in each call."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.adapters.functional import Model, Tree, arrays, as_before, named, nested, refuse_others
from jaxtrain.errors import UserError

Flat = dict[tuple[Any, ...], Any]  # path -> nnx.Variable, or a bare array


def from_nnx(build: Callable[[nnx.Rngs], nnx.Module]) -> Model:
    """The functional form of the Flax NNX module that `build(rngs)` makes.

    `params` are its `nnx.Param`s; `model_state` is everything else that it keeps in arrays, such as BatchNorm's
    statistics. Random states are neither: each stream of each module gets a key of its own, drawn from `key`.
    `apply` sets the modes (`module.train()` or `module.eval()`), and passes `train` to a `__call__` that names it.
    Raises UserError for a state that changes its form in a call, and for outputs that are no arrays.
    """

    @functools.cache
    def abstract() -> _Parts:
        return _split(nnx.eval_shape(lambda: _adopt_arrays(build(nnx.Rngs(0)))))

    def init(key: jax.Array, example: Any) -> tuple[Tree, Tree]:
        del example  # an NNX module knows its sizes when it is made
        parts = _split(_adopt_arrays(build(nnx.Rngs(key))))
        return nested(_leaves(parts.params)), nested(_leaves(parts.rest))

    def apply(params: Tree, model_state: Tree, inputs: Any, *, key: jax.Array | None, train: bool) -> tuple[Any, Tree]:
        parts = abstract()
        if key is None and train and parts.random:
            raise UserError("a model with random layers was applied with train=True and key=None; give it a key")
        # Variables are made anew, in the caller's trace: NNX refuses to change those of another one.
        module = nnx.merge(
            parts.graph,
            _filled(parts.params, _values(parts.params, params)),
            _filled(parts.rest, _values(parts.rest, model_state)),
            _filled(parts.random, _random_states(parts.random, key)),
        )
        label = type(module).__name__
        outputs = arrays(label, _call(module, inputs, train))
        return outputs, nested(as_before(label, named(model_state), _leaves(_split(module).rest)))

    return Model(init, apply)


@dataclasses.dataclass(frozen=True)
class _Parts:
    """A module cut into its static graph and its variables."""

    graph: nnx.GraphDef
    params: Flat
    random: Flat
    rest: Flat


def _split(module: nnx.Module) -> _Parts:
    nnx.pop(module, nnx.Any(nnx.Intermediate, nnx.Perturbation))  # what layers left to be looked at: no state
    graph, *states = nnx.split(module, nnx.Param, nnx.RngState, ...)
    return _Parts(graph, *(dict(nnx.to_flat_state(state)) for state in states))


def _adopt_arrays(module: nnx.Module) -> nnx.Module:
    """Makes arrays in plain attributes data, as NNX itself does when it is not traced.

    While tracing, flax 0.12 takes them for constants, and the tracer would stay behind in the static graph.
    """
    for path, node in list(nnx.iter_graph(module)):
        for name, value in list(vars(node).items()) if isinstance(node, nnx.Pytree) else ():
            if isinstance(value, jax.core.Tracer):
                setattr(node, name, nnx.data(value))
            elif not nnx.is_data(value) and any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)):
                where = ".".join([type(module).__name__, *map(str, path), name])
                raise UserError(
                    f"{where} is a {type(value).__name__} with arrays in it, which NNX takes for a constant; "
                    "make it an nnx.List or nnx.Dict"
                )
    return module


def _call(module: nnx.Module, inputs: Any, train: bool) -> Any:
    if train:
        module.train()
    else:
        module.eval()
    mode = {"train": train} if "train" in inspect.signature(type(module).__call__).parameters else {}
    return module(**inputs, **mode) if isinstance(inputs, Mapping) else module(inputs, **mode)


def _random_states(random: Flat, key: jax.Array | None) -> Flat:
    """A key of its own for every stream of every module; their counters at zero."""
    streams = [path for path, variable in random.items() if isinstance(variable, nnx.RngKey)]
    if not streams:
        return {}
    keys = jax.random.split(jax.random.key(0) if key is None else key, len(streams))
    own = dict(zip(streams, keys, strict=True))

    def fresh(path: tuple[Any, ...], old: Any) -> jax.Array:
        if path not in own:
            return jnp.zeros(old.shape, old.dtype)
        return jax.random.split(own[path], old.shape) if old.shape else own[path]  # [layers]: a stack by nnx.vmap

    return {path: fresh(path, _value(variable)) for path, variable in random.items()}


def _filled(variables: Flat, values: Flat) -> nnx.State:
    """New variables like the given ones, with these values."""

    def new(variable: Any, value: Any) -> Any:
        return variable.replace(value) if isinstance(variable, nnx.Variable) else value

    return nnx.from_flat_state({path: new(variable, values[path]) for path, variable in variables.items()})


def _values(variables: Flat, tree: Tree) -> Flat:
    """The leaves of `tree` by the paths of the variables that they belong to."""
    values = named(tree)
    names = {path: _name(path) for path in variables}
    refuse_others(dict.fromkeys(names.values()), values)
    return {path: values[name] for path, name in names.items()}


def _leaves(flat: Flat) -> dict[str, Any]:
    """Values by name. Positions in lists become strings, as every key of a state is one."""
    return {_name(path): _value(variable) for path, variable in flat.items()}


def _value(variable: Any) -> Any:
    return variable.get_value() if isinstance(variable, nnx.Variable) else variable


def _name(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path))
