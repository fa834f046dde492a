"""Steps of a user's own, by the two in examples/: they train, resume, evaluate, and their mistakes cost one line."""

import dataclasses
import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from conftest import QUICK_FLAGS, REPOSITORY
from flax import struct

from jaxtrain import describe, supply, train
from jaxtrain import main as entry
from jaxtrain.config import configfile, lookup
from jaxtrain.config.keys import KEYS
from jaxtrain.errors import NonFiniteError, UserError
from jaxtrain.initialise import initialised
from jaxtrain.result import load
from jaxtrain.state import TrainState, counter
from jaxtrain.step import Steps

ME = f"{__name__}:counting"
QUICK = dict(devices=2, test="no", terminal="quiet", tensorboard=False, eval_every="", checkpoint=dict(minutes=0.0))
EXAMPLES = {
    "gan": dict(batch_size=32, total="12st", report_every="5st"),
    "simclr": dict(
        model=dict(name="examples.simclr:Encoder", width=4, depth=1), batch_size=32, total="12st", report_every="5st"
    ),
}


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """Names such as "examples.gan:gan" are found from the folder in which a command is given."""
    monkeypatch.syspath_prepend(REPOSITORY)


def config(example, **changes):
    config = configfile.read(f"{REPOSITORY}/examples/{example}.py")
    for key, value in (QUICK | EXAMPLES[example] | changes).items():
        config[key] = value
    return config


def plain(**changes):
    """The tiny config, with what only the usual step reads at its defaults."""
    return tiny.config(**{key: KEYS[key].default for key in ("model", "optimizer", "schedule")} | changes)


# What an own step needs least: a count, an offset and a key.
@struct.dataclass
class Bare:
    step: jax.Array
    offset: jax.Array
    key: jax.Array
    total: jax.Array


def bare(key):
    return Bare(counter(), counter(), key, jnp.zeros((), jnp.float32))


def counting(spec, gain: float = 1.0):
    """Metrics that a test can foretell: the number of the step, as a plain scalar."""

    def train(state, batch):
        step = state.step + 1
        total = state.total + gain
        return state.replace(step=step, total=total), {"number": step, "gain": gain, "energy": 100.0 / (8.0 - total)}

    return Steps(bare, train)


# In the middle of a report interval, and at its end.
@pytest.mark.parametrize(("example", "stop"), [("gan", 3), ("simclr", 5)])
def test_stopped_and_resumed_equals_uninterrupted(example, stop, tmp_path, monkeypatch):
    wanted = config(example)
    through = train.run(wanted, tmp_path / "a")
    with monkeypatch.context() as patch:
        patch.setattr(train.Loop, "interrupted", lambda loop: loop.step >= stop)
        assert int(train.run(wanted, tmp_path / "b").state.step) == stop
    resumed = train.run(wanted, tmp_path / "b")
    assert int(resumed.state.step) == 12 and tiny.same(resumed.state, through.state)


@pytest.mark.parametrize("example", [pytest.param("gan", marks=pytest.mark.slow), "simclr"])
def test_eight_devices_learn_what_one_learns(example):
    """SimCLR's loss is one of the whole global batch: rows on other devices are among those to tell apart."""
    one, eight = (train.run(config(example, total="4st", devices=n)).state.params for n in (1, 8))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(eight), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_the_loss_of_simclr_is_that_of_the_paper():
    """Against NT-Xent written out pair by pair (Chen et al., 2020, equation 1)."""
    from examples.simclr import Contrast

    z = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)
    cosine = (z @ z.T) / np.outer(np.linalg.norm(z, axis=1), np.linalg.norm(z, axis=1))
    pairs = [(i, i + 1) for i in range(0, 8, 2)] + [(i + 1, i) for i in range(0, 8, 2)]
    others = [sum(np.exp(cosine[i, k] / 0.2) for k in range(8) if k != i) for i, _ in pairs]
    expected = -np.mean(
        [np.log(np.exp(cosine[i, j] / 0.2) / total) for (i, j), total in zip(pairs, others, strict=True)]
    )
    assert Contrast(0.2).losses({"projection": jnp.asarray(z)}, {}) == pytest.approx(expected, rel=1e-5)


def test_simclr_learns_neighbours_without_labels():
    wanted = config("simclr", total="60st", batch_size=128, report_every="15st")
    job = train.build(wanted)
    before = job.evaluate("eval_neighbours", job.initial())["eval_neighbours/accuracy"]
    result = train.run(wanted)
    losses = [line["train/loss"] for line in result.history if "train/loss" in line]
    assert losses[-1] < losses[0]
    assert job.evaluate("eval_neighbours", result.state)["eval_neighbours/accuracy"] > before + 0.02


