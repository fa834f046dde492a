"""Objects of a user's own: they take the place of the config's parts, and what does not fit is one line."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from jaxtrain import describe, train
from jaxtrain.errors import UserError
from jaxtrain.result import load
from jaxtrain.step import Steps, supervised


class Net(nnx.Module):
    """One hidden layer; `width` is the user's."""

    def __init__(self, width=8, *, num_classes, input_shape, rngs):
        self.hidden = nnx.Linear(int(np.prod(input_shape)), width, rngs=rngs)
        self.head = nnx.Linear(width, num_classes, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.hidden(x.reshape(x.shape[0], -1))))


class Seven(Net):
    """Answers for seven classes, whatever there are."""

    def __init__(self, *, input_shape, rngs):
        super().__init__(num_classes=7, input_shape=input_shape, rngs=rngs)


class NoRngs(nnx.Module):
    def __init__(self, num_classes):
        self.num_classes = num_classes


def run(total="3st", **objects):
    return train.run(tiny.config(total=total, report_every="2st", eval_every=""), data=tiny.data(), **objects)


def stepping(function):
    """A builder of the usual step with another `train`."""
    return lambda parts: dataclasses.replace(supervised(parts), train=function)


def moved(state, **changes):
    return dataclasses.replace(state, step=state.step + 1, **changes)


LOSS = {"loss": jnp.float32(1)}


@pytest.mark.parametrize(
    ("model", "width"),
    [
        (Net, 8),
        (functools.partial(Net, 4), 4),
        (functools.partial(Net, width=5), 5),
        (lambda rngs: Net(6, num_classes=10, input_shape=(8, 8, 1), rngs=rngs), 6),
    ],
    ids=["class", "partial", "partial by keyword", "function"],
)
def test_a_model_of_ones_own(model, width):
    job = train.build(tiny.config(), data=tiny.data(), model=model)
    assert job.abstract.params["hidden"]["kernel"].shape == (64, width)


def test_a_model_of_ones_own_trains():
    assert int(run(model=functools.partial(Net, width=5)).state.step) == 3


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Seven, r"outputs are \[16, 7\], expected \[batch, 10\]"),
        (NoRngs, "NoRngs: its __init__ has no argument `rngs`"),
        (functools.partial(Net, num_classes=3), r"\[16, 3\], expected \[batch, 10\]"),
        (lambda rngs: 5, "is no flax.nnx.Module"),
        (Net(num_classes=10, input_shape=(8, 8, 1), rngs=nnx.Rngs(0)), "Net is an object; give its class"),
        (5, "makes a int; expected .* a Model, a pair"),
    ],
)
def test_a_model_that_does_not_fit(model, said):
    with pytest.raises(UserError, match=said):
        run(model=model)


def test_a_step_of_ones_own_trains_saves_resumes_and_loads(tmp_path):
    def slope(parts, rate):
        def train_step(state, batch):
            state, metrics = supervised(parts).train(state, batch)
            return state, metrics | {"rate": jnp.float32(rate)}

        return dataclasses.replace(supervised(parts), train=train_step)

    step = functools.partial(slope, rate=0.25)
    through = run("9st", step=step)
    config = tiny.config(total="4st", report_every="2st", eval_every="")
    train.run(config, tmp_path, data=tiny.data(), step=step)
    config.total = "9st"
    resumed = train.run(config, tmp_path, data=tiny.data(), step=step)
    for a, b in zip(jax.tree.leaves(through.params), jax.tree.leaves(resumed.params), strict=True):
        np.testing.assert_array_equal(a, b)
    assert {row["train/rate"] for row in resumed.history if "train/rate" in row} == {0.25}
    with pytest.raises(UserError, match=r"was given step as objects; load\(workdir, step=…\)"):
        load(tmp_path)
    assert int(load(tmp_path, step=step).state.step) == 9


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda: None, r"cannot be called as step\(parts\).*functools.partial"),
        (lambda parts, rate: None, "missing a required argument: 'rate'"),
        (lambda parts: None, "returned NoneType, expected jaxtrain.step.Steps"),
        (5, "the step is int, which cannot be called"),
        ("supervisd", "Did you mean 'supervised'"),
        (lambda parts: Steps(init=lambda key: {"w": jnp.zeros(3)}, train=lambda s, b: (s, LOSS)), "has no `step`"),
        (stepping(lambda state, batch: moved(state)), r"returned TrainState, expected the pair \(state, metrics\)"),
        (stepping(lambda state, batch: (moved(state), {})), "returned .TrainState, an empty dict."),
        (stepping(lambda state, batch: (moved(state), {"loss": jnp.zeros(3)})), r"float32\[3\], expected a real"),
        (stepping(lambda state, batch: (state.params, LOSS)), "a dict, expected a TrainState"),
        (stepping(lambda state, batch: (moved(state, params={}), LOSS)), "params/head/bias is missing"),
        (stepping(lambda state, batch: (moved(state, ema=batch["id"]), LOSS)), "ema is new"),
        (
            stepping(lambda s, b: (moved(s, params=jax.tree.map(lambda x: x.astype("bfloat16"), s.params)), LOSS)),
            r"params/head/bias is bfloat16\[10\], expected float32\[10\]",
        ),
        (stepping(lambda state, batch: (state, LOSS)), "after step 3 .* has step=0; .* one higher"),
    ],
)
def test_a_step_that_breaks_the_contract(step, said):
    with pytest.raises(UserError, match=said):
        run(step=step)


