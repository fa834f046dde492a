"""Evaluation counts every example once, whatever the batch size and the number of devices."""

import numpy as np
import pytest
import tiny

from jaxtrain import train
from jaxtrain.data import sources
from jaxtrain.errors import JaxtrainError, UserError


def evaluated(state=None, **changes):
    job = train.build(tiny.config(**changes), data=tiny.data(validation=37))
    return job.evaluate("eval", job.initial() if state is None else state)


@pytest.fixture(scope="module")
def whole():
    """What one device finds in one batch."""
    return evaluated(eval_batch_size=37, devices=1)


# One example a batch, a ragged last batch, one batch, half a batch: on devices that divide it and that do not.
@pytest.mark.parametrize(
    ("batch", "devices"), [(1, 1), (1, 8), (7, 1), (7, 2), (7, 8), (16, 2), (16, 8), (37, 2), (37, 8), (64, 8)]
)
def test_counts_all_examples_and_gives_the_same_values(batch, devices, whole):
    """Report 1."""
    found = evaluated(eval_batch_size=batch, devices=devices)
    assert found["eval/accuracy"] == whole["eval/accuracy"]
    assert found["eval/loss"] == pytest.approx(whole["eval/loss"], abs=1e-6)


def test_the_mean_is_over_examples_not_over_batches():
    """Report 2: 17 examples, batches of 16, the 17th with a huge loss."""
    image = np.zeros((17, 8, 8, 1), np.uint8)
    image[16] = 255
    source = sources.ArraySource({"image": image, "label": np.arange(17, dtype=np.int32) % 10})
    data = tiny.data()
    roles = dict(data.open(), validation=source)
    job = train.build(
        tiny.config(model=dict(name="nets:Linear"), eval_batch_size=16),
        data=sources.Dataset("tail", data.spec, 10, data.class_names, lambda: roles),
    )
    state = job.initial()
    probabilities = job.predict(state, image)["probabilities"]
    losses = -np.log(probabilities[np.arange(17), np.arange(17) % 10])
    assert losses[16] != pytest.approx(losses[0], rel=0.01)
    assert job.evaluate("eval", state)["eval/loss"] == pytest.approx(losses.sum() / 17, rel=1e-5)


def test_the_count_is_asserted(monkeypatch):
    job = train.build(tiny.config(), data=tiny.data(validation=37))
    source = job.sources["validation"]
    feed = type(job.evaluator).feed
    monkeypatch.setattr(type(job.evaluator), "feed", lambda self, _: feed(self, sources.subset(source, np.arange(30))))
    with pytest.raises(JaxtrainError, match="counted 30 of 37"):
        job.evaluate("eval", job.initial())


def test_label_smoothing_does_not_touch_evaluation():
    """Report 30."""
    plain = evaluated(task=dict(name="classification"))
    smoothed = evaluated(task=dict(name="classification", label_smoothing=0.1))
    assert plain == smoothed


@pytest.mark.parametrize("label", [-1, 10, 255])
def test_a_label_out_of_range_is_refused_by_id(label):
    data = tiny.data()
    bad = data.open()["validation"].get(np.arange(37))
    labels = bad["label"].copy()
    labels[20] = label
    roles = dict(data.open(), validation=sources.ArraySource({"image": bad["image"], "label": labels}))
    job = train.build(tiny.config(), data=sources.Dataset("bad", data.spec, 10, (), lambda: roles))
    with pytest.raises(UserError, match=rf"20.*{label}|{label}.*20"):
        job.evaluate("eval", job.initial())


def count_rows(predict, source):
    """An evaluation of a user's own."""
    batch = source.get(np.arange(len(source)))
    return {"rows": float(len(source)), "right": float((predict(batch)["label"] == batch["label"]).sum())}


def test_named_evaluations_have_their_own_source_task_or_function_and_interval():
    config = tiny.config(
        evals=dict(
            seen=dict(source="train", every="12st"),
            other=dict(source="validation", task=dict(name="classification", top_k=3), every="24st"),
            own=dict(source="test", fn="test_evaluate:count_rows", every="8st"),
        )
    )
    result = train.run(config, data=tiny.data())

    def steps(key):
        return [line["step"] for line in result.history if key in line]

    assert steps("eval_seen/accuracy") == [12, 24]
    assert steps("eval_other/top3_accuracy") == [24]
    assert steps("eval_own/rows") == [8, 16, 24]
    last = {key: value for line in result.history for key, value in line.items()}
    assert last["eval_own/right"] == pytest.approx(21 * last["test/accuracy"])


def test_evaluation_uses_the_averaged_weights():
    job = train.build(tiny.config(ema=0.9), data=tiny.data())
    state = job.initial()
    with job.batches(0, 5) as batches:
        for batch in batches:
            state, _ = job.step(state, batch)
    plain = train.build(tiny.config(), data=tiny.data())
    from dataclasses import replace

    averaged = replace(state, params=state.ema["params"], model_state=state.ema["model_state"], ema=())
    current = replace(state, ema=())
    assert job.evaluate("eval", state) == plain.evaluate("eval", averaged) != plain.evaluate("eval", current)


def test_mode_eval_gives_the_logged_values_and_writes_nothing(tmp_path):
    config = tiny.config()
    trained = train.run(config, tmp_path, data=tiny.data())
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    found = train.run(config, tmp_path, mode="eval", data=tiny.data())
    assert found.metrics["test/accuracy"] == trained.metrics["test/accuracy"]
    assert found.metrics["eval/loss"] == pytest.approx(trained.metrics["eval/loss"], abs=1e-6)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("folder", [None, "empty"])
def test_mode_eval_without_a_run_is_refused(folder, tmp_path):
    with pytest.raises(UserError, match="workdir"):
        train.run(tiny.config(), folder and tmp_path / folder, mode="eval", data=tiny.data())
