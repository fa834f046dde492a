"""Test-time augmentation: which views, their weights, and what evaluation and prediction make of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxtrain import train, views
from jaxtrain.errors import UserError

IMAGE = np.random.default_rng(0).normal(size=(8, 6, 5, 3)).astype(np.float32)


def seen(builder, image=IMAGE):
    return [(weight, np.asarray(view["image"])) for weight, view in builder({"image": jnp.asarray(image)})]


def shifted(image, step):
    """Moved by `step` rows and columns, reflected at the edges, pixel by pixel."""
    height, width = image.shape[1:3]
    rows, columns = (
        [min(abs(i - step), 2 * (size - 1) - abs(i - step)) for i in range(size)] for size in (height, width)
    )
    return image[:, rows][:, :, columns]


@pytest.mark.parametrize(
    ("builder", "wanted"),
    [
        (views.none(), [(1.0, IMAGE)]),
        (views.mirror(), [(0.5, IMAGE), (0.5, IMAGE[:, :, ::-1])]),
        *(
            (
                views.mirror_and_shift(step),
                [
                    (weight / 2, each)
                    for weight, picture in (
                        (0.5, IMAGE),
                        (0.25, shifted(IMAGE, step)),
                        (0.25, shifted(IMAGE, -step)),
                    )
                    for each in (picture, picture[:, :, ::-1])
                ],
            )
            for step in (1, 2)
        ),
    ],
)
def test_the_views_and_their_weights(builder, wanted):
    found = seen(builder)
    assert sum(weight for weight, _ in found) == 1
    assert [weight for weight, _ in found] == [weight for weight, _ in wanted]
    for (_, one), (_, other) in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_mean_that_sees_the_mirror_does_not_tell_left_from_right():
    def outputs(view):
        return {"score": view["image"][:, 0, 0], "sum": view["image"].sum((1, 2, 3))}

    once, mirrored = (
        views.averaged(outputs, views.mirror()({"image": jnp.asarray(each)})) for each in (IMAGE, IMAGE[:, :, ::-1])
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), once, mirrored)
    six = views.mirror_and_shift()
    hand = sum(weight * image[:, 0, 0] for weight, image in seen(six))
    np.testing.assert_allclose(views.averaged(outputs, six({"image": IMAGE}))["score"], hand, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: views.mirror_and_shift(0), "shift=0"),
        (lambda: views.mirror_and_shift(1.5), "shift=1.5"),
        (lambda: views.mirror_and_shift(5)({"image": IMAGE}), "at most 4"),
        (lambda: views.mirror()({"tokens": IMAGE[:, :, 0, 0]}), "test_time='none'"),
        (lambda: views.averaged(lambda view: view["image"], views.mirror()({"image": IMAGE})), "test_time='none'"),
    ],
)
def test_mistakes_say_what_to_do(call, words):
    with pytest.raises(UserError, match=words):
        call()


def test_an_evaluation_may_have_other_views_and_only_of_a_step_made_of_parts():
    data = tiny.data()
    evals = dict(plain=dict(source="test", test_time="none"), six=dict(source="test", test_time="mirror_and_shift"))
    job = train.build(tiny.config(test_time=dict(name="mirror"), evals=evals), data=data)
    state = job.initial()
    for name, builder in (("plain", "none"), ("six", "mirror_and_shift")):
        alone = train.build(tiny.config(test_time=dict(name=builder)), data=data)
        wanted = alone.evaluate("test", state)
        found = job.evaluate(f"eval_{name}", state)
        assert {key.partition("/")[2]: value for key, value in found.items()} == pytest.approx(
            {key.partition("/")[2]: value for key, value in wanted.items()}
        )
    assert job.evaluate("eval_plain", state)["eval_plain/loss"] != job.evaluate("test", state)["test/loss"]


def mirrored(views_of=views.mirror):
    """A user's own builder."""
    return views_of()


@pytest.mark.parametrize("test_time", ["mirror", f"{__name__}:mirrored"])
def test_evaluation_and_prediction_average_and_training_does_not(test_time):
    data = tiny.data()
    job, plain = (
        train.build(tiny.config(test_time=each), data=data) for each in (dict(name=test_time), dict(name="none"))
    )
    state = job.initial()
    pictures = data.open()["test"].get(np.arange(21))["image"]
    found = job.predict(state, pictures)["probabilities"]
    logits = [np.log(plain.predict(state, each)["probabilities"]) for each in (pictures, pictures[:, :, ::-1])]
    mean = np.exp(np.mean(logits, axis=0))
    np.testing.assert_allclose(found, mean / mean.sum(axis=1, keepdims=True), rtol=1e-4)
    label = data.open()["test"].get(np.arange(21))["label"]
    assert job.evaluate("test", state)["test/accuracy"] == pytest.approx((found.argmax(axis=1) == label).mean())
    with job.batches() as one, plain.batches() as other:
        steps = [each.step(each.initial(), next(feed))[0].params for each, feed in ((job, one), (plain, other))]
    assert tiny.same(*steps)