def test_a_step_without_evaluation_and_prediction():
    result = run(step=lambda parts: Steps(init=supervised(parts).init, train=supervised(parts).train))
    assert int(result.state.step) == 3 and not any(name.startswith(("eval", "test")) for name in result.metrics)
    with pytest.raises(UserError, match="step <lambda> brings no predict function"):
        result.predict(np.zeros((1, 8, 8, 1), np.uint8))


def test_the_header_names_what_runs_and_not_what_the_config_says():
    job = train.build(tiny.config(), data=tiny.data(), model=Net, step=stepping(None))
    shown = dict(describe.facts(job, None).rows())
    assert shown["model"] == "Net, given as an object"
    assert any("step <lambda>, given as an object" in note for note in describe.facts(job, None).notes)


def used_up(job):
    state = job.initial()
    with job.batches(0, 1) as batches:
        job.step(state, next(batches))
    return state


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (lambda job: job.initial().params, "a dict, expected a TrainState"),
        (lambda job: run(), "a Result, expected a TrainState"),
        (lambda job: run(model=Net).state, "layers/0/bias is missing"),
        (used_up, "used up: a step donates"),
    ],
)
def test_a_state_that_does_not_fit(state, said):
    with pytest.raises(UserError, match=said):
        run(state=state(train.build(tiny.config(), data=tiny.data())))


PICTURES = np.zeros((3, 8, 8, 1), np.uint8)


@pytest.fixture(scope="module")
def trained():
    return run()


@pytest.mark.parametrize(
    "inputs",
    [
        PICTURES,
        PICTURES[..., 0],
        list(PICTURES),
        jnp.asarray(PICTURES),
        {"image": PICTURES},
        {"image": PICTURES, "label": np.zeros(3, np.int64)},
        PICTURES.astype(np.float32),
        PICTURES.astype(np.float64),
    ],
)
def test_predict_takes(inputs, trained):
    assert np.array_equal(trained.predict(inputs)["label"], trained.predict(PICTURES)["label"])


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (np.zeros((3, 28, 28, 1), np.uint8), r"image is \[3, 28, 28, 1\], expected \[N, 8, 8, 1\]"),
        (PICTURES[0], r"image is \[8, 8, 1\], expected \[N, 8, 8, 1\]"),
        (PICTURES[:0], "0 examples"),
        (PICTURES + np.float32(200), r"float32 from 200 to 200; expected uint8.*or floats in \[0, 1\]"),
        (PICTURES + np.float32("nan"), r"from nan to nan"),
        (PICTURES.astype(np.int64), "images are int64"),
        ({"picture": PICTURES}, "named picture; this model learnt from image, label"),
    ],
)
def test_predict_refuses(inputs, said, trained):
    with pytest.raises(UserError, match=said):
        trained.predict(inputs)
