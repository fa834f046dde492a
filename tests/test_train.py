"""The loop: what is reported, saved, evaluated and resumed, and when."""

import json
import os
import signal

import jax
import numpy as np
import pytest
import tiny
from tiny import same

from jaxtrain import train
from jaxtrain.errors import NonFiniteError, UserError
from jaxtrain.loop import behind
from jaxtrain.result import load
from jaxtrain.storage import checkpoint

MODELS = [dict(name="nets:Linear"), dict(name="nets:Dropout")]


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without_clock(history):
    return [{key: value for key, value in line.items() if not key.startswith(("time/", "memory/"))} for line in history]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A workdir of a run that went through, and its result."""
    folder = tmp_path_factory.mktemp("finished")
    config = tiny.config(model=MODELS[1], ema=0.9)
    return folder, config, train.run(config, folder, data=tiny.data())


@pytest.fixture(scope="module")
def plain():
    """The result of the tiny config as it is."""
    return train.run(tiny.config(), data=tiny.data())


CARRIED = dict(ema=0.9, schedule=dict(name="linear"), optimizer=dict(name="adamw", learning_rate=0.01))


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: model["name"])
def through(request, tmp_path_factory):
    """A config, the state of its uninterrupted run, and the lines of that."""
    folder, changes = tmp_path_factory.mktemp("through"), dict(model=request.param, **CARRIED)
    return changes, train.run(tiny.config(**changes), folder, data=tiny.data()).state, lines(folder)


def test_steps_and_checkpoints_are_those_asked_for(finished):
    folder, _, result = finished
    assert checkpoint.Checkpoints(folder / "checkpoints").steps()[-1] == 24 == int(result.state.step)
    train_steps = [line["step"] for line in lines(folder) if "train/loss" in line]
    assert train_steps == [5, 10, 15, 20, 24]
    assert [line["step"] for line in lines(folder) if "eval/accuracy" in line] == [8, 16, 24]
    assert [line["step"] for line in lines(folder) if "test/accuracy" in line] == [24]


def test_training_learns(finished):
    losses = [line["train/loss"] for line in finished[2].history if "train/loss" in line]
    assert losses[-1] < losses[0]


def test_metrics_are_means_over_their_own_interval(finished):
    """Each line's learning rate is the one applied by the step that made its state."""
    folder, config, _ = finished
    for line in lines(folder):
        if "train/learning_rate" in line:
            assert line["train/learning_rate"] == pytest.approx(config.optimizer.learning_rate)


def test_a_finished_run_run_again_says_so_and_changes_nothing(finished, capsys):
    folder, config, result = finished
    before = (folder / "metrics.jsonl").read_text()
    again = train.run(tiny.config(model=MODELS[1], ema=0.9, terminal="plain"), folder, data=tiny.data())
    assert again.exit_code == 0 and same(again.state, result.state)
    assert (folder / "metrics.jsonl").read_text() == before
    assert "already finished at step 24" in capsys.readouterr().out


@pytest.mark.parametrize("stop", [3, 10, 19])
def test_stopped_and_resumed_equals_uninterrupted(through, stop, tmp_path, monkeypatch):
    """Reports 4, 5, 14, 28: state, log, learning rate and EMA, whatever the step of the stop."""
    changes, state, told = through
    with monkeypatch.context() as patch:
        patch.setattr(train.Loop, "interrupted", lambda loop: loop.step >= stop)
        stopped = train.run(tiny.config(**changes), tmp_path, data=tiny.data())
    assert int(stopped.state.step) == stop
    resumed = train.run(tiny.config(**changes), tmp_path, data=tiny.data())
    assert same(resumed.state, state)
    # A report interval that the stop cut in two is reported once, whole.
    assert without_clock(lines(tmp_path)) == without_clock(told)


def test_ids_are_those_of_one_run_and_each_comes_once_an_epoch(tmp_path):
    """Report 4: what a step sees follows from the step alone."""
    job = train.build(tiny.config(), data=tiny.data())
    with job.batches(0, 24) as through:
        whole = [np.asarray(batch["id"]) for batch in through]
    with job.batches(11, 24) as later:
        assert [ids.tolist() for ids in whole[11:]] == [np.asarray(batch["id"]).tolist() for batch in later]
    assert sorted(np.concatenate(whole[:4]).tolist()) == list(range(64))


