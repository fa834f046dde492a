"""Schedules: their values by hand, optax's where it has the same one, and the mistakes one can make."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain.config import lookup
from jaxtrain.config.durations import parse_duration
from jaxtrain.errors import UserError

TOTAL = 40


def steps_of(duration):
    return parse_duration(duration).steps(batch_size=10, examples=100)  # 10 steps an epoch


def build(name, total=TOTAL, **options):
    part = {"name": name, **options}
    return lookup.build(part, lookup.SCHEDULES, "schedule", total_steps=total, steps_of=steps_of)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("constant", {}, {0: 1, 39: 1, 40: 1, 1000: 1}),
        ("constant", {"warmup": "1ep"}, {0: 0, 1: 0.1, 9: 0.9, 10: 1, 40: 1}),
        ("constant", {"warmup": "40st"}, {0: 0, 20: 0.5, 39: 39 / 40, 40: 1}),
        ("constant", {"warmup": "25ex"}, {0: 0, 1: 0.4, 2: 0.8, 3: 1}),
        ("constant", {"warmup": "1ex"}, {0: 0, 1: 1}),
        ("constant", {"warmup": 0.25}, {0: 0, 5: 0.5, 10: 1}),
        ("cosine", {}, {0: 1, 20: 0.5, 40: 0, 100: 0}),
        ("cosine", {"warmup": "10st"}, {0: 0, 5: 0.5, 10: 1, 25: 0.5, 40: 0}),
        ("cosine", {"final": 0.1}, {0: 1, 20: 0.55, 40: 0.1, 41: 0.1}),
        ("cosine", {"warmup": "4ep"}, {0: 0, 20: 0.5, 40: 1}),
        ("linear", {}, {0: 1, 10: 0.75, 39: 1 / 40, 40: 0, 50: 0}),
        ("linear", {"final": 0.2, "warmup": "20st"}, {0: 0, 10: 0.5, 20: 1, 30: 0.6, 40: 0.2}),
        ("rsqrt", {"timescale": "10st"}, {0: 1, 30: 0.5, 40: 5**-0.5}),
        ("rsqrt", {"timescale": "1ep", "warmup": "10st"}, {0: 0, 10: 1, 40: 0.5}),
        ("step", {}, {0: 1, 19: 1, 20: 0.1, 29: 0.1, 30: 0.01, 40: 0.01}),
        ("step", {"boundaries": ("1ep", 0.5), "factor": 0.5}, {9: 1, 10: 0.5, 19: 0.5, 20: 0.25}),
        ("step", {"boundaries": ("15st",), "factor": 0.5, "warmup": "10st"}, {0: 0, 10: 1, 14: 1, 15: 0.5}),
        ("step", {"boundaries": ()}, {0: 1, 40: 1}),
        (
            "one_cycle",
            {"warmup": "10st", "start": 0.2, "final": 0.1, "curve": "linear"},
            {0: 0.2, 5: 0.6, 10: 1, 25: 0.55, 40: 0.1, 50: 0.1},
        ),
        (
            "one_cycle",
            {"warmup": "2ep", "start": 0.2, "final": 0.0},
            {0: 0.2, 10: 0.6, 20: 1, 30: 0.5, 40: 0},
        ),
        ("one_cycle", {"warmup": "0st", "final": 0.0}, {0: 1, 20: 0.5, 40: 0}),
        ("one_cycle", {"warmup": "4ep", "start": 0.0, "curve": "linear"}, {0: 0, 20: 0.5, 40: 1}),
    ],
)
def test_values(name, options, expected):
    values = build(name, **options)(np.asarray(list(expected), np.int32))
    np.testing.assert_allclose(values, list(expected.values()), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "options", "optaxs"),
    [
        ("cosine", {"warmup": "10st"}, optax.warmup_cosine_decay_schedule(0.0, 1.0, 10, TOTAL)),
        ("cosine", {"final": 0.3}, optax.cosine_decay_schedule(1.0, TOTAL, alpha=0.3)),
        ("linear", {"final": 0.1}, optax.linear_schedule(1.0, 0.1, TOTAL)),
        ("step", {}, optax.piecewise_constant_schedule(1.0, {20: 0.1, 30: 0.1})),
        ("one_cycle", {}, optax.cosine_onecycle_schedule(TOTAL, 1.0, pct_start=0.3, final_div_factor=1e4)),
    ],
)
def test_equals_optax(name, options, optaxs):
    steps = [*range(TOTAL), TOTAL + 5]
    ours = build(name, **options)(np.asarray(steps, np.int32))
    np.testing.assert_allclose(ours, [optaxs(step) for step in steps], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", lookup.SCHEDULES)
@pytest.mark.parametrize("warmup", ["0st", "7st", "0.33ep"])
def test_is_a_strict_function_of_the_step(name, warmup):
    shape = build(name, warmup=warmup)
    steps = np.asarray([0, 1, 3, 4, 7, 39, 40, 41, 2**31 - 1], np.int32)
    with jax.numpy_dtype_promotion("strict"), jax.transfer_guard("disallow"):
        jitted = jax.jit(shape)
        one_by_one = [jitted(jax.device_put(step)) for step in steps]
        all_at_once = jitted(jax.device_put(steps))
    assert {value.dtype for value in one_by_one} == {all_at_once.dtype} == {jnp.dtype(jnp.float32)}
    assert [value.shape for value in one_by_one] == [()] * len(steps)
    np.testing.assert_allclose(one_by_one, all_at_once, rtol=1e-6)
    np.testing.assert_allclose([shape(int(step)) for step in steps], all_at_once, rtol=1e-6)
    assert np.all((np.asarray(all_at_once) >= 0) & (np.asarray(all_at_once) <= 1))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("cosine", {"warmup": "5ep"}, ["warmup '5ep'", "50 steps", "run of 40"]),
        ("one_cycle", {"warmup": "41st"}, ["warmup '41st'", "run of 40"]),
        ("cosine", {"warmup": "10"}, ["'10'"]),
        ("cosine", {"warmup": 10}, ["warmup", "10", "'500st'"]),
        ("cosine", {"warmup": -0.1}, ["warmup", "-0.1"]),
        ("cosine", {"final": -1.0}, ["final", "-1"]),
        ("linear", {"final": "x"}, ["final", "'x'"]),
        ("cosine", {"finale": 0.1}, ["finale", "Did you mean 'final'"]),
        ("cosine", {"total_steps": 3}, ["total_steps"]),
        ("cosin", {}, ["cosin", "Did you mean 'cosine'"]),
        ("rsqrt", {"timescale": "0st"}, ["timescale", "0st"]),
        ("step", {"boundaries": ("20st", "20st")}, ["boundaries", "20, 20", "increase"]),
        ("step", {"boundaries": ("2ep", "15st")}, ["boundaries", "20, 15"]),
        ("step", {"boundaries": ("40st",)}, ["boundaries", "40"]),
        ("step", {"boundaries": ("5st",), "warmup": "10st"}, ["boundaries", "warm-up, 10"]),
        ("step", {"boundaries": "20st"}, ["boundaries", "20st"]),
        ("step", {"factor": -0.5}, ["factor", "-0.5"]),
        ("one_cycle", {"curve": "cubic"}, ["curve", "cubic", "linear"]),
    ],
)
def test_mistakes_are_one_line(name, options, words):
    with pytest.raises(UserError) as caught:
        build(name, **options)
    text = str(caught.value)
    assert "\n" not in text
    assert [word for word in words if word not in text] == []
