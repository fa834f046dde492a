"""Keras 3 models on JAX as pure functions, by Keras' own `stateless_call`."""

import copy
import dataclasses
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.adapters.functional import Model, Named, Tree, arrays, as_before, named, nested, refuse_others
from jaxtrain.config import lookup
from jaxtrain.errors import JaxtrainError, UserError

RANDOM = "seed_generator_state"  # what Keras calls the state of each of its random streams
POLICIES = {"bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}  # variables stay float32


def from_keras(make: Callable[[], Any], dtype: Any, label: str) -> Model:
    """The functional form of the Keras model or layer that `make()` returns, computing in `dtype`.

    `params` are its trainable variables; `model_state` is all others, frozen weights among them, but the states of
    random streams: each gets one of its own, drawn from `key`. Values to begin with are drawn from the key too, by each
    variable's own initializer; only what already has a value (a model that was built or loaded before) begins with
    that. A dict of inputs is the model's one argument. Names count layers of a kind from the start of the model.
    Raises UserError where Keras does not run on JAX, for a model that cannot be built on the inputs, that computes in
    another dtype or has losses of its own, and for a state that changes its form.
    """
    network = _Network(make, dtype, label)

    def init(key: jax.Array, example: Any) -> tuple[Tree, Tree]:
        parts = network.built(example)
        values = {}
        with jax.numpy_rank_promotion("allow"):
            for number, (name, variable) in enumerate((parts.params | parts.rest).items()):
                begun = parts.begun.get(name)
                values[name] = _drawn(variable, jax.random.fold_in(key, number)) if begun is None else begun
        params, rest = (nested({name: values[name] for name in part}) for part in (parts.params, parts.rest))
        return params, rest

    def apply(params: Tree, model_state: Tree, inputs: Any, *, key: jax.Array | None, train: bool) -> tuple[Any, Tree]:
        parts = network.built(inputs)
        if key is None and train and parts.random:
            raise UserError("a model with random layers was applied with train=True and key=None; give it a key")
        weights, before = named(params), named(model_state)
        refuse_others(parts.params, weights)
        refuse_others(parts.rest, before)
        others = before | _random_states(parts.random, key)
        with jax.numpy_rank_promotion("allow"):  # Keras' own layers rely on it
            outputs, after, losses = parts.model.stateless_call(
                [weights[name] for name in parts.params],
                [others[name] for name in parts.others],
                inputs,
                training=train,
                return_losses=True,
            )
        if losses:
            raise UserError(
                f"Keras model {label} has losses of its own (a regularizer, add_loss), which no task would see; leave "
                "them out: config.optimizer.weight_decay regularises, a task has its own losses"
            )
        found = {name: value for name, value in zip(parts.others, after, strict=True) if name in parts.rest}
        return arrays(label, outputs), nested(as_before(label, before, found)) if train else model_state

    return Model(init, apply)


@dataclasses.dataclass(frozen=True)
class _Parts:
    """A built model and its variables by name, in Keras' own order."""

    model: Any
    params: Named
    others: Named  # all that are not trained: `rest` and `random`
    begun: Named  # the values of variables that have one already

    @property
    def random(self) -> list[str]:
        return [name for name, variable in self.others.items() if variable.name == RANDOM]

    @property
    def rest(self) -> Named:
        return {name: variable for name, variable in self.others.items() if variable.name != RANDOM}


@dataclasses.dataclass
class _Network:
    """A model that is made when its first inputs tell their shapes."""

    make: Callable[[], Any]
    dtype: Any
    label: str
    parts: _Parts | None = None

    def built(self, inputs: Any) -> _Parts:
        if self.parts is None:
            shapes = jax.tree.map(lambda x: ((None, *x.shape[1:]), x.dtype.name), inputs)
            x64 = jnp.result_type(float) == jnp.float64
            # In a thread of its own: Keras counts the names of layers, and JAX traces, by the thread.
            with ThreadPoolExecutor(1) as apart:
                self.parts = apart.submit(self._build, shapes, x64).result()
        return self.parts

    def _build(self, shapes: Any, x64: bool) -> _Parts:
        import keras

        if keras.backend.backend() != "jax":
            raise UserError(
                f"model {self.label} is a Keras model, and Keras runs on {keras.backend.backend()}; set the "
                "environment variable KERAS_BACKEND=jax before keras is imported"
            )
        keras.config.set_dtype_policy(POLICIES.get(self.dtype.name, self.dtype.name))
        # Nothing is computed: in this scope variables keep their initializers, and get no values.
        scope = keras.StatelessScope(initialize_variables=False)
        with jax.enable_x64(x64), jax.numpy_rank_promotion("allow"), scope:
            try:
                model = self.make()
                if not model.built or not model.weights:
                    model(_symbolic(keras, shapes))
            except JaxtrainError:
                raise
            except Exception as error:  # of the user's code as much as of Keras
                raise UserError(f"Keras model {self.label} cannot be built: {lookup.described(error)}") from error
        if model.compute_dtype != self.dtype.name:
            raise UserError(
                f"Keras model {self.label} computes in {model.compute_dtype}, and config.precision asks for "
                f"{self.dtype.name}; give a function that makes it, without a dtype, or set config.precision"
            )
        names = _names(model)
        by_name = {names[id(variable)]: variable for variable in model.weights + model.non_trainable_variables}
        begun = {name: _begun(variable, scope) for name, variable in by_name.items()}
        return _Parts(
            model,
            {names[id(variable)]: variable for variable in model.trainable_variables},
            {names[id(variable)]: variable for variable in model.non_trainable_variables},
            {name: value for name, value in begun.items() if value is not None},
        )


def _symbolic(keras: Any, shapes: Any) -> Any:
    def is_shape(node: Any) -> bool:
        return isinstance(node, tuple) and isinstance(node[0], tuple)

    return jax.tree.map(lambda shape: keras.KerasTensor(*shape), shapes, is_leaf=is_shape)


def _begun(variable: Any, scope: Any) -> Any:
    """What was loaded while the model was made, or the value from before; None where there is only an initializer."""
    loaded = scope.get_current_value(variable)
    return variable._value if loaded is None else loaded


def _drawn(variable: Any, key: jax.Array) -> jax.Array:
    initializer = variable._initializer
    if hasattr(initializer, "seed"):
        initializer = copy.copy(initializer)
        initializer.seed = jax.random.key_data(key)
    return initializer(variable.shape, dtype=variable.dtype)


def _random_states(names: list[str], key: jax.Array | None) -> Named:
    keys = jax.random.split(jax.random.key(0) if key is None else key, max(1, len(names)))
    return dict(zip(names, jax.random.key_data(keys), strict=False))


def _names(model: Any) -> dict[int, str]:
    """The path of each variable, by its id. Raises UserError where two have the same.

    Keras numbers the layers of a process; numbered anew within the model, the names are those of every other process.
    """
    automatic = {_snake(type(layer).__name__) for layer in model._flatten_layers()} | {"seed_generator"}
    numbers: dict[tuple[str, str], list[str]] = {}  # (parent, base of the name) -> names as they are, in order

    def parts(path: str) -> Iterator[str]:
        *parents, last = path.split("/")
        where = ""
        for name in parents:
            base = re.sub(r"_\d+$", "", name)
            where += f"/{name}"
            if base not in automatic:
                yield name
                continue
            alike = numbers.setdefault((where.rpartition("/")[0], base), [])
            if name not in alike:
                alike.append(name)
            yield f"{base}_{alike.index(name)}" if alike.index(name) else base
        yield last

    found: dict[int, str] = {}
    for variable in model.weights + model.non_trainable_variables:
        if id(variable) not in found:
            name = "/".join(parts(variable.path))
            if name in found.values():
                raise UserError(f"two variables of the Keras model are called {name}; give their layers names")
            found[id(variable)] = name
    return found


def _snake(name: str) -> str:
    """As Keras names a layer by its class: "MultiHeadAttention" -> "multi_head_attention"."""
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()