@pytest.mark.parametrize(("total", "every"), [("23st", "10st"), ("5st", "10st"), ("7st", "")])
def test_the_last_step_is_always_saved(total, every, tmp_path):
    """Report 38."""
    config = tiny.config(total=total, checkpoint=dict(every=every, minutes=0.0, keep=3, keep_every=""))
    train.run(config, tmp_path, data=tiny.data())
    steps = checkpoint.Checkpoints(tmp_path / "checkpoints").steps()
    assert steps[-1] == int(total[:-2])
    assert train.run(config, tmp_path, data=tiny.data()).exit_code == 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(optimizer=dict(name="sgd", learning_rate=0.5, momentum=0.9)), "optimizer.learning_rate"),
        (dict(model=dict(name="nets:Linear")), "model.name"),
        (dict(batch_size=32), "batch_size"),
        (dict(seed=1), "seed"),
        (dict(data=dict(name="digits", validation=0.2)), "data.validation"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_runs_workdir_is_refused_by_the_keys_that_differ(finished, change, named):
    """Report 25."""
    folder, config, _ = finished
    other = config.copy_and_resolve_references()
    for key, value in change.items():
        other[key] = value
    before = sorted(path.name for path in folder.rglob("*"))
    with pytest.raises(UserError, match=named.replace(".", r"\.")):
        train.run(other, folder, data=tiny.data())
    assert sorted(path.name for path in folder.rglob("*")) == before


def test_more_steps_of_the_same_run_are_allowed_and_fewer_are_not(tmp_path):
    """Reports 25 and 26."""
    train.run(tiny.config(total="10st"), tmp_path, data=tiny.data())
    more = train.run(tiny.config(total="15st"), tmp_path, data=tiny.data())
    assert int(more.state.step) == 15
    with pytest.raises(UserError, match="15.*10"):
        train.run(tiny.config(total="10st"), tmp_path, data=tiny.data())


@pytest.mark.parametrize("place", ["devices", "report_every", "eval_every", "prefetch"])
def test_place_and_view_keys_do_not_change_the_state(place, plain):
    values = {"devices": 2, "report_every": "3st", "eval_every": "1ep", "prefetch": 1}
    changed = train.run(tiny.config(**{place: values[place]}), data=tiny.data())
    if place == "devices":  # sums over devices round differently
        for a, b in zip(jax.tree.leaves(plain.params), jax.tree.leaves(changed.params), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    else:
        assert same(plain.state, changed.state)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_ends_the_run_after_the_step_with_everything_saved(number, tmp_path, monkeypatch):
    """Report 37, the part that concerns training itself: it falls when the first interval is reported."""
    config = tiny.config(total="5000st", eval_every="")
    push = behind.Behind.push
    monkeypatch.setattr(behind.Behind, "push", lambda self, i: (os.kill(os.getpid(), number), push(self, i))[1])
    result = train.run(config, tmp_path, data=tiny.data())
    step = int(result.state.step)
    assert result.exit_code == 128 + number and 5 <= step < 5000
    assert checkpoint.Checkpoints(tmp_path / "checkpoints").latest() == step
    assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)


def test_max_minutes_ends_cleanly_and_the_next_start_goes_on(tmp_path):
    config = tiny.config(total="1000000st", max_minutes=0.01, report_every="1000st", eval_every="")
    first = train.run(config, tmp_path, data=tiny.data())
    assert first.exit_code == 0 and 0 < int(first.state.step) < 1000000
    second = train.run(config, tmp_path, data=tiny.data())
    assert int(second.state.step) > int(first.state.step)


@pytest.mark.parametrize("rate", [1e30, 1e25])
def test_a_diverging_run_stops_naming_the_step_and_keeps_good_parameters(rate, tmp_path):
    """Report 16, the part that concerns training itself."""
    config = tiny.config(optimizer=dict(name="sgd", learning_rate=rate), report_every="2st")
    with pytest.raises(NonFiniteError, match="at step [1-4]"):
        train.run(config, tmp_path, data=tiny.data())


@pytest.mark.parametrize(("most", "ends"), [(3, True), (100, False)])
def test_non_finite_updates_are_left_out_and_counted_where_the_config_bears_them(most, ends):
    """Report 16: the update after the limit is not let through, and parameters stay finite all along."""
    config = tiny.config(on_nonfinite="skip", max_skipped=most, optimizer=dict(name="sgd", learning_rate=1e30))
    if ends:
        with pytest.raises(NonFiniteError, match="updates left out"):
            train.run(config, data=tiny.data())
        return
    result = train.run(config, data=tiny.data())
    assert int(result.state.skipped) > 3 and int(result.state.step) == 24
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result.params))
    assert any(line.get("train/skipped") for line in result.history)


