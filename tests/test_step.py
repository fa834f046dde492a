"""The step: gradients of the global batch, whatever cuts it up; streams; precision; what is left out and what not."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxtrain import train
from jaxtrain.data import sources
from jaxtrain.errors import UserError
from jaxtrain.metrics import compute

LINEAR, DROPOUT = dict(name="nets:Linear"), dict(name="nets:Dropout")


def advanced(steps=5, batches=None, **changes):
    """(state, metrics of the last step) after some steps."""
    job = train.build(tiny.config(**changes), data=tiny.data())
    state, metrics = job.initial(), {}
    with job.batches(0, steps) as feed:
        for batch in batches(job) if batches else feed:
            state, metrics = job.step(state, batch)
    return jax.device_get((dataclasses.replace(state, key=()), compute(metrics)))


def close(a, b, **tolerance):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, **tolerance)


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize(
    "model",
    [LINEAR, dict(name="mlp", hidden=(16,)), DROPOUT, pytest.param(dict(name="cnn", width=4), marks=pytest.mark.slow)],
    ids=lambda model: model["name"],
)
def test_devices_do_not_change_the_result(model, devices):
    """Report 11: plain SGD; gradient norm and parameters agree. BatchNorm's statistics are those of the whole batch."""
    sgd = dict(name="sgd", learning_rate=0.1)
    one, one_metrics = advanced(model=model, devices=1, optimizer=sgd)
    many, metrics = advanced(model=model, devices=devices, optimizer=sgd)
    close(one.params, many.params, rtol=1e-4, atol=1e-5)
    close(one.model_state, many.model_state, rtol=1e-4, atol=1e-5)
    assert metrics["grad_norm"] == pytest.approx(one_metrics["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("accumulate", [2, 4])
@pytest.mark.parametrize("devices", [1, 2])
def test_accumulation_equals_the_large_batch(accumulate, devices):
    """Without batch statistics, clipping and the rate of the schedule included (reports 19 and 31)."""
    changes = dict(model=LINEAR, devices=devices, clip_norm=0.1, schedule=dict(name="cosine", warmup="4st"))
    whole, whole_metrics = advanced(**changes)
    parts, metrics = advanced(**changes, accumulate=accumulate)
    close(whole.params, parts.params, rtol=1e-5, atol=1e-6)
    for name in ("loss", "accuracy", "grad_norm", "learning_rate"):
        assert metrics[name] == pytest.approx(whole_metrics[name], rel=1e-5)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_rows_weigh_the_same_wherever_they_lie(accumulate, devices):
    """Report 10: 7 valid rows in one half and 1 in the other."""

    def uneven(job):
        with job.batches(0, 3) as feed:
            for batch in feed:
                mask = np.array([True] * 7 + [False] + [True] + [False] * 7)
                yield dict(batch, mask=jax.device_put(mask, batch["id"].sharding))

    def only_valid(job):
        with job.batches(0, 3) as feed:
            for batch in feed:
                keep = np.array([*range(7), 8])
                rows = {name: np.asarray(value)[keep] for name, value in batch.items()}
                yield {name: jax.device_put(value, batch["id"].sharding) for name, value in rows.items()}

    expected, _ = advanced(batches=only_valid, model=LINEAR, devices=1)
    found, _ = advanced(batches=uneven, model=LINEAR, devices=devices, accumulate=accumulate)
    close(expected.params, found.params, rtol=1e-5, atol=1e-6)


def test_dropout_differs_between_rows_and_steps_and_not_between_runs():
    """Report 13."""
    job = train.build(tiny.config(model=DROPOUT), data=tiny.data())
    state = job.initial()
    image = jnp.ones((16, 8, 8, 1), jnp.float32)

    def outputs(state):
        key = state.stream("dropout")
        return job.parts.model.apply(state.params, state.model_state, image, key=key, train=True)[0]

    first, again = outputs(state), outputs(state)
    later = outputs(dataclasses.replace(state, step=state.step + 1))
    assert (first == again).all()
    assert not np.allclose(first, later) and not np.allclose(first[:8], first[8:])


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "tensorfloat32", "float64"])
def test_parameters_are_stored_as_the_policy_says_and_learn(name):
    """Report 21: in every precision parameters, moments and averages are stored in full."""
    stored = np.float64 if name == "float64" else np.float32
    state, metrics = advanced(
        steps=12, precision=name, model=DROPOUT, ema=0.9, optimizer=dict(name="adamw", learning_rate=0.01)
    )
    for leaf in jax.tree.leaves((state.params, state.opt_state, state.ema)):
        assert leaf.dtype == stored or not np.issubdtype(leaf.dtype, np.floating)
    assert np.isfinite(metrics["loss"])


