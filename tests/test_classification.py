"""Classification: losses by the book, metrics that padding cannot touch, no label silently wrong."""

import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain import metrics
from jaxtrain.config import lookup
from jaxtrain.errors import UserError
from jaxtrain.tasks import Task
from jaxtrain.tasks.classification import Classification
from jaxtrain.tasks.multilabel import MultiLabel

K = 5


def logits_of(size=8, seed=0, dtype=np.float32):
    return (3 * np.random.default_rng(seed).standard_normal((size, K))).astype(np.float32).astype(dtype)


def labels_of(size=8, seed=1):
    return np.random.default_rng(seed).integers(0, K, size).astype(np.int32)


def log_p_of(logits):
    logits = np.asarray(logits, np.float64)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def mask_of(size=8):
    return np.ones((size,), bool)


def computed(task, logits, batch, mask=None):
    mask = mask_of(len(logits)) if mask is None else mask
    return metrics.compute(jax.jit(task.metrics)(logits, batch, mask))


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


def test_it_is_a_task_whose_options_are_its_arguments():
    task: Task = Classification(num_classes=K)
    for name, method in inspect.getmembers(Task, inspect.isfunction):
        if not name.startswith("_"):
            ours = inspect.signature(getattr(Classification, name))
            assert list(ours.parameters) == list(inspect.signature(method).parameters), name
    batch = {"image": jnp.ones((2, 3, 3, 1))}
    assert task.inputs(batch) is batch["image"]
    assert set(lookup.options(Classification, supplied=("num_classes",))) == {
        "loss", "label_smoothing", "class_weights", "top_k", "per_class", "calibration"
    }  # fmt: skip
    part = dict(name="classification", top_k=2)
    built = lookup.build(part, lookup.TASKS, "task", num_classes=K, dtype=jnp.float32)
    assert built == Classification(num_classes=K, top_k=2)


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.5])
def test_the_training_loss_is_smoothed_by_the_formula_and_the_metric_is_not(epsilon):
    task = Classification(num_classes=K, label_smoothing=epsilon)
    logits, label = logits_of(), labels_of()
    log_p = log_p_of(logits)
    entropy = -log_p[np.arange(8), label]
    losses = jax.jit(task.losses)(logits, {"label": label})
    np.testing.assert_allclose(losses, (1 - epsilon) * entropy + epsilon * (-log_p).mean(axis=1), rtol=1e-5)
    assert losses.shape == (8,) and losses.dtype == jnp.float32
    unsmoothed = computed(Classification(num_classes=K), logits, {"label": label})
    assert computed(task, logits, {"label": label}) == unsmoothed
    assert unsmoothed["loss"] == pytest.approx(entropy.mean(), rel=1e-5)


@pytest.mark.parametrize("epsilon", [0.0, 0.1])
def test_mixed_labels_weigh_loss_and_hits(epsilon):
    task = Classification(num_classes=K, label_smoothing=epsilon)
    logits, first, second = logits_of(), labels_of(seed=1), labels_of(seed=2)
    mix = np.linspace(0, 1, 8, dtype=np.float32)
    batch = {"label": first, "mixed_label": second, "mix": mix}
    run = jax.jit(task.losses)
    one, other = (run(logits, {"label": label}) for label in (first, second))
    np.testing.assert_allclose(run(logits, batch), mix * one + (1 - mix) * other, rtol=1e-5)
    log_p, best, share = log_p_of(logits), np.argmax(logits, axis=1), mix
    rows = np.arange(8)
    entropy = -(share * log_p[rows, first] + (1 - share) * log_p[rows, second])
    found = computed(task, logits, batch)
    assert found["loss"] == pytest.approx(entropy.mean(), rel=1e-5)
    hits = np.where(best == first, share, 0) + np.where(best == second, 1 - share, 0)
    assert found["accuracy"] == pytest.approx(hits.mean(), rel=1e-6)


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [(jnp.bfloat16, "float32"), (jnp.float16, "float32"), (jnp.float32, "float32"), (jnp.float64, "float64")],
)
def test_losses_are_float32_or_finer(dtype, wanted):
    task = Classification(num_classes=K, label_smoothing=0.1)
    with jax.enable_x64(dtype == jnp.float64):
        batch = {"label": labels_of(), "mixed_label": labels_of(), "mix": jnp.ones((8,), jnp.float32)}
        logits = logits_of(dtype=dtype)
        losses = jax.jit(task.losses)(logits, batch)
        found = jax.eval_shape(task.metrics, logits, batch, mask_of())
    assert str(losses.dtype) == wanted
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(found)} == {"float32", "int32"}
    np.testing.assert_allclose(
        losses,
        jax.jit(task.losses)(logits.astype(np.float32), batch),
        rtol=1e-6 if wanted == "float32" else 1e-5,
    )


