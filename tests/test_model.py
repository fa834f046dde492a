"""From what users write to a pair of pure functions: state, modes, random streams, dtypes, mistakes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.model import Model, build_model, from_nnx

KEY = jax.random.key(0)
X = jnp.linspace(-1.0, 1.0, 64, dtype=jnp.float32).reshape(16, 4)
SUPPLIED = {"num_classes": 3, "input_shape": (4,), "dtype": jnp.float32}


class Net(nnx.Module):
    """One of everything: parameters in a list, statistics, two dropouts, a counter of its own."""

    def __init__(self, num_classes: int = 3, width: int = 8, rate: float = 0.5, *, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(4, width, rngs=rngs), nnx.Linear(width, width, rngs=rngs)])
        self.norm = nnx.BatchNorm(width, momentum=0.5, rngs=rngs)
        self.drops = nnx.List([nnx.Dropout(rate, rngs=rngs), nnx.Dropout(rate, rngs=rngs)])
        self.head = nnx.Linear(width, num_classes, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        for layer, drop in zip(self.layers, self.drops, strict=True):
            x = drop(nnx.relu(layer(x)))
        return self.head(self.norm(x))


class Masks(nnx.Module):
    """Shows its random draws: two dropouts, two streams of its own, one of them twice."""

    def __init__(self, rngs: nnx.Rngs):
        self.first, self.second = nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.rngs = nnx.Rngs(noise=rngs.noise(), other=rngs.other())

    def __call__(self, x):
        draws = {"noise": self.rngs.noise, "again": self.rngs.noise, "other": self.rngs.other}
        masks = {name: jax.random.bernoulli(draw(), 0.5, x.shape) for name, draw in draws.items()}
        return masks | {"first": self.first(x) != 0, "second": self.second(x) != 0}


class Lambda(nnx.Module):
    """A parameter `w`, a statistic `s`, and a call given by the test."""

    def __init__(self, call, rngs: nnx.Rngs):
        self.w = nnx.Param(jnp.ones((4,), jnp.float32))
        self.s = nnx.BatchStat(jnp.zeros((4,), jnp.float32))
        self.call = call

    def __call__(self, x):
        return self.call(self, x)


@functools.cache
def net():
    model = from_nnx(lambda rngs: Net(rngs=rngs))
    return model, *model.init(KEY, X)


def paths(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    }


def equal(a, b):
    return jax.tree.all(jax.tree.map(np.array_equal, a, b))


def one_line(error, *words):
    text = str(error.value)
    assert "\n" not in text
    assert all(word in text for word in words), text


class TestInit:
    def test_plain_dicts_with_string_keys(self):
        _, params, model_state = net()
        layers = {f"{layer}/{name}" for layer in ("layers/0", "layers/1", "head") for name in ("kernel", "bias")}
        assert paths(params) == layers | {"norm/scale", "norm/bias"}
        assert paths(model_state) == {"norm/mean", "norm/var", "calls"}
        for tree in (params, model_state):
            kinds = {type(node) for node in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, dict))}
            assert kinds == {dict}

    def test_pure(self):
        model, *state = net()
        assert equal(state, list(jax.jit(model.init)(KEY, X)))
        shapes = jax.eval_shape(model.init, KEY, X)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), list(shapes)) == jax.tree.map(
            lambda x: (x.shape, x.dtype), state
        )
        assert not equal(state[0], model.init(jax.random.key(1), X)[0])

    def test_a_model_without_parameters_or_state(self):
        model = from_nnx(lambda rngs: nnx.Dropout(0.5, rngs=rngs))
        assert model.init(KEY, X) == ({}, {})
        assert (model.apply({}, {}, X, key=None, train=False)[0] == X).all()


class TestApply:
    def test_state_advances_in_training_and_the_arguments_stay(self):
        model, params, before = net()
        copy = jax.tree.map(jnp.copy, (params, before))
        _, after = model.apply(params, before, X, key=KEY, train=True)
        assert equal((params, before), copy)
        assert jax.tree.structure(after) == jax.tree.structure(before)
        assert int(after["calls"]) == 1
        assert not equal(after["norm"], before["norm"])

    def test_evaluation_uses_the_statistics_and_no_dropout(self):
        model, params, state = net()
        out, after = model.apply(params, state, X, key=None, train=False)
        assert equal(after["norm"], state["norm"])
        alone, _ = model.apply(params, state, X[:1], key=KEY, train=False)
        np.testing.assert_allclose(out[:1], alone, rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("wrap", ["plain", "jit", "grad", "scan", "vmap", "checkpoint"])
    def test_inside_transformations(self, wrap):
        model, params, state = net()

        def loss(params, state, x, key):
            out, state = model.apply(params, state, x, key=key, train=True)
            return out.sum(dtype=jnp.float32), state

        expected = loss(params, state, X, KEY)
        if wrap == "scan":
            _, found = jax.lax.scan(lambda c, x: (c, loss(params, state, x, KEY)), None, X[None])
            found = jax.tree.map(lambda x: x[0], found)
        elif wrap == "vmap":
            found = jax.vmap(loss, (None, None, 0, None))(params, state, X[None], KEY)
            found = jax.tree.map(lambda x: x[0], found)
        elif wrap == "grad":
            (value, new), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, state, X, KEY)
            assert jax.tree.structure(grads) == jax.tree.structure(params)
            found = value, new
        else:
            found = {"plain": loss, "jit": jax.jit(loss), "checkpoint": jax.checkpoint(loss)}[wrap](
                params, state, X, KEY
            )
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found, expected)

    def test_nothing_leaks_and_nothing_is_transferred_unasked(self):
        model, params, state = net()
        step = jax.jit(functools.partial(model.apply, train=True))
        with jax.checking_leaks(), jax.transfer_guard("disallow"):
            _, state = step(params, state, X, key=KEY)
            step(params, state, X, key=KEY)
        assert step._cache_size() == 1

    def test_train_is_passed_to_a_call_that_names_it(self):
        class Told(nnx.Module):
            def __call__(self, x, *, train: bool):
                return x if train else -x

        model = from_nnx(lambda rngs: Told())
        assert (model.apply({}, {}, X, key=KEY, train=True)[0] == X).all()
        assert (model.apply({}, {}, X, key=None, train=False)[0] == -X).all()

    def test_a_dict_of_inputs_becomes_keyword_arguments(self):
        class Two(nnx.Module):
            def __call__(self, left, right):
                return {"difference": left - right}

        out, _ = from_nnx(lambda rngs: Two()).apply({}, {}, {"right": X, "left": 2 * X}, key=None, train=False)
        np.testing.assert_array_equal(out["difference"], X)

    def test_tied_parameters_are_one(self):
        class Tied(nnx.Module):
            def __init__(self, rngs):
                self.a = nnx.Linear(4, 4, use_bias=False, rngs=rngs)
                self.b = nnx.Linear(4, 4, use_bias=False, rngs=rngs)
                self.b.kernel = self.a.kernel

            def __call__(self, x):
                return self.b(self.a(x))

        model = from_nnx(lambda rngs: Tied(rngs))
        params, _ = model.init(KEY, X)
        assert paths(params) == {"a/kernel"}
        (kernel,) = jax.tree.leaves(params)
        out, _ = model.apply(params, {}, X, key=None, train=False)
        np.testing.assert_allclose(out, X @ kernel @ kernel, rtol=1e-5, atol=1e-5)

    def test_arrays_of_another_model_are_refused(self):
        model, params, state = net()
        with pytest.raises(UserError) as error:
            model.apply({**params, "tail": params["head"]}, state, X, key=None, train=False)
        one_line(error, "tail/bias")


class TestRandomness:
    def draw(self, key, x=X):
        return from_nnx(Masks).apply({}, {}, x, key=key, train=True)[0]

    def test_the_same_key_gives_the_same_masks_and_another_key_others(self):
        first = self.draw(KEY)
        assert equal(first, self.draw(KEY))
        other = self.draw(jax.random.key(1))
        assert all((first[name] != other[name]).any() for name in first)

    def test_modules_streams_calls_and_rows_differ(self):
        masks = {name: np.asarray(mask) for name, mask in self.draw(KEY).items()}
        for name in masks:
            assert (masks[name][:8] != masks[name][8:]).any()  # the halves of a batch
            assert 0.25 < masks[name].mean() < 0.75
            assert all((masks[name] != masks[other]).any() for other in masks if other != name)

    def test_masks_do_not_depend_on_the_seed_of_the_parameters(self):
        model, params, state = net()
        _, other_state = model.init(jax.random.key(5), X)
        a, _ = model.apply(params, state, X, key=KEY, train=True)
        b, _ = model.apply(params, other_state, X, key=KEY, train=True)
        assert (a == b).all()

    def test_every_layer_of_a_stack_has_its_own(self):
        class Stack(nnx.Module):
            def __init__(self, rngs):
                @nnx.split_rngs(splits=3)
                @nnx.vmap(axis_size=3)
                def make(rngs):
                    return nnx.Dropout(0.5, rngs=rngs)

                self.drops = make(rngs)

            def __call__(self, x):
                return nnx.vmap(lambda drop, x: drop(x), in_axes=(0, None))(self.drops, x)

        masks = np.asarray(from_nnx(Stack).apply({}, {}, X, key=KEY, train=True)[0] != 0)
        assert all((masks[i] != masks[j]).any() for i in range(3) for j in range(i))

    def test_training_needs_a_key_only_where_something_is_drawn(self):
        model, params, state = net()
        with pytest.raises(UserError) as error:
            model.apply(params, state, X, key=None, train=True)
        one_line(error, "key=None")
        sure = from_nnx(lambda rngs: nnx.Linear(4, 3, rngs=rngs))
        assert sure.apply(*sure.init(KEY, X), X, key=None, train=True)[0].shape == (16, 3)

    def test_what_draws_in_evaluation_draws_the_same_without_a_key(self):
        class Noisy(nnx.Module):
            def __init__(self, rngs):
                self.rngs = rngs

            def __call__(self, x):
                return x + jax.random.normal(self.rngs.noise(), x.shape, jnp.float32)

        model = from_nnx(Noisy)
        a, b = (model.apply({}, {}, X, key=None, train=False)[0] for _ in range(2))
        assert (a == b).all()


class TestState:
    def test_arrays_in_plain_attributes(self):
        class Table(nnx.Module):
            def __init__(self, rngs):
                self.table = jnp.arange(4, dtype=jnp.float32)[None]
                self.host = np.ones((1, 4), np.float32)
                self.inner = nnx.List([jnp.full((1, 4), 2.0, jnp.float32)])

            def __call__(self, x):
                return x * self.table * self.host * self.inner[0]

        model = from_nnx(Table)
        params, state = jax.jit(model.init)(KEY, X)
        with jax.checking_leaks():
            out, after = jax.jit(functools.partial(model.apply, train=True))(params, state, X, key=KEY)
        np.testing.assert_array_equal(out, np.asarray(X) * 2 * np.arange(4, dtype=np.float32))
        assert equal(state, after)

    def test_arrays_in_a_plain_container_are_refused(self):
        class Hidden(nnx.Module):
            def __init__(self, rngs):
                self.pair = (jnp.zeros((4,)), 1)

            def __call__(self, x):
                return x

        with pytest.raises(UserError) as error:
            jax.eval_shape(from_nnx(Hidden).init, KEY, X)
        one_line(error, "Hidden.pair", "nnx.List")

    def test_intermediates_are_no_state(self):
        class Sowing(nnx.Module):
            def __init__(self, rngs):
                self.features = nnx.Intermediate(jnp.zeros((16, 4)))

            def __call__(self, x):
                self.features[...] = x
                self.late = nnx.Intermediate(x)
                return x

        model = from_nnx(Sowing)
        assert model.init(KEY, X) == ({}, {})

    @pytest.mark.parametrize(
        ("call", "words"),
        [
            (lambda self, x: setattr(self, "late", nnx.Variable(x)) or x, ["Lambda", "late", "__init__"]),
            (lambda self, x: delattr(self, "s") or x, ["Lambda", " s ", "__init__"]),
            (lambda self, x: self.s.set_value(x) or x, ["s", "float32[4]", "float32[16, 4]"]),
            (lambda self, x: self.s.set_value(jnp.zeros((4,), jnp.int32)) or x, ["s", "float32[4]", "int32[4]"]),
        ],
        ids=["new variable", "lost variable", "another shape", "another kind"],
    )
    def test_a_state_that_changes_its_form_is_refused(self, call, words):
        model = from_nnx(lambda rngs: Lambda(call, rngs))
        with pytest.raises(UserError) as error:
            model.apply(*model.init(KEY, X), X, key=KEY, train=True)
        one_line(error, *words)

    def test_fewer_bits_are_widened_again(self):
        model = from_nnx(lambda rngs: Lambda(lambda self, x: self.s.set_value(x[0].astype(jnp.bfloat16)) or x, rngs))
        _, state = model.apply(*model.init(KEY, X), X, key=KEY, train=True)
        assert state["s"].dtype == jnp.float32

    @pytest.mark.parametrize(
        ("outputs", "word"), [(None, "NoneType"), ((), "tuple"), (1.5, "float"), ({"a": None}, "NoneType")], ids=str
    )
    def test_outputs_that_are_no_arrays_are_refused(self, outputs, word):
        model = from_nnx(lambda rngs: Lambda(lambda self, x: outputs, rngs))
        with pytest.raises(UserError) as error:
            model.apply(*model.init(KEY, X), X, key=None, train=False)
        one_line(error, "Lambda", word, "array")


class Full(nnx.Module):
    """Names all that is supplied, and shows it."""

    def __init__(self, num_classes: int, width: int = 32, *, input_shape, dtype, rngs: nnx.Rngs):
        self.shown = (num_classes, width, input_shape, dtype)
        self.layer = nnx.Linear(input_shape[-1], num_classes, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.layer(x)


class Plain(nnx.Module):
    """Knows nothing of a compute dtype."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = nnx.Param(jnp.ones((4, 3), jnp.float32))
        self.s = nnx.BatchStat(jnp.zeros((), jnp.float32))

    def __call__(self, x):
        assert x.dtype == self.w.dtype
        self.s[...] = x.mean().astype(jnp.float32)
        return x @ self.w[...]