def test_small_updates_are_not_lost_in_bfloat16():
    """Report 21: 100 steps of 1e-3 move a weight of 1 by 0.1, where bfloat16 alone would not move it at all."""
    image, label = np.full((64, 8, 8, 1), 200, np.uint8), np.zeros((64,), np.int32)
    data = sources.from_arrays(image, label, validation=0, test=0, num_classes=10)
    sign = dict(name="sign_sgd", learning_rate=1e-3)
    config = tiny.config(model=dict(name="nets:Scalar"), optimizer=sign, precision="bfloat16", total="100st")
    kernel = np.asarray(train.run(config, data=data).params["kernel"])
    assert kernel.dtype == np.float32 and abs(kernel[0, 0] - 1.1) < 1e-3


def test_the_loss_scale_stays_finite_and_an_overflow_changes_nothing():
    """Report 34."""
    job = train.build(tiny.config(precision="float16", model=LINEAR), data=tiny.data())
    state = job.initial()
    huge = dataclasses.replace(
        state.loss_scale, value=jax.device_put(np.float32(2.0**24), state.loss_scale.value.sharding)
    )
    state = dataclasses.replace(state, loss_scale=huge, params=jax.tree.map(lambda leaf: leaf * 100, state.params))
    before = jax.device_get((state.params, state.opt_state))
    with job.batches(0, 1) as feed:
        after, metrics = job.step(state, next(feed))
    assert int(after.step) == 1 and float(after.loss_scale.value) == 2.0**23
    close(before, (after.params, after.opt_state), rtol=0, atol=0)
    assert int(after.skipped) == 0  # a smaller scale mends it: that is no fault
    assert compute(metrics)["learning_rate"] == pytest.approx(0.05)


def test_augmentation_is_drawn_anew_each_epoch_and_evaluation_has_none():
    """Report 24."""
    from jaxtrain.step import prepare

    augment = (dict(name="flip"), dict(name="crop", padding=2))
    job = train.build(tiny.config(augment=augment), data=tiny.data(train=16))
    seen: dict[int, set[bytes]] = {}
    runs = []
    for _ in range(2):
        state, pictures = job.initial(), []
        with job.batches(0, 4) as feed:
            for batch in feed:
                ready = jax.jit(lambda s, b: prepare(b, job.parts, s))(state, batch)
                for number, picture in zip(np.asarray(batch["id"]), np.asarray(ready["image"]), strict=True):
                    seen.setdefault(int(number), set()).add(picture.tobytes())
                    pictures.append(picture)
                plain = prepare(batch, job.parts)["image"]
                np.testing.assert_allclose(plain, np.asarray(batch["image"], np.float32) / 255, atol=1e-7)
                state, _ = job.step(state, batch)
        runs.append(np.stack(pictures))
    assert sum(len(found) >= 2 for found in seen.values()) >= 0.9 * 16
    np.testing.assert_array_equal(*runs)


def test_mixed_labels_train():
    _, metrics = advanced(augment=(dict(name="mixup"),), model=LINEAR)
    assert np.isfinite(metrics["loss"])