@pytest.mark.parametrize("k", [1, 2, 3, K])
def test_top_k_is_what_top_k_says(k):
    task = Classification(num_classes=K, top_k=k)
    logits = np.round(logits_of(64))  # with ties
    label = labels_of(64)
    best = np.argsort(-logits, axis=1, stable=True)[:, :k]
    found = computed(task, logits, {"label": label})
    assert found[f"top{k}_accuracy"] == (best == label[:, None]).any(axis=1).mean()
    assert found["accuracy"] == (np.argmax(logits, axis=1) == label).mean()


def test_without_top_k_there_is_no_such_metric():
    assert set(computed(Classification(num_classes=K), logits_of(), {"label": labels_of()})) == {
        "loss", "accuracy"
    }  # fmt: skip


def test_equal_outputs_are_not_all_right():
    """A net that says the same for every class is right where the first class is."""
    found = computed(Classification(num_classes=K, top_k=2), jnp.zeros((K, K)), {"label": jnp.arange(K)})
    assert (found["accuracy"], found["top2_accuracy"]) == (pytest.approx(1 / K), pytest.approx(2 / K))


def test_outputs_that_are_no_numbers_hit_nothing():
    batch = {"label": jnp.arange(K, dtype=jnp.int32)}
    found = computed(Classification(num_classes=K, top_k=3), jnp.full((K, K), jnp.nan), batch)
    assert (found["accuracy"], found["top3_accuracy"]) == (0, 0) and math.isnan(found["loss"])


PADDING = {
    "nan outputs": (np.nan, 0),
    "infinite outputs": (np.inf, 0),
    "label -1": (0.0, -1),
    "label K": (0.0, K),
    "all of it": (np.nan, -1),
}


@pytest.mark.parametrize("kind", PADDING)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_padded_rows_touch_neither_metrics_nor_gradients(kind, smoothing):
    task = Classification(num_classes=K, label_smoothing=smoothing, top_k=2)
    output, label = PADDING[kind]
    logits, batch, mask = logits_of(), {"label": labels_of()}, np.arange(8) < 5
    logits[5:], batch["label"][5:] = output, label
    real = {"label": batch["label"][:5]}
    assert computed(task, logits, batch, mask) == pytest.approx(computed(task, logits[:5], real))

    @jax.jit
    @jax.grad
    def gradients(logits, batch, mask):
        return jnp.sum(jnp.where(mask, task.losses(logits, batch), jnp.float32(0)))

    gradient = np.asarray(gradients(logits, batch, mask))
    np.testing.assert_allclose(gradient[:5], gradients(logits[:5], real, mask[:5]), atol=1e-6)
    if np.isfinite(output):
        np.testing.assert_array_equal(gradient[5:], 0)


