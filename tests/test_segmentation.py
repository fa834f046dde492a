"""Segmentation: a mean over the pixels of the global batch that count, and over classes of intersection over union."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from jaxtrain import metrics, sharding, step, train
from jaxtrain.data import sources
from jaxtrain.errors import UserError
from jaxtrain.tasks.confusion import Confusion, MeanIoU
from jaxtrain.tasks.segmentation import Segmentation

K, IGNORED = 3, 255


def logits_of(size=4, seed=0):
    return (2 * np.random.default_rng(seed).standard_normal((size, 5, 6, K))).astype(np.float32)


def labels_of(size=4, seed=1):
    """Ever more of the picture is ignored from row to row."""
    label = np.random.default_rng(seed).integers(0, K, (size, 5, 6)).astype(np.int32)
    for row in range(size):
        label[row, : row + 1] = IGNORED
    return label


def by_hand(logits, label, mask):
    """(pixels that count, their cross-entropy, the class that each of them is taken for), in float64."""
    kept = (label != IGNORED) & mask[:, None, None]
    logits, label = logits[kept].astype(np.float64), label[kept]
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return label, -log_p[np.arange(len(label)), label], logits.argmax(axis=1)


def iou_by_hand(label, predicted):
    shares = []
    for k in range(K):
        union = ((label == k) | (predicted == k)).sum()
        if union:
            shares.append(((label == k) & (predicted == k)).sum() / union)
    return np.mean(shares)


@pytest.mark.parametrize("mask", [[1, 1, 1, 1], [1, 0, 1, 0]], ids=["all", "masked"])
def test_values_are_those_of_the_formulas_over_the_pixels_that_count(mask):
    task = Segmentation(num_classes=K, per_class=True)
    logits, batch, mask = logits_of(), {"label": labels_of()}, np.array(mask, bool)
    logits[~mask] = np.nan
    label, entropy, predicted = by_hand(logits, batch["label"], mask)
    found = metrics.compute(jax.jit(task.metrics)(logits, batch, mask))
    assert found["loss"] == pytest.approx(entropy.mean(), rel=1e-5)
    assert found["accuracy"] == pytest.approx((predicted == label).mean())
    assert found["mean_iou"] == pytest.approx(iou_by_hand(label, predicted))
    for k in range(K):
        assert found[f"class_accuracy/{k}"] == pytest.approx((predicted[label == k] == k).mean())
    losses = jax.jit(task.losses)(logits, batch)
    assert (losses.shape, losses.dtype) == ((4,), jnp.float32)
    np.testing.assert_allclose(np.sum(losses[mask]), entropy.sum(), rtol=1e-5)
    assert int(np.sum(task.counts(batch)[mask])) == len(label)


def test_a_matrix_that_is_merged_is_that_of_the_whole_whatever_the_parts():
    rng = np.random.default_rng(0)
    label, predicted = rng.integers(0, K, (2, 37))
    predicted[:3] = K, -1, 99  # no class: counts nowhere
    whole = Confusion.of(label, predicted, np.ones(37, bool), K)
    parts = metrics.empty(whole)
    for cut in np.split(np.arange(37), [12, 24, 36]):
        parts = metrics.merge(parts, Confusion.of(label[cut], predicted[cut], np.ones(len(cut), bool), K))
    np.testing.assert_array_equal(parts.counts, whole.counts)
    assert int(whole.counts.sum()) == 34


@pytest.mark.parametrize(
    ("counts", "wanted"),
    [
        ([[2, 0, 0], [0, 3, 0], [0, 0, 1]], 1.0),
        ([[2, 2, 0], [0, 4, 0], [0, 0, 0]], (2 / 4 + 4 / 6) / 2),  # a class without a union does not count
        ([[0, 0, 0], [0, 4, 0], [0, 4, 0]], (4 / 8 + 0) / 2),
        ([[0, 0, 0], [0, 0, 0], [0, 0, 0]], np.nan),
    ],
)
def test_mean_iou_of_a_matrix(counts, wanted):
    assert MeanIoU(np.array(counts, np.int32)).compute() == pytest.approx(wanted, nan_ok=True)


def pictures(count=48):
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (count, 8, 8, 1), dtype=np.uint8)
    label = (image[..., 0] // 86).astype(np.int32)
    for row in range(count):
        label[row, : row % 8] = IGNORED
    return sources.from_arrays({"image": image, "label": label}, num_classes=K)


def pixelwise(num_classes, *, rngs):
    return nnx.Linear(1, num_classes, rngs=rngs)


def gradient(devices, accumulate, mask):
    """(gradient, metrics) of the first batch, in which rows may be masked as if they were damaged."""
    config = tiny.config(task=dict(name="segmentation"), accumulate=accumulate, devices=devices)
    job = train.build(config, data=pictures(), model=pixelwise)
    with job.batches() as batches:
        batch = next(batches) | {"mask": jax.device_put(mask, sharding.over_batch(job.mesh))}
    batch = step.prepare(batch, job.parts)
    grads, _, found = jax.jit(functools.partial(step.gradients, parts=job.parts))(job.initial(), batch)
    return jax.device_get(grads), metrics.compute(found), jax.device_get(batch), job


@pytest.mark.parametrize(
    ("devices", "accumulate"),
    [(8, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 1), (8, 1), (1, 2)))],
)
def test_the_mean_is_over_the_pixels_of_the_global_batch(devices, accumulate):
    """Pictures of unlike weight, one of them left out, cut over devices and micro-batches."""
    mask = np.arange(16) != 3
    grads, values, batch, job = gradient(devices, accumulate, mask)
    params = jax.device_get(job.initial().params)

    def mean(params):
        kept = (batch["label"] != IGNORED) & mask[:, None, None]
        log_p = jax.nn.log_softmax(batch["image"] @ params["kernel"] + params["bias"][None, None, None])
        own = jnp.take_along_axis(log_p, np.where(kept, batch["label"], 0)[..., None], axis=-1)[..., 0]
        return -jnp.where(kept, own, 0).sum() / kept.sum()

    loss, wanted = jax.value_and_grad(mean)(params)
    assert values["loss"] == pytest.approx(float(loss), rel=1e-5)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), grads, wanted)


@pytest.mark.slow
def test_a_unet_learns_which_pixels_are_bright():
    config = tiny.config(task=dict(name="segmentation", per_class=True), total="200st", eval_every="200st")
    config.model = dict(name="unet", width=4, depth=1)
    config.optimizer = dict(name="adamw", learning_rate=0.02)
    config.best = "mean_iou"
    result = train.run(config, data=pictures(960))  # of noise: it must not be enough to remember them
    assert result.metrics["test/mean_iou"] > 0.7 and "test/class_accuracy/2" in result.metrics


def test_a_label_that_is_no_class_is_nan_on_the_device():
    label = labels_of()
    label[2, 4, 4] = K
    np.testing.assert_array_equal(
        np.isnan(Segmentation(num_classes=K).losses(logits_of(), {"label": label})), [False, False, True, False]
    )


def host(label, **more):
    return {"label": np.asarray(label, np.int32).reshape(-1, 1, 2)} | more


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (host([0, 1, 2, 3], id=np.array([7, 8])), "example 8 has 3"),
        (host([0, -1]), "0 has -1"),
        ({"label": np.zeros((2,), np.int32)}, r"\[B, H, W\].*int32\[2\]"),
        ({"label": np.zeros((2, 2, 2), np.float32)}, r"float32\[2, 2, 2\]"),
    ],
)
def test_host_batches_that_cannot_be_learnt_from_are_refused_by_id(batch, words):
    with pytest.raises(UserError, match=words) as caught:
        Segmentation(num_classes=K).check(batch)
    assert "\n" not in str(caught.value)


def test_host_batches_that_are_right_pass():
    Segmentation(num_classes=K).check(host([0, 1, 2, IGNORED]))
    Segmentation(num_classes=K).check(host([0, 1, 9, 9], mask=np.array([True, False])))


@pytest.mark.parametrize(
    ("options", "words"),
    [(dict(num_classes=None), "None classes"), (dict(num_classes=K, ignore_label=1), "ignore_label=1 is one of")],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        Segmentation(**options)


def test_outputs_of_another_shape_are_refused_when_traced():
    with pytest.raises(UserError, match=r"expected \[4, 5, 6, 3\].*unet"):
        jax.eval_shape(Segmentation(num_classes=K).losses, jnp.zeros((4, K)), {"label": jnp.zeros((4, 5, 6), int)})
