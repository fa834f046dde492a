"""Metrics are monoids: any grouping gives the same, padding does not exist, counts are exact."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain import metrics
from jaxtrain.errors import UserError
from jaxtrain.metrics import Count, Last, Mean


def f32(*values):
    return jnp.asarray(values, jnp.float32)


MONOIDS = {
    "mean": [Mean.of(f32(1, 2, 3)), Mean.of(f32(10)), Mean.of(f32(4, 5), jnp.array([True, False]))],
    "count": [
        Count.of(jnp.array([True, False])),
        Count.of(jnp.ones((7,), bool)),
        Count.of(jnp.zeros((2,), bool)),
    ],
    "last": [Last(jnp.float32(3)), Last(jnp.float32(-1)), Last(jnp.float32(2))],
    "last_int": [Last(jnp.int32(2**30 + 1)), Last(jnp.int32(5)), Last(jnp.int32(2**30 + 3))],
}
every = pytest.mark.parametrize("name", MONOIDS)


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


@every
def test_the_laws(name):
    a, b, c = MONOIDS[name]
    same(a.merge(b).merge(c), a.merge(b.merge(c)))
    zero = metrics.empty(a)
    for one in (zero.merge(a), a.merge(zero)):
        assert one.compute() == a.compute()


@every
def test_the_identity_comes_from_shapes_alone_and_loops_without_change_of_type(name):
    values = MONOIDS[name]
    shapes = jax.eval_shape(lambda: {"it": values[0]})
    start = metrics.empty(shapes)

    @functools.partial(jax.jit, donate_argnums=0)
    def run(total):
        def body(total, each):
            return metrics.merge(total, {"it": each}), None

        return jax.lax.scan(body, total, jax.tree.map(lambda *each: jnp.stack(each), *values))[0]

    wanted = functools.reduce(lambda a, b: a.merge(b), values).compute()
    assert metrics.compute(run(start)) == {"it": wanted}


@every
def test_nothing_yet_is_nan_or_zero_and_never_a_division(name):
    value = metrics.compute({"it": metrics.empty(MONOIDS[name][0])})["it"]
    assert value == 0 if name == "count" else math.isnan(value)


@every
def test_computed_values_are_pythons(name):
    value = metrics.compute({"it": MONOIDS[name][0]})["it"]
    assert type(value) is (int if name in ("count", "last_int") else float)
    assert json.loads(json.dumps(value)) == value


@pytest.mark.parametrize("batch", [1, 7, 16, 17, 64])
def test_a_mean_is_of_examples_not_of_batches(batch):
    """17 values, the last one huge, in batches that are filled up: total / 17."""
    values = np.ones(17, np.float32)
    values[-1] = 1000
    total = metrics.empty(Mean.of(f32(0)))
    for start in range(0, 17, batch):
        rows = np.arange(start, start + batch)
        mask = rows < 17
        padded = np.where(mask, values[np.minimum(rows, 16)], np.nan)
        total = total.merge(Mean.of(jnp.asarray(padded, jnp.float32), jnp.asarray(mask)))
    assert int(total.count) == 17 and total.compute() == pytest.approx(1016 / 17)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_masked_values_do_not_exist_in_value_or_gradient(poison):
    mask = jnp.array([True, False, True])

    def total(x):
        return Mean.of(jnp.where(mask, x, poison) * x, mask).total

    value, gradient = jax.value_and_grad(total)(f32(2, 3, 4))
    assert value == 20
    np.testing.assert_array_equal(gradient[np.array([0, 2])], f32(4, 8))


def test_a_nan_that_counts_shows():
    assert math.isnan(Mean.of(f32(1, np.nan)).compute())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.int32, jnp.bool_])
def test_sums_are_float32_and_counts_int32_whatever_comes(dtype):
    """1,000 ones in a half precision: sum and count are 1,000, where a bfloat16 counter stops at 256."""
    one = Mean.of(jnp.ones((1,), dtype))
    total = jax.lax.fori_loop(0, 1000, lambda _, total: total.merge(one), metrics.empty(one))
    assert (total.total.dtype, total.count.dtype) == (jnp.float32, jnp.int32)
    assert (float(total.total), int(total.count), total.compute()) == (1000, 1000, 1)


def test_types_stay_in_float64_scope():
    with jax.enable_x64(True):
        made = {
            "mean": Mean.of(jnp.ones((3,)), jnp.ones((3,), bool)),
            "count": Count.of(jnp.ones((3,), bool)),
        }
    assert [str(leaf.dtype) for leaf in jax.tree.leaves(made)] == ["int32", "float32", "int32"]


def test_a_mask_of_another_shape_is_no_mask():
    with pytest.raises(ValueError, match="differ in shape"):
        Mean.of(jnp.ones((3,)), jnp.ones((1,), bool))


def test_values_spread_over_eight_devices():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    values = jax.device_put(jnp.arange(16, dtype=jnp.float32), rows)
    mask = jax.device_put(jnp.arange(16) < 13, rows)
    made = jax.jit(lambda v, m: {"mean": Mean.of(v, m), "examples": Count.of(m)})(values, mask)
    assert metrics.compute(made) == {"mean": 6.0, "examples": 13}


@pytest.mark.parametrize("value", [jnp.float32(2), jnp.int32(2), jnp.bfloat16(2), np.float64(2), 2, 2.0, True])
def test_a_scalar_of_a_users_step_is_averaged_over_the_steps(value):
    made = jax.jit(lambda: metrics.as_monoids({"g_loss": value}))()
    twice = metrics.merge(made, metrics.as_monoids({"g_loss": jnp.float32(float(value) + 1)}))
    assert metrics.compute(twice) == {"g_loss": float(value) + 0.5}


def test_a_monoid_of_a_users_step_is_left_alone():
    mine = {"seen": Count.of(jnp.ones((3,), bool)), "rate": Last(jnp.float32(0.5))}
    assert metrics.as_monoids(mine) == mine


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (jnp.ones((4,)), r"'per_row' is float32\[4\].*Mean.of"),
        (jnp.complex64(1j), "'per_row' is complex64"),
        ("high", "'per_row' is str"),
        (None, "'per_row' is NoneType"),
        ({"a": 1.0}, "'per_row' is dict"),
    ],
)
def test_what_is_no_metric_is_named(value, words):
    with pytest.raises(UserError, match=words):
        metrics.as_monoids({"per_row": value})


def test_trees_that_differ_do_not_merge():
    with pytest.raises(ValueError):
        metrics.merge({"a": Last(jnp.float32(1))}, {"b": Last(jnp.float32(1))})