@pytest.mark.parametrize("bad", [-1, K, 2**31 - 1])
def test_a_wrong_label_that_reaches_the_device_is_nan_and_never_another_class(bad):
    task = Classification(num_classes=K, top_k=K - 1)
    batch = {"label": labels_of()}
    batch["label"][3] = bad
    run = jax.jit(task.losses)
    losses = run(logits_of(), batch)
    np.testing.assert_array_equal(np.isnan(losses), np.arange(8) == 3)
    every_hit = jnp.broadcast_to(jnp.arange(K, dtype=jnp.float32), (8, K))
    assert computed(task, every_hit, {"label": jnp.full((8,), bad, jnp.int32)})["accuracy"] == 0
    mixed = {"label": labels_of(), "mixed_label": batch["label"], "mix": jnp.full((8,), 0.5, jnp.float32)}
    np.testing.assert_array_equal(np.isnan(run(logits_of(), mixed)), np.arange(8) == 3)


@pytest.mark.parametrize("size", [1, 7, 16, 37, 64])
def test_any_batch_size_gives_the_same_evaluation(size):
    """37 examples in filled up batches: counted 37, accuracy identical, loss within 1e-6."""
    task = Classification(num_classes=K, top_k=2)
    logits, label = logits_of(37), labels_of(37)
    whole = computed(task, logits, {"label": label})
    run = jax.jit(task.metrics)
    total = None
    for start in range(0, 37, size):
        rows = np.arange(start, start + size)
        at = np.minimum(rows, 36)
        part = run(logits[at], {"label": label[at]}, rows < 37)
        total = part if total is None else metrics.merge(total, part)
    found = metrics.compute(total)
    assert found.pop("loss") == pytest.approx(whole.pop("loss"), abs=1e-6)
    assert found == whole


def test_eight_devices_give_what_one_gives():
    task = Classification(num_classes=K, label_smoothing=0.1, top_k=2)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    args = (logits_of(16), {"label": labels_of(16)}, np.arange(16) < 13)
    wanted = metrics.compute(jax.jit(task.metrics)(*args))
    assert metrics.compute(jax.jit(task.metrics)(*jax.device_put(args, rows))) == pytest.approx(wanted, rel=1e-6)
    losses = jax.jit(task.losses)
    np.testing.assert_allclose(losses(*jax.device_put(args[:2], rows)), losses(*args[:2]), rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_predictions(dtype):
    logits = logits_of(dtype=dtype)
    found = jax.jit(Classification(num_classes=K).predict)(logits)
    assert {name: str(value.dtype) for name, value in found.items()} == {
        "label": "int32", "probabilities": "float32"
    }  # fmt: skip
    np.testing.assert_array_equal(found["label"], np.argmax(np.asarray(logits, np.float32), axis=1))
    np.testing.assert_allclose(found["probabilities"], np.exp(log_p_of(logits)), rtol=1e-5)


# Host batches.


def host(*labels, **more):
    return {"label": np.asarray(labels, np.int32)} | more


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (host(0, -1, 2, id=np.array([11, 12, 13])), "0 to 4.*example 12 has -1:"),
        (host(0, K, 99, id=np.array([11, 12, 13])), "example 12 has 5, 13 has 99:"),
        (host(0, 7), "example 1 has 7"),
        (host(*[9] * 8), "0 has 9, 1 has 9, 2 has 9, 3 has 9, 4 has 9 and 3 more"),
        (host(9, 9, mask=np.array([False, True])), "example 1 has 9:"),
        ({"label": np.array([255], np.uint8)}, "has 255"),
        ({"label": np.array([0.5])}, r"int32 \[B\].*float64\[1\]"),
        ({"label": np.array([[0], [1]])}, r"int64\[2, 1\]"),
        ({"image": np.zeros((2, 3, 3, 1), np.uint8)}, r"label.*image.*uint8\[2, 3, 3, 1\]"),
    ],
)
def test_host_batches_that_cannot_be_learnt_from_are_refused_by_id(batch, words):
    with pytest.raises(UserError, match=words) as caught:
        Classification(num_classes=K).check(batch)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "batch",
    [
        host(0, 1, K - 1),
        host(),
        host(0, -1, 9, mask=np.array([True, False, False])),
        {"label": np.array([4], np.uint8)},
    ],
)
def test_host_batches_that_are_right_pass(batch):
    assert Classification(num_classes=K).check(batch) is None