def test_best_is_judged_by_validation_and_kept(tmp_path):
    """Report 18's first half: the metric worsens, the best step stays on disk, and so does the newest."""
    config = tiny.config(
        optimizer=dict(name="sgd", learning_rate=3.0),
        total="40st",
        best="loss",
        best_mode="min",
        checkpoint=dict(every="8st", minutes=0.0, keep=1, keep_every=""),
    )
    result = train.run(config, tmp_path, data=tiny.data())
    losses = {line["step"]: line["eval/loss"] for line in result.history if "eval/loss" in line}
    best = min(losses, key=losses.get)
    saved = checkpoint.Checkpoints(tmp_path / "checkpoints")
    assert saved.best() == best and set(saved.steps()) == {best, 40}


def test_patience_stops_early_and_the_test_split_judges_the_best(tmp_path):
    config = tiny.config(
        optimizer=dict(name="sgd", learning_rate=3.0),
        total="400st",
        best="loss",
        best_mode="min",
        patience=2,
        test="best",
    )
    result = train.run(config, tmp_path, data=tiny.data())
    step = int(result.state.step)
    assert step < 400 and step % 8 == 0
    again = train.run(config, tmp_path, data=tiny.data())
    assert int(again.state.step) == step
    best = checkpoint.Checkpoints(tmp_path / "checkpoints").best()
    chosen = load(tmp_path, checkpoint=best, trust=True)
    assert result.metrics["test/loss"] == pytest.approx(_test_loss(chosen), rel=1e-5)


def _test_loss(trained):
    test = tiny.data().open()["test"].get(np.arange(21))
    probabilities = trained.predict(test["image"])["probabilities"]
    return float(-np.log(probabilities[np.arange(21), test["label"]]).mean())


def test_logged_evaluation_is_that_of_the_saved_parameters(finished):
    """Report 29: an independent look at the final checkpoint gives the logged value."""
    folder, _, result = finished
    assert result.metrics["test/loss"] == pytest.approx(_test_loss(load(folder, trust=True)), rel=1e-5)


def test_evaluating_often_does_not_change_the_parameters(finished):
    """Report 28."""
    never = train.run(tiny.config(eval_every="", ema=0.9, model=MODELS[1]), data=tiny.data())
    assert same(never.state, finished[2].state)


def test_the_loop_reads_no_metric_before_its_time(monkeypatch):
    """Metrics of an interval are fetched when the next one is over, or when an evaluation or the end needs them."""
    fetched = []
    original = behind.Behind.flush

    def counted(self):
        if self._held is not None:
            fetched.append(self._held.step)
        original(self)

    monkeypatch.setattr(behind.Behind, "flush", counted)
    pushed = []
    push = behind.Behind.push
    monkeypatch.setattr(
        behind.Behind, "push", lambda self, i: (pushed.append((i.step, list(fetched))), push(self, i))[1]
    )
    checkpoint = dict(every="", minutes=0.0, keep=1, keep_every="")  # saving needs the log complete
    train.run(tiny.config(eval_every="", total="20st", checkpoint=checkpoint), data=tiny.data())
    assert pushed == [(5, []), (10, []), (15, [5]), (20, [5, 10])]


def test_steps_and_evaluations_compile_once(tmp_path, caplog):
    """Report 48: 24 steps, 3 evaluations with a ragged tail, a resume."""
    import logging

    jax.config.update("jax_log_compiles", True)
    try:
        with caplog.at_level(logging.WARNING, logger="jax"):
            train.run(tiny.config(), tmp_path, data=tiny.data())
    finally:
        jax.config.update("jax_log_compiles", False)
    compiled = [r.message for r in caplog.records if "Finished XLA compilation" in r.getMessage()]
    text = [record.getMessage() for record in caplog.records if "Finished XLA compilation of" in record.getMessage()]
    assert sum("_advance" in line for line in text) == 1, text
    assert sum("_accumulate" in line for line in text) == 1, compiled  # validation and test: the same rows a batch


def test_a_notebook_carries_on_from_a_state_and_keeps_its_own(plain):
    first = train.run(tiny.config(total="12st"), data=tiny.data())
    second = train.run(tiny.config(total="24st"), data=tiny.data(), state=first.state)
    assert int(second.state.step) == 24 and int(first.state.step) == 12
    assert same(second.state, plain.state)


def test_by_hand_equals_the_loop(plain):
    job = train.build(tiny.config(), data=tiny.data())
    state = job.initial()
    with job.batches(0, 24) as batches:
        for batch in batches:
            state, _ = job.step(state, batch)
    assert same(state, plain.state)


def test_prediction_takes_any_number_of_rows(finished):
    folder, _, result = finished
    pictures = tiny.data().open()["test"].get(np.arange(21))["image"]
    whole = result.predict(pictures)
    assert whole["label"].shape == (21,) and whole["probabilities"].shape == (21, 10)
    np.testing.assert_allclose(
        whole["probabilities"][:5], load(folder, trust=True).predict(pictures[:5])["probabilities"], rtol=1e-5
    )


