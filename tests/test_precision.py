"""Policies, casts, scopes, and a loss scale that neither dies nor explodes."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import precision
from jaxtrain.errors import UserError

PLATFORMS = ("cpu", "gpu", "tpu")


@pytest.mark.parametrize(
    ("platform", "capability", "name", "words"),
    [
        ("cpu", None, "float32", "cpu"),
        ("gpu", "7.5", "float32", "7.5, below 8.0"),
        ("gpu", "8.0", "bfloat16", "8.0"),
        ("gpu", "9.0", "bfloat16", "9.0"),
        ("gpu", "12.0", "bfloat16", "12.0"),
        ("gpu", "gfx90a", "float32", "gfx90a"),
        ("tpu", None, "bfloat16", "TPU"),
        ("METAL", None, "float32", "METAL"),
    ],
)
def test_auto_chooses_and_says_why(platform, capability, name, words):
    policy = precision.choose("auto", platform, capability)
    assert policy.name == name and policy.reason.startswith("auto: ") and words in policy.reason
    kept = precision.choose(policy.name, platform)  # what a resumed run asks for
    assert dataclasses.replace(kept, reason="") == dataclasses.replace(policy, reason="")


def test_auto_asks_the_device_where_nothing_is_said():
    """The CPU has no compute capability: unknown is not bfloat16."""
    assert precision.choose("auto", "gpu").name == "float32"


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize(
    ("name", "param", "compute", "output", "matmul"),
    [
        ("float32", "float32", "float32", "float32", "highest"),
        ("tensorfloat32", "float32", "float32", "float32", "tensorfloat32"),
        ("bfloat16", "float32", "bfloat16", "float32", "default"),
        ("float16", "float32", "float16", "float32", "default"),
        ("float64", "float64", "float64", "float64", "highest"),
    ],
)
def test_policies(platform, name, param, compute, output, matmul):
    if (platform, name) == ("tpu", "float64"):
        with pytest.raises(UserError, match="TPU has no float64"):
            precision.choose(name, platform)
        return
    policy = precision.choose(name, platform)
    assert (policy.name, policy.matmul) == (name, matmul)
    assert [str(each) for each in (policy.param, policy.compute, policy.output)] == [param, compute, output]
    assert policy.reason.startswith("asked for")
    assert (policy.reason == "asked for") == (name != "tensorfloat32" or platform == "gpu")


@pytest.mark.parametrize(("name", "near"), [("bfloat61", "bfloat16"), ("Float32", "float32"), ("tf32", "float32")])
def test_an_unknown_precision_is_named_with_its_neighbours(name, near):
    with pytest.raises(UserError, match=f"'{name}'.*{near}") as caught:
        precision.choose(name, "cpu")
    assert "\n" not in str(caught.value)


def test_cast_touches_floats_only():
    tree = {
        "w": jnp.ones((2,), jnp.float32),
        "half": jnp.ones((2,), jnp.float16),
        "n": jnp.int32(3),
        "on": jnp.array(True),
        "key": jax.random.key(0, impl="threefry2x32"),
        "z": jnp.complex64(1j),
        "none": None,
        "host": np.ones((2,), np.float64),
    }
    cast = precision.cast(tree, jnp.bfloat16)
    floats = {"w", "half", "host"}
    assert {name for name, leaf in cast.items() if leaf is not None and leaf.dtype == jnp.bfloat16} == floats
    assert all(cast[name] is tree[name] for name in tree.keys() - floats)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("name", [name for name in precision.NAMES if name != "auto"])
def test_scope_decides_whatever_was_set_before_and_leaves_no_trace(name, before):
    policy = precision.choose(name, "cpu")

    x = jnp.ones((2, 2), jnp.float32)

    def matmul_precision():
        return set(re.findall(r"Precision\.(\w+)", str(jax.make_jaxpr(lambda x: x @ x)(x))))

    with jax.enable_x64(before), jax.default_matmul_precision("high"):
        outside = matmul_precision(), jnp.ones(()).dtype
        with precision.scope(policy):
            inside = matmul_precision()
            assert jnp.ones(()).dtype == policy.param
        assert (matmul_precision(), jnp.ones(()).dtype) == outside
    with jax.default_matmul_precision(policy.matmul):
        assert inside == matmul_precision()


def test_float32_multiplies_in_float32():
    """Products of 1 + 2^-20 survive, which bfloat16 (2^-8) and TensorFloat-32 (2^-11) would round away."""
    with precision.scope(precision.choose("float32", "cpu")):
        x = jnp.full((8, 8), 1 + 2.0**-20, jnp.float32)
        assert float((x @ jnp.eye(8, dtype=jnp.float32) - 1).min()) == 2.0**-20


def test_float64_computes_in_float64():
    policy = precision.choose("float64", "cpu")
    with precision.scope(policy):
        params = precision.cast({"w": jnp.ones((3,), jnp.float32)}, policy.param)
        gradient = jax.jit(jax.grad(lambda p: jnp.sum(p["w"] ** 2) * (1 + 1e-12)))(params)["w"]
    assert gradient.dtype == jnp.float64
    np.testing.assert_allclose(gradient, 2 * (1 + 1e-12), rtol=1e-15)


def train(policy, steps, rate, slope):
    """A weight that plain SGD moves by `rate · slope` a step, under a policy as the train step applies it."""

    def loss(params, scaling):
        weight = precision.cast(params, policy.compute)["w"]
        out = precision.cast(jnp.sum(weight * jnp.asarray(slope, policy.compute)), policy.output)
        return precision.scale(out, scaling)

    @jax.jit
    def step(params, scaling):
        gradient = precision.unscale(jax.grad(loss)(params, scaling), scaling)
        finite = jnp.isfinite(gradient["w"])
        moved = params["w"] - jnp.asarray(rate, gradient["w"].dtype) * gradient["w"]
        return {"w": jnp.where(finite, moved, params["w"])}, precision.adjust(scaling, finite)

    params, scaling = {"w": jnp.ones((), policy.param)}, precision.init_loss_scale(policy)
    for _ in range(steps):
        params, scaling = step(params, scaling)
    return params, scaling


@pytest.mark.parametrize("name", [name for name in precision.NAMES if name != "auto"])
def test_small_updates_are_not_lost(name):
    """100 steps of 1e-3 from 1.0, half the spacing of bfloat16 there: moved by 0.1, stored in full."""
    policy = precision.choose(name, "cpu")
    with precision.scope(policy):
        params, _ = train(policy, steps=100, rate=1e-3, slope=1.0)
    assert params["w"].dtype == policy.param and params["w"].dtype != jnp.bfloat16
    assert 1 - float(params["w"]) == pytest.approx(0.1, abs=1e-3)


def test_gradients_below_float16_survive_by_the_scale():
    policy = precision.choose("float16", "cpu")
    tiny = 2.0**-30  # float16 ends at 2^-24

    def loss(w, scaling):
        return precision.scale(w.astype(jnp.float16).astype(jnp.float32) * jnp.float32(tiny), scaling)

    scaling = precision.init_loss_scale(policy)
    assert float(jax.grad(loss)(jnp.float32(1), ())) == 0
    assert float(precision.unscale(jax.grad(loss)(jnp.float32(1), scaling), scaling)) == tiny


@pytest.mark.parametrize("name", [name for name in precision.NAMES if name not in ("auto", "float16")])
def test_other_policies_have_no_scale(name):
    scaling = precision.init_loss_scale(precision.choose(name, "cpu"))
    loss, gradients = jnp.float32(2), {"w": jnp.float32(3)}
    assert scaling == () and jax.tree.leaves(scaling) == []
    assert precision.scale(loss, scaling) is loss and precision.unscale(gradients, scaling) is gradients
    assert precision.adjust(scaling, jnp.array(False)) == ()


def scales(finite, growth_interval=precision.GROWTH_INTERVAL):
    """The scale after each step, given which steps were finite."""
    start = precision.init_loss_scale(precision.choose("float16", "cpu"))

    def body(scaling, ok):
        after = precision.adjust(scaling, ok, growth_interval)
        return after, after.value

    last, values = jax.jit(lambda s, f: jax.lax.scan(body, s, f))(start, jnp.asarray(finite))
    assert (last.value.dtype, last.good_steps.dtype) == (jnp.float32, jnp.int32)
    return np.asarray(values)


@pytest.mark.parametrize("finite", [True, False])
def test_the_scale_runs_neither_to_infinity_nor_to_zero(finite):
    """Growth, or an overflow, at every one of 200 steps."""
    values = scales([finite] * 200, growth_interval=1)
    assert np.isfinite(values).all() and (values > 0).all()
    assert values[-1] == (precision.LARGEST_SCALE if finite else precision.SMALLEST_SCALE)
    assert (np.log2(values) == np.round(np.log2(values))).all()


def test_the_scale_grows_after_an_unbroken_run_of_good_steps():
    start = precision.INITIAL_SCALE
    values = scales([True, True, False, True, True, True, True, True, True], growth_interval=3)
    halved = start / 2
    np.testing.assert_array_equal(values, [start, start, *[halved] * 3, *[start] * 3, 2 * start])


def test_an_overflow_moves_no_parameter_and_halves_the_scale():
    policy = precision.choose("float16", "cpu")
    params, scaling = train(policy, steps=1, rate=1e-3, slope=60000.0)  # times the scale: beyond float16
    assert float(params["w"]) == 1 and float(scaling.value) == precision.INITIAL_SCALE / 2
    params, scaling = train(policy, steps=40, rate=1e-9, slope=60000.0)
    assert float(params["w"]) < 1 and float(scaling.value) <= 2  # found one that fits