class NotAModule:
    def __init__(self, rngs):
        pass


class NoRngs(nnx.Module):
    def __init__(self, num_classes):
        pass


class NoCall(nnx.Module):
    def __init__(self, rngs):
        pass


def pair(num_classes, input_shape):
    def init(key, example):
        return {"w": jnp.zeros((*input_shape, num_classes), jnp.float32)}, {}

    def apply(params, model_state, inputs, *, key, train):
        return inputs @ params["w"], model_state

    return init, apply


def ready(num_classes, input_shape):
    return Model(*pair(num_classes, input_shape))


class TestBuild:
    @pytest.mark.parametrize(
        "part",
        [
            "mlp",
            {"name": "mlp", "hidden": (5,)},
            {"name": f"{__name__}:Full", "width": 3},
            f"{__name__}:pair",
            Full,
            functools.partial(Full, width=3),
            lambda rngs: Full(3, input_shape=(4,), dtype=jnp.float32, rngs=rngs),
            lambda num_classes, *, rngs: nnx.Linear(4, num_classes, rngs=rngs),
            pair,
            ready,
            pair(3, (4,)),
            ready(3, (4,)),
        ],
        ids=lambda part: getattr(part, "__name__", str(part)[:30]),
    )
    def test_whatever_makes_a_model(self, part):
        model = build_model(part, **SUPPLIED)
        params, state = model.init(KEY, X)
        out, _ = model.apply(params, state, X, key=KEY, train=True)
        assert (out.shape, out.dtype) == ((16, 3), jnp.float32)

    def test_supplied_and_options_arrive(self):
        seen = []

        def builder(num_classes, width=7, *, input_shape, dtype, rngs):
            seen.append((num_classes, width, input_shape, dtype))
            return nnx.Linear(4, 3, rngs=rngs)

        build_model(builder, num_classes=3, input_shape=(4,), dtype=jnp.bfloat16).init(KEY, X)
        assert seen == [(3, 7, (4,), jnp.dtype(jnp.bfloat16))]

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda d: d.__name__)
    @pytest.mark.parametrize("part", [Full, Plain, pair], ids=lambda part: part.__name__)
    def test_computes_in_the_dtype_and_keeps_float32(self, part, dtype):
        model = build_model(part, **SUPPLIED | {"dtype": dtype})
        params, state = model.init(KEY, X)
        out, after = model.apply(params, state, X, key=KEY, train=True)
        assert out.dtype == dtype
        assert {leaf.dtype for leaf in jax.tree.leaves((params, state, after))} == {jnp.dtype(jnp.float32)}
        grads = jax.grad(lambda p: model.apply(p, state, X, key=KEY, train=True)[0].sum().astype(jnp.float32))(params)
        assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}

    @pytest.mark.parametrize(
        ("part", "words"),
        [
            ("mpl", ["mpl", "mlp"]),
            ({"name": "mlp", "hiden": (3,)}, ["hiden", "hidden"]),
            ({"name": "mlp", "dropout": 1.5}, ["1.5", "less than 1"]),
            (NotAModule, ["NotAModule", "flax.nnx.Module"]),
            (f"{__name__}:NoRngs", ["NoRngs", "rngs"]),
            (lambda rngs: 3, ["int", "flax.nnx.Module"]),
            (lambda rngs: NoCall(rngs), ["NoCall", "__call__"]),
            (lambda: Plain(nnx.Rngs(0)), ["without", "rngs"]),
            (lambda: None, ["NoneType", "(init, apply)"]),
            (lambda: (1, 2), ["tuple", "(init, apply)"]),
            (Plain(nnx.Rngs(0)), ["object", "class"]),
            (3, ["int", "(init, apply)"]),
        ],
        ids=lambda value: getattr(value, "__name__", type(value).__name__),
    )
    def test_mistakes_are_one_line(self, part, words):
        with pytest.raises(UserError) as error:
            build_model(part, **SUPPLIED).init(KEY, X)
        one_line(error, *words)

    @pytest.mark.parametrize("missing", ["num_classes", "input_shape"])
    def test_what_the_data_does_not_tell_is_named(self, missing):
        with pytest.raises(UserError) as error:
            build_model("mlp", **SUPPLIED | {missing: None})
        one_line(error, "mlp", missing)
        build_model(Plain, **SUPPLIED | {missing: None}).init(KEY, X)