def test_the_training_loss_is_the_smoothed_one():
    """Report 30: (1−ε)·CE + ε·mean(−log p), at zero weights ln 10 either way, afterwards not."""
    plain, _ = advanced(steps=5, model=LINEAR)
    job = train.build(
        tiny.config(model=LINEAR, task=dict(name="classification", label_smoothing=0.2)), data=tiny.data()
    )
    with job.batches(0, 1) as feed:
        batch = next(feed)
    state = dataclasses.replace(job.initial(), params=plain.params)
    outputs = job.parts.model.apply(
        plain.params, {}, jnp.asarray(batch["image"], jnp.float32) / 255, key=None, train=False
    )[0]
    log_p = np.asarray(jax.nn.log_softmax(outputs))
    cross = -log_p[np.arange(16), np.asarray(batch["label"])]
    expected = (0.8 * cross + 0.2 * -log_p.mean(axis=1)).mean()
    assert compute(job.step(state, batch)[1])["loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("batch", "devices", "accumulate"), [(20, 8, 1), (16, 8, 4), (12, 2, 4)])
def test_a_batch_that_does_not_divide_is_refused(batch, devices, accumulate):
    with pytest.raises(UserError, match=f"batch_size is {batch}|accumulate is {accumulate}"):
        train.build(tiny.config(batch_size=batch, devices=devices, accumulate=accumulate), data=tiny.data())


def test_sharded_parameters_train_like_replicated_ones():
    rules = ((r"/layers/0/kernel$", (None, "data")),)
    changes = dict(model=dict(name="mlp", hidden=(16,)), optimizer=dict(name="adamw", learning_rate=0.01))
    plain, _ = advanced(**changes)
    job = train.build(tiny.config(**changes, sharding_rules=rules), data=tiny.data())
    state = job.initial()
    kernel = state.params["layers"]["0"]["kernel"]
    moment = state.opt_state[0].mu["layers"]["0"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (64, 2) == moment.addressable_shards[0].data.shape
    with job.batches(0, 5) as feed:
        for batch in feed:
            state, _ = job.step(state, batch)
    close(plain.params, state.params, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("rule", "named"),
    [
        (("nothing", (None, "data")), "matches no array"),
        (("kernel$", (None, "model")), "'model'"),
        (("head/kernel$", (None, "data")), "does not divide"),
    ],
)
def test_a_sharding_rule_that_cannot_hold_is_refused(rule, named):
    with pytest.raises(UserError, match=named):
        train.build(tiny.config(sharding_rules=(rule,)), data=tiny.data())


@pytest.mark.parametrize("accumulate", [1, 4])
def test_each_update_moves_by_the_logged_learning_rate(accumulate):
    """Report 19: 40 steps, warm-up 10, cosine to 0, a gradient of constant sign, whatever the accumulation."""
    image, label = np.full((64, 8, 8, 1), 200, np.uint8), np.zeros((64,), np.int32)
    data = sources.from_arrays(image, label, validation=0, test=0, num_classes=10)
    config = tiny.config(
        model=dict(name="nets:Scalar"),
        optimizer=dict(name="sign_sgd", learning_rate=0.01),
        schedule=dict(name="cosine", warmup="10st"),
        total="40st",
        accumulate=accumulate,
        devices=2,
    )
    job = train.build(config, data=data)
    state, weights, rates = job.initial(), [1.0], []
    with job.batches(0, 40) as feed:
        for batch in feed:
            state, metrics = job.step(state, batch)
            weights.append(float(state.params["kernel"][0, 0]))
            rates.append(compute(metrics)["learning_rate"])
    np.testing.assert_allclose(np.diff(weights), rates, atol=1e-6)
    assert rates[0] == 0 and max(rates) == rates[10] == pytest.approx(0.01) and rates[-1] < 1e-4


def test_clipping_is_of_the_whole_gradient_and_the_norm_logged_is_that_before_it():
    """Report 31: micro-batches with gradients that cancel are clipped once, together."""
    whole, whole_metrics = advanced(model=LINEAR, devices=1, clip_norm=0.05, steps=3)
    parts, metrics = advanced(model=LINEAR, devices=1, clip_norm=0.05, steps=3, accumulate=16)
    close(whole.params, parts.params, rtol=1e-5, atol=1e-6)
    assert metrics["grad_norm"] == pytest.approx(whole_metrics["grad_norm"], rel=1e-5) and metrics["grad_norm"] > 0.05