def test_nothing_is_written_without_a_workdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train.run(tiny.config(total="3st"), data=tiny.data())
    assert list(tmp_path.iterdir()) == []


def test_a_profile_is_a_trace_in_the_workdir(tmp_path):
    train.run(tiny.config(total="8st", eval_every=""), tmp_path, profile=(3, 6), data=tiny.data())
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    with pytest.raises(UserError, match="workdir"):
        train.run(tiny.config(), profile=(3, 6), data=tiny.data())


def test_debug_names_the_operation_that_made_a_nan():
    config = tiny.config(optimizer=dict(name="sgd", learning_rate=1e30), total="8st")
    with pytest.raises(NonFiniteError, match=r"nan generated by primitive"):
        train.run(config, debug=True, data=tiny.data())


def test_debug_runs_the_same_steps():
    plain = train.run(tiny.config(total="6st"), data=tiny.data())
    checked = train.run(tiny.config(total="6st"), debug=True, data=tiny.data())
    for a, b in zip(jax.tree.leaves(plain.params), jax.tree.leaves(checked.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A workdir of four steps, and its result."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, train.run(tiny.config(total="4st"), folder, data=tiny.data())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(model=dict(name="mlp", hidden=(32,))), r"params/layers/0/kernel.*\[64, 16\].*\[64, 32\]"),
        (dict(model=dict(name="mlp", hidden=(16, 16))), r"layers/1/kernel is missing"),
        (dict(model=dict(name="nets:Dropout")), r"is missing|not in this model"),
    ],
    ids=["wider", "deeper", "other"],
)
def test_weights_that_do_not_fit_are_refused_before_a_step(change, named, saved):
    """Reports 7 and 8, for weights taken from another run."""
    with pytest.raises(UserError, match=named):
        train.run(tiny.config(init_from=str(saved[0]), **change), data=tiny.data())


def test_weights_are_taken_from_another_run_and_a_missing_one_is_refused(saved, tmp_path):
    """Report 8."""
    folder, first = saved
    taken = train.run(tiny.config(init_from=str(folder), total="1st", lr_rules=((".", 0.0),)), data=tiny.data())
    for a, b in zip(jax.tree.leaves(first.params), jax.tree.leaves(taken.params), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(UserError, match="nowhere"):
        train.run(tiny.config(init_from=str(tmp_path / "nowhere")), data=tiny.data())


def test_a_resume_with_another_seed_trains_on_no_example_of_validation():
    """Report 15: three epochs, then another seed."""
    seen = set()
    for seed, start in ((0, 0), (7, 12)):
        job = train.build(tiny.config(seed=seed, data=dict(name="digits")), data=None)
        training, validation = job.sources["train"], job.sources["validation"]
        with job.batches(start, start + 12) as batches:
            for batch in batches:
                seen |= {int(training.ids[number]) for number in np.asarray(batch["id"])}
        assert not seen & {int(number) for number in validation.ids}


def stop_once(predict, source):
    """An evaluation during which the first process is told to end."""
    if not os.environ.pop("STOP_ONCE", ""):
        return {"calls": 1.0}
    os.kill(os.getpid(), signal.SIGTERM)
    return {"calls": 1.0}


def test_an_evaluation_that_a_signal_cut_off_is_made_up_for(tmp_path, monkeypatch):
    """Report 37: what is reported at each step is what an uninterrupted run reports, best steps included."""
    changes = dict(
        evals=dict(
            first=dict(source="test", fn="test_train:stop_once", every="8st"), second=dict(source="test", every="8st")
        )
    )
    through = train.run(tiny.config(**changes), tmp_path / "a", data=tiny.data())
    monkeypatch.setenv("STOP_ONCE", "yes")
    stopped = train.run(tiny.config(**changes), tmp_path / "b", data=tiny.data())
    assert stopped.exit_code == 143 and int(stopped.state.step) == 8
    assert not any("eval_second/loss" in line for line in stopped.history)
    resumed = train.run(tiny.config(**changes), tmp_path / "b", data=tiny.data())

    def told(result, key):
        return [(line["step"], line[key]) for line in result.history if key in line]

    for key in ("eval/loss", "eval_first/calls", "eval_second/loss", "test/loss"):
        assert told(resumed, key) == told(through, key)
    kept = [checkpoint.Checkpoints(tmp_path / name / "checkpoints").best() for name in "ab"]
    assert kept[0] == kept[1]
