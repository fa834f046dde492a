"""What objects of a user's own must keep to, said in one line where they do not: steps, states, inputs."""

import functools
import inspect
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from jaxtrain.config import lookup
from jaxtrain.data.sources import ArraySource, Spec
from jaxtrain.errors import UserError
from jaxtrain.sharding import path_string
from jaxtrain.step import Steps

NEEDED = {"step": "int32[]", "offset": "int32[]", "key": "key<fry>[]"}  # in the state of every step


def label(thing: Any) -> str:
    """What to call a part when speaking of it: its name, or that of its type."""
    if isinstance(thing, (str, Mapping, ConfigDict)):
        return thing if isinstance(thing, str) else str(thing.get("name", "arrays"))
    while isinstance(thing, functools.partial):
        thing = thing.func
    return str(getattr(thing, "__name__", type(thing).__name__))


def asked_for(builder: Any, known: Collection[str]) -> list[str]:
    """The names of `known` that a step builder takes; it is named as in a config, or an object.

    Raises UserError for an object that cannot be called with them.
    """
    if isinstance(builder, (str, Mapping, ConfigDict)):
        takes = lookup.parameters(lookup.resolve(lookup.split(builder)[0], lookup.STEPS, "step"))
        return [name for name in known if name in takes]
    try:
        signature = inspect.signature(builder)
        asked = [name for name in known if name in signature.parameters]
        signature.bind(**dict.fromkeys(asked or ["parts"]))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"the step is {label(builder)}, which cannot be called as step(parts) ({error}); expected a function of "
            f"some of {', '.join(known)} that returns jaxtrain.step.Steps; bind options with functools.partial"
        ) from None
    return asked


def checked_steps(built: Any, name: str) -> Steps:
    """Raises UserError where a step builder returned anything but Steps."""
    if not isinstance(built, Steps):
        raise UserError(
            f"step {name} returned {type(built).__name__}, expected jaxtrain.step.Steps: it is called once, with "
            "what it names, and returns the functions init, train, evaluate and predict"
        )
    return built


def refuse_incomplete_state(name: str, state: Any) -> None:
    """Raises UserError for a state, as ShapeDtypeStructs, that no run can carry on."""
    for field, kind in NEEDED.items():
        if not hasattr(state, field):
            raise UserError(
                f"the state of step {name} has no `{field}`; expected a registered dataclass with "
                f"{', '.join(NEEDED)}, such as jaxtrain.state.TrainState"
            )
        found = _kind(getattr(state, field))
        if found != kind:
            raise UserError(f"in the state of step {name}, `{field}` is {found}, expected {kind}")


def traced(steps: Steps, name: str, state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    """One step: its jaxpr, and its metrics as ShapeDtypeStructs; nothing is computed.

    Raises UserError for a `train` that does not return (state, metrics), or not the kind of state that it was given.
    """
    program, found = jax.make_jaxpr(steps.train, return_shape=True)(state, batch)
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping) and found[1]):
        raise UserError(
            f"train(state, batch) of step {name} returned {_kinds(found)}, expected the pair (state, metrics), "
            'metrics a dict with "loss" or another scalar in it'
        )
    refuse_other_state(state, found[0], f"train(state, batch) of step {name} returned another kind of state")
    return program.jaxpr, dict(found[1])


def refuse_other_state(expected: Any, found: Any, problem: str) -> None:
    """Raises UserError, `problem` and the first differences, where structure, shapes or dtypes are not `expected`."""
    if type(found) is not type(expected):
        raise UserError(f"{problem}: a {type(found).__name__}, expected a {type(expected).__name__}")
    wanted, given = _leaves(expected), _leaves(found)
    wrong = [f"{path} is missing" for path in wanted if path not in given]
    wrong += [f"{path} is new" for path in given if path not in wanted]
    wrong += [
        f"{path} is {given[path]}, expected {kind}"
        for path, kind in wanted.items()
        if path in given and given[path] != kind
    ]
    if not wrong and str(structure := jax.tree.structure(found)) != str(jax.tree.structure(expected)):
        wrong = [f"{structure}, expected {jax.tree.structure(expected)}"]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise UserError(f"{problem}: {'; '.join(wrong[:3])}{more}")


def refuse_unusable_state(expected: Any, found: Any) -> None:
    """Raises UserError for a state to carry on from that is another run's, or that a step has used up."""
    refuse_other_state(expected, found, "the state given (an earlier result.state?) does not fit the config")
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(found)):
        raise UserError("the state given is used up: a step donates the state it is called with; give what it returned")


def refuse_miscount(name: str, found: int, expected: int) -> None:
    """Raises UserError where the states' own count of steps is not the loop's: no checkpoint could be resumed."""
    if found != expected:
        raise UserError(
            f"after step {expected} the state of step {name} has step={found}; train(state, batch) returns a state "
            "whose `step` is one higher"
        )


def inputs(given: Mapping[str, Any] | Any, spec: Spec) -> ArraySource:
    """Raw inputs to predict on, arrays [N, ...] of the shapes in `spec` (of one example).

    An array alone is "image". Labels are not asked for. Raises UserError for another shape, a missing array, and
    pictures that are not what was trained on: where that was uint8, floats are taken for values in [0, 1].
    """
    arrays = dict(given) if isinstance(given, Mapping) else {"image": given}
    if not arrays.keys() & spec.keys():
        raise UserError(f"inputs are named {', '.join(map(str, arrays))}; this model learnt from {', '.join(spec)}")
    source = ArraySource({name: np.asarray(value) for name, value in arrays.items()})
    for name, found in source.spec.items():
        if name in spec and found.shape != spec[name].shape:
            expected = ", ".join(map(str, ("N", *spec[name].shape)))
            raise UserError(f"{name} is {list(np.shape(arrays[name]))}, expected [{expected}] for N examples")
    bytes_expected = "image" in spec and spec["image"].dtype == np.uint8
    if bytes_expected and "image" in source.spec and source.spec["image"].dtype != np.uint8:
        pictures = source.column("image")
        low, high = float(pictures.min()), float(pictures.max())
        if not (low >= 0 and high <= 1):
            raise UserError(
                f"images are {pictures.dtype} from {low:g} to {high:g}; expected uint8, as in training, or floats "
                "in [0, 1]"
            )
    return source


def _kinds(returned: Any) -> str:
    """ "(TrainState, dict)" for a pair, else the type; an empty dict is said to be one."""
    if isinstance(returned, tuple):
        return f"({', '.join(map(_kinds, returned))})"
    return "an empty dict" if returned == {} else type(returned).__name__


def _leaves(tree: Any) -> dict[str, str]:
    """Path -> "float32[3, 4]" of every leaf."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        found[path_string(path)] = _kind(leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf))
    return found


def _kind(leaf: Any) -> str:
    """ "float32[3, 4]", or the type of what is no array."""
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else type(leaf).__name__