def test_the_gan_learns_what_each_class_looks_like():
    wanted = config("gan", total="2000st", batch_size=64, report_every="200st")
    job = train.build(wanted)
    before = job.evaluate("eval_generated", job.initial())["eval_generated/distance"]
    result = train.run(wanted)
    assert job.evaluate("eval_generated", result.state)["eval_generated/distance"] < 0.7 * before
    pictures = result.predict({"label": np.arange(10)})["image"]
    assert pictures.shape == (10, 8, 8, 1) and 0 <= pictures.min() < 0.1 and 0.9 < pictures.max() <= 1


def test_evaluations_come_when_asked_for_and_a_workdir_predicts(tmp_path):
    evals = {"generated": dict(source="test", fn="examples.gan:class_means", every="8st")}
    result = train.run(config("gan", eval_every="6st", evals=evals, test="last"), tmp_path)
    found = {
        key: [line["step"] for line in result.history if key in line]
        for key in ("eval/real_accuracy", "eval_generated/distance", "test/fake_accuracy")
    }
    assert found == {
        "eval/real_accuracy": [6, 12],
        "eval_generated/distance": [8, 12],
        "test/fake_accuracy": [12],
    }
    labels = {"label": np.array([3, 1, 4, 1, 5])}
    assert result.predict(labels)["image"].tobytes() == load(tmp_path, trust=True).predict(labels)["image"].tobytes()


def test_evaluation_counts_each_example_once_whatever_the_batch():
    job = train.build(config("gan"))
    other = train.build(config("gan", eval_batch_size=72))
    assert job.evaluate("eval", job.initial()) == pytest.approx(other.evaluate("eval", other.initial()))


def test_plain_scalars_are_reported_as_means_over_their_interval():
    result = train.run(plain(total="6st", report_every="4st", step=ME), data=tiny.data())
    lines = [(line["step"], line["train/number"], line["train/gain"]) for line in result.history]
    assert lines == [(4, 2.5, 1.0), (6, 5.5, 1.0)]


def test_a_step_that_nobody_guards_stops_at_what_is_not_finite():
    """`skipped` counts what the usual step leaves out; of other steps the metrics tell."""
    wanted = plain(total="30st", report_every="4st", step=ME)
    with pytest.raises(NonFiniteError, match="train/energy is inf"):
        train.run(wanted, data=tiny.data())
    assert int(train.run(plain(total="30st", step=ME, on_nonfinite="skip"), data=tiny.data()).state.step) == 30


@pytest.mark.parametrize("lacking", ["step", "offset", "key"])
def test_a_state_that_no_run_can_carry_on_is_refused(lacking):
    fields = [field.name for field in dataclasses.fields(Bare) if field.name != lacking]
    state_type = struct.dataclass(type("Own", (), {"__annotations__": dict.fromkeys(fields, jax.Array)}))

    def init(key):
        return state_type(**{name: getattr(bare(key), name) for name in fields})

    with pytest.raises(UserError, match=f"the state of step own has no `{lacking}`"):
        train.build(plain(), data=tiny.data(), step=named("own", lambda spec: Steps(init, None)))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (dict(step=jnp.zeros((), jnp.float32)), r"`step` is float32\[\], expected int32\[\]"),
        (dict(offset=jnp.zeros((2,), jnp.int32)), r"`offset` is int32\[2\]"),
        (dict(key=jnp.zeros((2,), jnp.uint32)), r"`key` is uint32\[2\], expected key<fry>\[\]"),
    ],
)
def test_a_count_or_key_of_another_kind_is_refused(change, found):
    step = named("own", lambda spec: Steps(lambda key: bare(key).replace(**change), None))
    with pytest.raises(UserError, match=found):
        train.build(plain(), data=tiny.data(), step=step)


def named(name, builder):
    builder.__name__ = name
    return builder


def test_an_object_is_called_with_what_it_names():
    from examples.gan import gan

    job = train.build(plain(), data=tiny.data(), step=functools.partial(gan, latent=3))
    assert job.abstract.params["generator"]["layers"]["0"]["kernel"].shape == (13, 128)


def test_without_predict_and_evaluate_a_step_says_so():
    wanted = plain(total="3st", step=ME)
    result = train.run(wanted, data=tiny.data())
    assert result.metrics == {}
    with pytest.raises(UserError, match=f"step {ME} brings no predict function"):
        result.predict(np.zeros((2, 8, 8, 1), np.uint8))
    with pytest.raises(UserError, match="is not made of config.model"):
        _ = result.model


