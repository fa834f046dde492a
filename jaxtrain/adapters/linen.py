"""Flax Linen modules as pure functions, which they nearly are."""

import inspect
from collections.abc import Mapping
from typing import Any

import flax
import jax
from flax import linen

from jaxtrain.adapters.functional import Model, Tree, arrays, as_before, named, nested
from jaxtrain.config import lookup
from jaxtrain.errors import UserError

# How a Linen module's `__call__` is told whether it trains: Flax leaves it to each module, and these are the words.
MODES = {"train": True, "training": True, "is_training": True, "deterministic": False, "use_running_average": False}


def from_linen(module: linen.Module) -> Model:
    """The functional form of a Linen module.

    `params` are its collection of that name; `model_state` is all its other collections, by name. Every random stream
    is drawn from `key`, whatever its name. Of MODES, those that `__call__` names are passed. What it sows into
    collections that it did not make in `init` is dropped.
    Raises UserError for what Flax refuses, a state that changes its form, and for outputs that are no arrays.
    """
    label = type(module).__name__
    takes = inspect.signature(type(module).__call__).parameters

    def called(function: Any, first: Any, inputs: Any, train: bool, **options: Any) -> Any:
        modes = {name: train == trains for name, trains in MODES.items() if name in takes}
        args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else ((inputs,), {})
        try:
            return function(first, *args, **kwargs, **modes, **options)
        except flax.errors.FlaxError as error:
            raise UserError(f"model {label}: {lookup.described(error)}") from error

    def init(key: jax.Array, example: Any) -> tuple[Tree, Tree]:
        made = dict(flax.core.unfreeze(flax.core.meta.unbox(called(module.init, key, example, False))))
        return made.pop("params", {}), made

    def apply(params: Tree, model_state: Tree, inputs: Any, *, key: jax.Array | None, train: bool) -> tuple[Any, Tree]:
        variables = {"params": params, **model_state}
        if not train:
            key = jax.random.key(0) if key is None else key
            return arrays(label, called(module.apply, variables, inputs, False, rngs=key)), model_state
        outputs, after = called(module.apply, variables, inputs, True, rngs=key, mutable=list(model_state))
        state = as_before(label, named(model_state), named(flax.core.unfreeze(after)))
        return arrays(label, outputs), nested(state)

    return Model(init, apply)
