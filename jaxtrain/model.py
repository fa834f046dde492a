"""What users write, as a `Model`: a name or an object, in Flax NNX, Linen, Keras, or two pure functions."""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from jaxtrain import precision
from jaxtrain.adapters.functional import Model, Tree
from jaxtrain.adapters.nnx import from_nnx
from jaxtrain.config import lookup
from jaxtrain.errors import UserError

__all__ = ["Model", "build_model", "computing_in", "from_nnx"]


def build_model(
    part: Any, *, num_classes: int | None, input_shape: tuple[int, ...] | None, dtype: Any = jnp.float32
) -> Model:
    """The model that `config.model` names, or that a notebook gives as an object.

    `part` is dict(name=..., **options); or a builder: a class of Flax NNX, Linen or Keras, or a function; or what is
    ready: a Linen module, a Keras model, a `Model`, or a pair (init, apply). A builder is called with its options and
    with those of `num_classes`, `input_shape` (of one example), `dtype` (of the computation; parameters are float32)
    and `rngs` (nnx.Rngs) that its signature names. With `rngs` it makes an NNX module, without it one of what is ready.
    Raises UserError for anything else.
    """
    dtype = jnp.dtype(dtype)
    if _is_ready(part) or (not callable(part) and not isinstance(part, (str, Mapping, ConfigDict))):
        return _adapted(part, lambda: part, dtype, "given", told=False)
    builder, label = _builder(part)
    names = _argument_names(builder)
    supplied = {"num_classes": num_classes, "input_shape": input_shape, "dtype": dtype}
    for name in supplied:
        if supplied[name] is None and name in names:
            raise UserError(f"model {label} needs {name}, which the data set does not tell; choose another model")

    def construct(**rngs: nnx.Rngs) -> Any:
        if builder is part:
            return part(**{name: value for name, value in (supplied | rngs).items() if name in names})
        return lookup.build(part, lookup.MODELS, "model", **supplied, **rngs)

    if "rngs" in names:
        model = from_nnx(lambda rngs: _module(construct(rngs=rngs), label))
        return model if "dtype" in names else computing_in(model, dtype)
    return _adapted(construct(), construct, dtype, label, told="dtype" in names)


def computing_in(model: Model, dtype: Any) -> Model:
    """`model` with floating parameters and inputs cast to `dtype` in every call: for those without a dtype argument."""

    def apply(params: Tree, model_state: Tree, inputs: Any, *, key: jax.Array | None, train: bool) -> tuple[Any, Tree]:
        params, inputs = precision.cast(params, dtype), precision.cast(inputs, dtype)
        # The state is not cast: in bfloat16 a running average that moves by 1 % a step would stand still.
        return model.apply(params, model_state, inputs, key=key, train=train)

    return Model(model.init, apply)


def _adapted(built: Any, construct: Callable[[], Any], dtype: Any, label: str, *, told: bool) -> Model:
    """What `construct()` made, as a Model; `told` where it knows the dtype to compute in."""
    if _is_keras(built):
        from jaxtrain.adapters.keras import from_keras

        return from_keras(construct, dtype, type(built).__name__ if label == "given" else label)
    if _is_linen(built):
        from jaxtrain.adapters.linen import from_linen

        model = from_linen(built)
    else:
        model = _pair(built, label)
    return model if told else computing_in(model, dtype)


def _is_ready(part: Any) -> bool:
    """An object that can be called, and is no builder all the same."""
    return not inspect.isclass(part) and (_is_linen(part) or _is_keras(part))


def _is_linen(thing: Any) -> bool:
    return _is_a(thing, "flax.linen", "Module")


def _is_keras(thing: Any) -> bool:
    return _is_a(thing, "keras", "Layer")  # a model is a layer


def _is_a(thing: Any, module: str, name: str) -> bool:
    """Whether it is an object or a class of that kind, without importing the library to find out."""
    kind = getattr(sys.modules.get(module), name, None)
    if kind is None:
        return False
    return issubclass(thing, kind) if inspect.isclass(thing) else isinstance(thing, kind)


def _builder(part: Any) -> tuple[Callable[..., Any], str]:
    """What `part` names or is, and how to call it in an error."""
    if callable(part):
        builder = part
        label = getattr(_function(part), "__name__", type(part).__name__)
    else:
        label, _ = lookup.split(part)
        builder = lookup.resolve(label, lookup.MODELS, "model")
    function = _function(builder)
    if not inspect.isclass(function):
        if isinstance(function, nnx.Module) or _is_ready(function):
            raise UserError(f"model {label} is an object; give its class, or a function that makes it")
        return builder, label
    if _is_linen(function) or _is_keras(function):
        return builder, label
    if not issubclass(function, nnx.Module):
        raise UserError(
            f"model {label} is a class, but no flax.nnx.Module (nor flax.linen.Module, nor keras.Model); derive it "
            "from that, or give a function"
        )
    if "rngs" not in _argument_names(builder):
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
        f"model {label} makes a {type(built).__name__}; expected a Linen module, a Keras model, a Model, a pair "
        "(init, apply), or, with an argument `rngs`, a flax.nnx.Module"
    )