GAN, SIMCLR = "--config=examples/gan.py", "--config=examples/simclr.py"
MISTAKES = [
    ([GAN, "--config.step.latnt=3"], ["'latnt'", "'latent'"]),
    ([GAN, "--config.step.latent=many"], ["latent", "an int"]),
    ([GAN, "--config.step.optimizer=adam"], ["no option 'optimizer'"]),
    ([GAN, "--config.accumulate=2"], ["config.accumulate is 2", "examples.gan:gan", "`parts`"]),
    ([GAN, "--config.ema=0.9"], ["config.ema is 0.9", "`parts`"]),
    ([GAN, "--config.model=mlp"], ["config.model.name is 'mlp'", "`parts`"]),
    ([GAN, "--config.best=real_acuracy"], ["config.best is 'real_acuracy'", "'real_accuracy'"]),
    ([GAN, "--config.patience=3"], ["config.best is 'accuracy'", "fake_accuracy, real_accuracy"]),
    ([GAN, "--config.step=examples.gan:gam"], ["no 'gam'", "gan"]),
    ([GAN, "--config.evals=dict(a=dict(task='classification'))"], ["eval_a has a task", "examples.gan:gan"]),
    ([SIMCLR, "--config.accumulate=2"], ["config.accumulate is 2", "whole", "config.accumulate=1"]),
    ([SIMCLR, "--config.evals=dict(a=dict(source='test'))"], ["eval_a has no fn", "no evaluate"]),
    ([SIMCLR, "--config.patience=3"], ["config.patience is 3", "no evaluate function in step examples.simclr:simclr"]),
]


@pytest.mark.parametrize(("argv", "said"), MISTAKES, ids=lambda value: value[-1] if value[0].startswith("--") else "")
def test_a_mistake_costs_one_line_and_writes_nothing(argv, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(sys, "path", [*sys.path])
    code = entry.main([*argv, f"--workdir={tmp_path / 'run'}", "--config.terminal=quiet", "--config.batch_size=32"])
    line = capsys.readouterr().err
    assert code == 2 and line.count("\n") == 1, line
    assert [text for text in said if text not in line] == [], line
    assert list(tmp_path.iterdir()) == []


CONSOLE = "import sys; from jaxtrain.main import main; sys.exit(main())"


@pytest.mark.slow
@pytest.mark.parametrize(("example", "start"), [("simclr", ["-m", "jaxtrain.main"]), ("gan", ["-P", "-c", CONSOLE])])
def test_the_commands_of_the_examples(example, start, tmp_path):
    """From the root, with `python -m` and with the installed command, which has no folder of its own on the path."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "XLA_FLAGS": QUICK_FLAGS}
    command = [sys.executable, *start, f"--config=examples/{example}.py:smoke", f"--workdir={tmp_path}"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "train/" in (tmp_path / "metrics.jsonl").read_text()


def test_names_are_found_from_the_folder_of_the_command(tmp_path):
    """A user's folder, no installed package: what the console command must find."""
    (tmp_path / "my_lab").mkdir()
    (tmp_path / "my_lab" / "steps.py").write_text("def plain(parts, depth: int = 1):\n    pass\n")
    (tmp_path / "mine.py").write_text(
        "from jaxtrain.config import base_config\n\n"
        "def get_config():\n"
        "    config = base_config()\n"
        "    config.step = dict(name='my_lab.steps:plain', dept=2)\n"
        "    return config\n"
    )
    command = [sys.executable, "-P", "-c", CONSOLE, "--config=mine.py"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "Did you mean 'depth'" in done.stderr


def test_a_user_may_keep_two_of_each_in_the_usual_state():
    """TrainState takes any tree: its fields are names, not kinds."""

    def init(key):
        two = {"a": jnp.ones((2,), jnp.float32), "b": jnp.ones((3,), jnp.float32)}
        return TrainState(counter(), counter(), key, two, {}, {})

    def step(state, batch):
        return dataclasses.replace(state, step=state.step + 1), {"loss": state.params["a"].sum()}

    result = train.run(plain(total="2st"), data=tiny.data(), step=lambda spec: Steps(init, step))
    assert sorted(result.params) == ["a", "b"]


def test_what_is_supplied_is_no_option():
    """The config knows the names without importing what makes them."""
    assert lookup.STEP.supplied == tuple(field.name for field in dataclasses.fields(supply.Supply))


def test_parameters_of_another_run_are_taken_into_a_state_of_ones_own(tmp_path):
    first = train.run(config("gan", total="2st"), tmp_path)
    second = train.build(config("gan", init_from=str(tmp_path), seed=1))
    state = initialised(second, second.initial(), lambda text: None)
    assert tiny.same(state.params, first.state.params) and int(state.step) == 0
    with pytest.raises(UserError, match="the state of step test_own_steps:counting has none"):
        train.run(plain(total="2st", step=ME, init_from=str(tmp_path)), data=tiny.data())


def test_the_header_says_what_a_step_of_ones_own_leaves_open():
    gan, simclr, bare_step = (
        describe.facts(job, None)
        for job in (
            train.build(config("gan")),
            train.build(config("simclr")),
            train.build(plain(step=ME, precision="bfloat16"), data=tiny.data()),
        )
    )
    assert "examples.gan:gan" in gan.model and gan.optimizer.startswith("adam") and gan.total == 54_465
    assert "no metric 'accuracy' on validation" in " ".join(gan.notes)
    assert "examples.simclr:Contrast" in " ".join(simclr.notes) and "examples.simclr:simclr" in " ".join(simclr.notes)
    assert bare_step.optimizer == "" and "does not ask for `dtype`" in " ".join(bare_step.notes)