# Options and outputs.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(num_classes=None), "the data has None classes"),
        (dict(num_classes=1), "1 classes"),
        (dict(num_classes=K, label_smoothing=1.0), "label_smoothing=1.0"),
        (dict(num_classes=K, label_smoothing=-0.1), "label_smoothing=-0.1"),
        (dict(num_classes=K, label_smoothing=float("nan")), "label_smoothing=nan"),
        (dict(num_classes=K, top_k=K + 1), "top_k=6.*5 classes"),
        (dict(num_classes=K, top_k=-1), "top_k=-1"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        Classification(**options)


@pytest.mark.parametrize("shape", [(8, K + 1), (8,), (8, 2, K)])
def test_outputs_of_another_shape_are_refused_when_traced(shape):
    task = Classification(num_classes=K)
    for function in (task.losses, lambda o, b: task.metrics(o, b, mask_of()), lambda o, b: task.predict(o)):
        with pytest.raises(UserError, match=r"expected \[batch, 5\]"):
            jax.eval_shape(function, jnp.zeros(shape, jnp.float32), {"label": labels_of()})


# What the options add.


def test_sigmoid_is_the_sum_of_binary_cross_entropies_and_smoothing_goes_by_the_same_formula():
    logits, label = logits_of(), labels_of()
    wide = logits.astype(np.float64)

    def binary(target):
        return (np.log1p(np.exp(-np.abs(wide))) + np.maximum(wide, 0) - wide * target).sum(axis=1)

    target = np.eye(K)[label]
    for epsilon in (0.0, 0.1):
        task = Classification(num_classes=K, loss="sigmoid", label_smoothing=epsilon)
        smoothed = (1 - epsilon) * target + epsilon / K
        np.testing.assert_allclose(jax.jit(task.losses)(logits, {"label": label}), binary(smoothed), rtol=1e-5)
        assert computed(task, logits, {"label": label})["loss"] == pytest.approx(binary(target).mean(), rel=1e-5)
    np.testing.assert_allclose(task.predict(logits)["probabilities"], 1 / (1 + np.exp(-wide)), rtol=1e-5)


@pytest.mark.parametrize("epsilon", [0.0, 0.1])
def test_class_weights_weigh_losses_and_not_metrics(epsilon):
    weights = (0.0, 0.5, 1.0, 2.0, 4.0)
    task = Classification(num_classes=K, label_smoothing=epsilon, class_weights=weights)
    logits, label = logits_of(), labels_of()
    entropy = -log_p_of(logits) * weights  # as PyTorch's cross_entropy(weight=…, label_smoothing=…) without its mean
    wanted = (1 - epsilon) * entropy[np.arange(8), label] + epsilon * entropy.mean(axis=1)
    np.testing.assert_allclose(jax.jit(task.losses)(logits, {"label": label}), wanted, rtol=1e-5)
    assert computed(task, logits, {"label": label}) == computed(Classification(num_classes=K), logits, {"label": label})


def calibration_by_hand(logits, label):
    p = np.exp(log_p_of(logits))
    confidence, hits = p.max(axis=1), p.argmax(axis=1) == label
    error = 0.0
    for low in range(15):
        inside = (confidence > low / 15) & (confidence <= (low + 1) / 15)
        if inside.any():
            error += inside.mean() * abs(hits[inside].mean() - confidence[inside].mean())
    return error


def test_what_the_options_measure_is_merged_to_the_value_of_the_whole():
    """37 examples in parts of 16, filled up: accuracy of each class, and the calibration error of Guo et al., 2017."""
    task = Classification(num_classes=K, per_class=True, calibration=True)
    logits, label = logits_of(48), labels_of(48) % (K - 1)  # the last class never occurs
    run = jax.jit(task.metrics)
    total = metrics.empty(run(logits[:16], {"label": label[:16]}, mask_of(16)))
    for start in (0, 16, 32):
        rows = slice(start, start + 16)
        total = metrics.merge(total, run(logits[rows], {"label": label[rows]}, np.arange(start, start + 16) < 37))
    found = metrics.compute(total)
    logits, label = logits[:37], label[:37]
    right = logits.argmax(axis=1) == label
    for k in range(K - 1):
        assert found[f"class_accuracy/{k}"] == right[label == k].mean()
    assert math.isnan(found[f"class_accuracy/{K - 1}"])
    assert found["calibration_error"] == pytest.approx(calibration_by_hand(logits, label), abs=1e-6)
    shapes = jax.eval_shape(run, logits[:16], {"label": label[:16]}, mask_of(16))
    assert metrics.names(shapes) == list(found)


def test_a_mixed_picture_counts_as_the_class_that_weighs_more():
    task = Classification(num_classes=K, per_class=True)
    batch = {"label": np.array([0, 0], np.int32), "mixed_label": np.array([1, 1], np.int32)}
    batch["mix"] = np.array([0.7, 0.3], np.float32)
    found = computed(task, np.eye(K, dtype=np.float32)[[0, 0]], batch)
    assert (found["class_accuracy/0"], found["class_accuracy/1"]) == (1, 0)


def test_outputs_that_are_no_numbers_leave_a_calibration_error():
    task = Classification(num_classes=K, calibration=True)
    found = computed(task, np.full((4, K), np.nan, np.float32), {"label": labels_of(4)})
    assert found["calibration_error"] == 0  # sure of nothing, right in nothing


# Several labels a picture.


def many_of(size=8, seed=2):
    return np.random.default_rng(seed).integers(0, 2, (size, K)).astype(np.int32)


def test_multilabel_is_binary_cross_entropy_of_each_label():
    logits, batch, mask = logits_of(), {"label": many_of()}, np.arange(8) < 5
    weights = (1.0, 2.0, 0.0, 1.0, 3.0)
    entropy = np.log1p(np.exp(np.where(batch["label"] == 1, -logits, logits).astype(np.float64)))
    plain, weighted = (MultiLabel(num_classes=K, class_weights=each, per_class=True) for each in ((), weights))
    np.testing.assert_allclose(jax.jit(plain.losses)(logits, batch), entropy.sum(axis=1), rtol=1e-5)
    np.testing.assert_allclose(jax.jit(weighted.losses)(logits, batch), (entropy * weights).sum(axis=1), rtol=1e-5)
    right = (logits > 0) == (batch["label"] == 1)
    logits[5:] = np.nan
    for task in (plain, weighted):
        found = computed(task, logits, batch, mask)
        assert found["loss"] == pytest.approx(entropy[:5].sum(axis=1).mean(), rel=1e-5)
        assert found["accuracy"] == pytest.approx(right[:5].mean())
        assert found["exact_match"] == pytest.approx(right[:5].all(axis=1).mean())
        np.testing.assert_allclose([found[f"class_accuracy/{k}"] for k in range(K)], right[:5].mean(axis=0))


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"label": np.array([[0, 1, 0, 1, 2], [0] * 5]), "id": np.array([7, 8])}, "example 7 has 2"),
        ({"label": np.zeros((2, K + 1), np.int32)}, r"\[B, 5\].*int32\[2, 6\]"),
        ({"label": np.zeros((2,), np.int32)}, r"\[B, 5\]"),
    ],
)
def test_multilabel_refuses_what_are_no_such_labels(batch, words):
    with pytest.raises(UserError, match=words):
        MultiLabel(num_classes=K).check(batch)
    assert MultiLabel(num_classes=K).check({"label": many_of()}) is None


@pytest.mark.parametrize("task", [Classification, MultiLabel])
@pytest.mark.parametrize("weights", [(1.0,), (1.0, 1.0, 1.0, 1.0, -1.0), (1.0, 1.0, 1.0, 1.0, float("inf"))])
def test_weights_that_are_none_are_refused(task, weights):
    with pytest.raises(UserError, match="class_weights"):
        task(num_classes=K, class_weights=weights)
