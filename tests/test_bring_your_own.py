"""Models of a user's own, whatever they are written in: each trains to the same behaviour."""

import re
import types

import jax
import jax.numpy as jnp
import keras
import numpy as np
import own_nets
import pytest
import tiny
from conftest import REPOSITORY
from flax import linen
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain import train
from jaxtrain.errors import UserError
from jaxtrain.model import build_model
from jaxtrain.sharding import path_string

NAMES = ["Nnx", "Linen", "keras_functional", "KerasClass", "pair"]
SHAPE = (8, 8, 1)
SUPPLIED = {"num_classes": 10, "input_shape": SHAPE, "dtype": jnp.float32}


def part(name, **options):
    return dict(name=f"own_nets:{name}", **options)


def built(name, **options):
    model = build_model(part(name, **options), **SUPPLIED)
    return model, *model.init(jax.random.key(0), pictures(1))


def pictures(size=16):
    return jax.random.uniform(jax.random.key(7), (size, *SHAPE), jnp.float32)


def equal(a, b):
    return jax.tree.all(jax.tree.map(np.array_equal, a, b))


def close(a, b, tolerance=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b)


def run(objects, folder=None, **changes):
    return train.run(tiny.config(test="no", eval_every="", **changes), folder, data=tiny.data(), **objects)


@pytest.mark.parametrize("name", NAMES)
class TestEveryKind:
    def test_parameters_come_from_the_key_and_are_float32_and_named(self, name):
        model, params, state = built(name)
        assert len(jax.tree.leaves(params)) == (4 if name == "pair" else 6)
        assert len(jax.tree.leaves(state)) == 2
        assert {leaf.dtype for leaf in jax.tree.leaves((params, state))} == {jnp.dtype(jnp.float32)}
        assert equal(params, model.init(jax.random.key(0), pictures(1))[0])
        params, other = jax.device_get((params, model.init(jax.random.key(1), pictures(1))[0]))
        kernels = [(a, b) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(other), strict=True) if a.ndim == 2]
        assert len(kernels) == 2 and all((a != b).any() for a, b in kernels)

    def test_names_do_not_depend_on_what_was_built_before(self, name):
        paths = [
            [path_string(path) for path, _ in jax.tree_util.tree_leaves_with_path(built(name)[1:])] for _ in range(2)
        ]
        assert paths[0] == paths[1] and not any("seed" in path for path in paths[0])

    def test_dropout_is_the_key_s(self, name):
        model, params, state = built(name, norm=False)
        apply = jax.jit(model.apply, static_argnames="train")
        first, same, other = (
            np.asarray(apply(params, state, pictures(), key=jax.random.key(key), train=True)[0]) for key in (1, 1, 2)
        )
        assert (first == same).all() and (first != other).any()
        a, b = (np.asarray(apply(params, state, pictures(), key=None, train=False)[0]) for _ in range(2))
        assert (a == b).all() and (a != first).any()

    def test_statistics_move_in_training_only_and_are_those_of_the_global_batch(self, name):
        model, params, state = built(name, rate=0.0)
        apply = jax.jit(model.apply, static_argnames="train")
        alone = apply(params, state, pictures(), key=jax.random.key(1), train=True)
        mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        spread = jax.device_put(pictures(), NamedSharding(mesh, PartitionSpec("data")))
        close(apply(params, state, spread, key=jax.random.key(1), train=True), alone)
        assert not equal(alone[1], state)
        assert equal(apply(params, state, pictures(), key=None, train=False)[1], state)
        outputs = model.apply(params, alone[1], pictures()[:1], key=None, train=False)[0]
        close(outputs, model.apply(params, alone[1], pictures(), key=None, train=False)[0][:1])

    @pytest.mark.slow
    def test_accumulation_does_not_matter_where_there_is_no_batchnorm(self, name):
        model = part(name, norm=False, rate=0.0)
        once, twice = (
            run({}, model=model, total="3st", accumulate=number, devices=2).state.params for number in (1, 2)
        )
        close(once, twice)

    @pytest.mark.slow
    def test_learns_stops_resumes_to_the_bit_and_predicts(self, name, tmp_path):
        changes = dict(model=part(name), optimizer=dict(name="adam", learning_rate=0.01), devices=2)
        through = run({}, **changes)
        run({}, tmp_path, **changes | {"total": "13st"})
        resumed = run({}, tmp_path, **changes)
        assert tiny.same(through.state, resumed.state)
        losses = [line["train/loss"] for line in through.history if "train/loss" in line]
        assert losses[-1] < losses[0]
        found = resumed.predict(np.zeros((5, *SHAPE), np.uint8))["probabilities"]
        np.testing.assert_allclose(found.sum(1), 1, rtol=1e-5)

    def test_bfloat16(self, name):
        model = build_model(part(name), **SUPPLIED | {"dtype": jnp.bfloat16})
        params, state = model.init(jax.random.key(0), pictures(1))
        _, after = model.apply(params, state, pictures(), key=jax.random.key(1), train=True)
        assert {leaf.dtype for leaf in jax.tree.leaves((params, after))} == {jnp.dtype(jnp.float32)}
        # A BatchNorm of Flax that is not told a dtype goes on in that of its statistics.
        model = build_model(part(name, norm=False), **SUPPLIED | {"dtype": jnp.bfloat16})
        outputs = model.apply(*model.init(jax.random.key(0), pictures(1)), pictures(), key=None, train=False)[0]
        assert outputs.dtype == jnp.bfloat16


