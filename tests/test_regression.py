"""Regression: losses and R² by their formulas, merged exactly, trained to a line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxtrain import metrics, train
from jaxtrain.data import sources
from jaxtrain.errors import UserError
from jaxtrain.tasks.regression import R2, Regression

D = 3


def made(size=16, offset=0.0, seed=0):
    rng = np.random.default_rng(seed)
    target = (offset + rng.standard_normal((size, D))).astype(np.float32)
    return target + rng.standard_normal((size, D)).astype(np.float32), target


@pytest.mark.parametrize(
    ("options", "formula"),
    [
        (dict(loss="mse"), lambda e: e**2),
        (dict(loss="mae"), np.abs),
        (dict(loss="huber"), lambda e: np.where(np.abs(e) <= 1, e**2 / 2, np.abs(e) - 0.5)),
        (dict(loss="huber", delta=0.3), lambda e: np.where(np.abs(e) <= 0.3, e**2 / 2, 0.3 * (np.abs(e) - 0.15))),
    ],
)
def test_losses_and_metrics_are_those_of_the_formulas(options, formula):
    task = Regression(num_outputs=D, **options)
    outputs, target = made()
    error = outputs.astype(np.float64) - target
    mask = np.arange(16) < 11
    losses = jax.jit(task.losses)(outputs.astype(jnp.bfloat16), {"target": target})
    assert (losses.shape, losses.dtype) == ((16,), jnp.float32)
    np.testing.assert_allclose(task.losses(outputs, {"target": target}), formula(error).mean(axis=1), rtol=1e-5)
    outputs[~mask] = np.nan
    found = metrics.compute(jax.jit(task.metrics)(outputs, {"target": target}, mask))
    error, target = error[mask], target[mask].astype(np.float64)
    assert found["loss"] == pytest.approx(formula(error).mean(), rel=1e-5)
    assert found["mse"] == pytest.approx((error**2).mean(), rel=1e-5)
    assert found["mae"] == pytest.approx(np.abs(error).mean(), rel=1e-5)
    r2 = 1 - (error**2).sum(axis=0) / ((target - target.mean(axis=0)) ** 2).sum(axis=0)
    assert found["r2"] == pytest.approx(r2.mean(), rel=1e-5)


@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_r2_merges_exactly_in_any_grouping(offset):
    """A mean far from 0, in float32: the square of a sum would leave no digits of the spread."""
    outputs, target = made(37, offset)
    error, wide = (outputs - target).astype(np.float64), target.astype(np.float64)
    wanted = np.mean(1 - (error**2).sum(axis=0) / ((wide - wide.mean(axis=0)) ** 2).sum(axis=0))
    of, merge = jax.jit(R2.of), jax.jit(metrics.merge)
    for cuts in ([], [12, 24, 36], list(range(1, 37))):
        total = metrics.empty(of(outputs - target, target, np.ones(37, bool)))
        for rows in np.split(np.arange(37), cuts):
            total = merge(total, of((outputs - target)[rows], target[rows], np.ones(len(rows), bool)))
        assert jax.device_get(total).compute() == pytest.approx(wanted, abs=1e-4)


def test_r2_of_what_does_not_vary_is_no_number():
    constant = np.ones((4, 1), np.float32)
    assert np.isnan(jax.device_get(R2.of(constant, constant, np.ones(4, bool))).compute())
    assert np.isnan(jax.device_get(R2.of(constant, constant, np.zeros(4, bool))).compute())


def test_a_run_learns_a_line_and_the_model_has_as_many_outputs_as_the_task():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((200, 5)).astype(np.float32)
    data = {"image": x, "target": x @ np.array([[1, 2], [0, 1], [1, 0], [-1, 1], [2, 2]], np.float32)}
    task = dict(name="regression", num_outputs=2, loss="huber")
    config = tiny.config(task=task, model=dict(name="mlp", hidden=()), total="100st", best="r2")
    config.report_every = config.eval_every = "50st"
    result = train.run(config, data=sources.from_arrays(data))
    assert result.metrics["test/r2"] > 0.99
    assert result.predict({"image": x[:3], "target": data["target"][:3]})["value"].shape == (3, 2)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (
            {"target": np.array([[0, 1, np.nan], [0, 0, 0], [np.inf, 0, 0]]), "id": np.array([4, 5, 6])},
            "example 4, 6 is",
        ),
        ({"target": np.zeros((2, 2))}, r"\[B, 3\].*float64\[2, 2\]"),
        ({"label": np.zeros((2,), np.int32)}, "needs batch"),
    ],
)
def test_host_batches_that_cannot_be_learnt_from_are_refused(batch, words):
    with pytest.raises(UserError, match=words):
        Regression(num_outputs=D).check(batch)
    Regression(num_outputs=D).check({"target": np.full((2, D), np.nan), "mask": np.zeros(2, bool)})
    Regression().check({"target": np.zeros((2,))})


@pytest.mark.parametrize("options", [dict(num_outputs=0), dict(loss="mes"), dict(delta=0.0), dict(delta=float("nan"))])
def test_bad_options_are_refused(options):
    with pytest.raises(UserError, match="regression: "):
        Regression(**options)


def test_outputs_of_another_shape_are_refused_when_traced():
    with pytest.raises(UserError, match=r"expected \[batch, 1\]"):
        jax.eval_shape(Regression().losses, jnp.zeros((4, 2)), {"target": jnp.zeros((4,))})
