"""A model is a pair of pure functions. Adapters turn what users write into that pair."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from jaxtrain import lookup, precision, sharding
from jaxtrain.errors import UserError

Tree = dict[str, Any]  # nested dicts with string keys, arrays at the leaves
Flat = dict[tuple[Any, ...], Any]  # path -> nnx.Variable, or a bare array


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


def build_model(
    part: Any, *, num_classes: int | None, input_shape: tuple[int, ...] | None, dtype: Any = jnp.float32
) -> Model:
    """The model that `config.model` names, or that a notebook gives as an object.

    `part` is dict(name=..., **options); or a builder: a Flax NNX class or a function; or a `Model`, or a pair
    (init, apply). A builder is called with its options and with those of `num_classes`, `input_shape` (of one
    example), `dtype` (of the computation; parameters are float32) and `rngs` (nnx.Rngs) that its signature names.
    With `rngs` it makes an NNX module, without a `Model` or a pair. Raises UserError for anything else.
    """
    if not callable(part) and not isinstance(part, (str, Mapping, ConfigDict)):
        return computing_in(_pair(part, "given"), dtype)
    builder, label = _builder(part)
    names = _argument_names(builder)
    supplied = {"num_classes": num_classes, "input_shape": input_shape, "dtype": jnp.dtype(dtype)}
    for name in supplied:
        if supplied[name] is None and name in names:
            raise UserError(f"model {label} needs {name}, which the data set does not tell; choose another model")

    def construct(**rngs: nnx.Rngs) -> Any:
        if builder is part:
            return part(**{name: value for name, value in (supplied | rngs).items() if name in names})
        return lookup.build(part, lookup.MODELS, "model", **supplied, **rngs)

    if "rngs" in names:
        model = from_nnx(lambda rngs: _module(construct(rngs=rngs), label))
    else:
        model = _pair(construct(), label)
    return model if "dtype" in names else computing_in(model, dtype)


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
        return _pure(parts.params), _pure(parts.rest)

    def apply(params: Tree, model_state: Tree, inputs: Any, *, key: jax.Array | None, train: bool) -> tuple[Any, Tree]:
        parts = abstract()
        if key is None and train and parts.random:
            raise UserError("a model with random layers was applied with train=True and key=None; give it a key")
        before = _values(parts.rest, model_state)
        # Variables are made anew, in the caller's trace: NNX refuses to change those of another one.
        module = nnx.merge(
            parts.graph,
            _filled(parts.params, _values(parts.params, params)),
            _filled(parts.rest, before),
            _filled(parts.random, _random_states(parts.random, key)),
        )
        outputs = _call(module, inputs, train)
        return _arrays(outputs, module), _pure(_as_before(_split(module).rest, before, module))

    return Model(init, apply)


def computing_in(model: Model, dtype: Any) -> Model:
    """`model` with floating parameters and inputs cast to `dtype` in every call: for those without a dtype argument."""

    def apply(params: Tree, model_state: Tree, inputs: Any, *, key: jax.Array | None, train: bool) -> tuple[Any, Tree]:
        params, inputs = precision.cast(params, dtype), precision.cast(inputs, dtype)
        # The state is not cast: in bfloat16 a running average that moves by 1 % a step would stand still.
        return model.apply(params, model_state, inputs, key=key, train=train)

    return Model(model.init, apply)


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
    values = {sharding.path_string(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    names = {path: _name(path) for path in variables}
    if different := set(names.values()) ^ set(values):
        raise UserError(
            f"these are not the arrays of this model: {', '.join(sorted(different)[:3])} is in only one of the two"
        )
    return {path: values[name] for path, name in names.items()}


def _pure(flat: Flat) -> Tree:
    """Nested dicts of values. Positions in lists become strings, as every key of a state is one."""
    tree: Tree = {}
    for path, variable in flat.items():
        node = tree
        for part in path[:-1]:
            node = node.setdefault(str(part), {})
        node[str(path[-1])] = _value(variable)
    return tree


def _value(variable: Any) -> Any:
    return variable.get_value() if isinstance(variable, nnx.Variable) else variable


def _as_before(after: Flat, before: Flat, module: nnx.Module) -> Flat:
    """The state after a call, in the form it had before: a step is compiled once, for one form."""
    if changed := sorted(map(_name, after.keys() ^ before.keys())):
        raise UserError(
            f"{type(module).__name__} made or removed its variable {changed[0]} in a call; a state keeps its form: "
            "make all variables in __init__"
        )
    same = {}
    for path, variable in after.items():
        value, old = _value(variable), before[path]
        if value.dtype != old.dtype and all(jnp.issubdtype(x.dtype, jnp.floating) for x in (value, old)):
            value = value.astype(old.dtype)  # written by a layer that computes in fewer bits
        if (value.shape, value.dtype) != (old.shape, old.dtype):
            raise UserError(
                f"{type(module).__name__} turned its variable {_name(path)} from {old.dtype}{list(old.shape)} into "
                f"{value.dtype}{list(value.shape)} in a call; shape and type stay as __init__ made them"
            )
        same[path] = value
    return same


def _arrays(outputs: Any, module: nnx.Module) -> Any:
    leaves = jax.tree.leaves(outputs, is_leaf=lambda leaf: leaf is None)
    wrong = [leaf for leaf in leaves if not isinstance(leaf, jax.Array)]
    if wrong or not leaves:
        found = type(wrong[0] if wrong else outputs).__name__
        raise UserError(f"{type(module).__name__} returned {found}; expected a JAX array, or a tree of them")
    return outputs


def _builder(part: Any) -> tuple[Callable[..., Any], str]:
    """What `part` names or is, and how to call it in an error."""
    if callable(part):
        builder = part
        label = getattr(_function(part), "__name__", type(part).__name__)
    else:
        label, _ = lookup.split(part)
        builder = lookup.resolve(label, lookup.MODELS, "model")
    function = _function(builder)
    if isinstance(function, nnx.Module):
        raise UserError(f"model {label} is an object; give its class, or a function that makes it from `rngs`")
    if inspect.isclass(function) and not issubclass(function, nnx.Module):
        raise UserError(f"model {label} is a class, but no flax.nnx.Module; derive it from that, or give a function")
    if inspect.isclass(function) and "rngs" not in _argument_names(builder):
        raise UserError(f"model {label}: its __init__ has no argument `rngs` (nnx.Rngs) to draw parameters from")
    return builder, label


def _function(builder: Callable[..., Any]) -> Callable[..., Any]:
    return builder.func if isinstance(builder, functools.partial) else builder


def _argument_names(builder: Callable[..., Any]) -> set[str]:
    """The arguments of a builder that are still to be given."""
    function = _function(builder)
    # Of a class, its __init__: the signature of an NNX class itself is its metaclass's (*args, **kwargs).
    names = inspect.signature(function.__init__ if inspect.isclass(function) else function).parameters
    return set(names) - set(builder.keywords if isinstance(builder, functools.partial) else ())


def _module(built: Any, label: str) -> nnx.Module:
    if not isinstance(built, nnx.Module) or not callable(built):
        problem = "has no __call__" if isinstance(built, nnx.Module) else "is no flax.nnx.Module"
        raise UserError(f"model {label} takes `rngs`, but the {type(built).__name__} that it makes {problem}")
    return built


def _pair(built: Any, label: str) -> Model:
    if isinstance(built, Model):
        return built
    if isinstance(built, tuple) and len(built) == 2 and all(map(callable, built)):
        return Model(*built)
    if isinstance(built, nnx.Module):
        raise UserError(f"model {label} makes an NNX module without an argument `rngs`: all seeds would be equal")
    raise UserError(
        f"model {label} makes a {type(built).__name__}; expected a Model, a pair (init, apply), or, with an "
        "argument `rngs`, a flax.nnx.Module"
    )


def _name(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path))