def sequential():
    return keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10)])


class TestObjects:
    """What a notebook gives: `train.run(config, model=…)`."""

    @pytest.mark.parametrize(
        "make",
        [
            lambda: own_nets.Linen(10),
            pytest.param(lambda: own_nets.Linen, marks=pytest.mark.slow),
            pytest.param(lambda: own_nets.pair(10, input_shape=SHAPE), marks=pytest.mark.slow),
            pytest.param(lambda: own_nets.keras_functional, marks=pytest.mark.slow),
            pytest.param(lambda: own_nets.KerasClass(10), marks=pytest.mark.slow),
            sequential,
        ],
        ids=["linen", "linen class", "pair", "keras function", "keras unbuilt", "keras sequential"],
    )
    def test_trains(self, make):
        result = run({"model": make()}, total="2st", report_every="2st", devices=1)
        assert np.isfinite(result.history[-1]["train/loss"])

    def test_a_built_keras_model_begins_with_its_weights_and_keeps_them(self):
        net = own_nets.keras_functional(10, input_shape=SHAPE)
        before = [np.asarray(weight) for weight in net.get_weights()]
        model = build_model(net, **SUPPLIED)
        params, state = model.init(jax.random.key(3), pictures(1))
        with jax.numpy_rank_promotion("allow"):
            expected = net(pictures(), training=False)
        close(model.apply(params, state, pictures(), key=None, train=False)[0], expected)
        run({"model": net}, total="2st")
        assert all((a == b).all() for a, b in zip(before, net.get_weights(), strict=True))

    def test_weights_that_a_function_loads_are_kept(self, tmp_path):
        own_nets.keras_functional(10, input_shape=SHAPE).save_weights(tmp_path / "kept.weights.h5")

        def loaded():
            net = own_nets.keras_functional(10, input_shape=SHAPE)
            net.load_weights(tmp_path / "kept.weights.h5")
            return net

        model = build_model(loaded, **SUPPLIED)
        params, _ = model.init(jax.random.key(0), pictures(1))
        assert equal(params, model.init(jax.random.key(1), pictures(1))[0])
        close(params["dense"]["kernel"], loaded().get_weights()[0])

    def test_frozen_layers_of_keras_are_state_and_stay(self):
        def frozen():
            net = sequential()
            net.layers[1].trainable = False
            return keras.Sequential([net, keras.layers.Dense(10)])

        model = build_model(frozen, **SUPPLIED)
        params, state = model.init(jax.random.key(0), pictures(1))
        assert len(jax.tree.leaves(params)) == len(jax.tree.leaves(state)) == 2
        assert equal(model.apply(params, state, pictures(), key=jax.random.key(1), train=True)[1], state)


class Sown(linen.Module):
    @linen.compact
    def __call__(self, x):
        self.sow("losses", "l2", jnp.sum(x**2))
        return linen.Dense(10)(x.reshape(len(x), -1))


@pytest.mark.parametrize(
    ("part", "dtype", "words"),
    [
        (Sown(), "float32", ["Sown", "losses/l2", "form"]),
        (
            lambda: keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10, kernel_regularizer="l2")]),
            "float32",
            ["losses of its own", "weight_decay"],
        ),
        (sequential(), "bfloat16", ["float32", "bfloat16", "precision"]),
        (lambda: keras.Sequential([keras.layers.LSTM(3)]), "float32", ["cannot be built", "ndim"]),
        (lambda: linen.Dense(3, kernel_init=None), "float32", ["Dense"]),
    ],
    ids=["sown loss", "regularizer", "dtype of an object", "shape", "broken linen"],
)
def test_what_would_go_wrong_in_silence_is_refused_in_one_line(part, dtype, words):
    model = build_model(part, **SUPPLIED | {"dtype": dtype})
    with pytest.raises((UserError, TypeError)) as error:
        model.apply(*model.init(jax.random.key(0), pictures(1)), pictures(), key=jax.random.key(0), train=True)
    if error.type is UserError:
        assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words) or error.type is TypeError, str(error.value)


def test_keras_on_another_backend_is_refused(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    with pytest.raises(UserError, match="KERAS_BACKEND=jax before keras is imported"):
        build_model(sequential(), **SUPPLIED).init(jax.random.key(0), pictures(1))


PAGE = (REPOSITORY / "docs" / "bring_your_own.md").read_text()


@pytest.mark.parametrize("name", ["Net", "keras_net", "pure"])
def test_the_page_tells_the_truth(name):
    code = next(code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "my_lab/nets.py" in code)
    module = types.ModuleType("nets")
    exec(code, vars(module))
    model = build_model(getattr(module, name), **SUPPLIED)
    outputs, _ = model.apply(*model.init(jax.random.key(0), pictures(1)), pictures(), key=jax.random.key(0), train=True)
    assert outputs.shape == (16, 10)
