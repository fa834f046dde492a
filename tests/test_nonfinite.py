"""NaN and infinity (Report 16 and its kind): told with step, leaf and examples; borne, or rolled back, exactly."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny import same

from jaxtrain import train
from jaxtrain.data import sources
from jaxtrain.errors import NonFiniteError, UserError
from jaxtrain.loop import nonfinite
from jaxtrain.state import counter
from jaxtrain.step import Steps
from jaxtrain.storage import checkpoint
from jaxtrain.tasks.classification import Classification

BAD_STEP = 14  # whose batch holds the example that makes the trouble
SGD = dict(name="sgd", learning_rate=0.05)


def config(**changes):
    return tiny.config(**dict(optimizer=SGD, report_every="5st", schedule=dict(name="linear"), ema=0.9) | changes)


def position_of(step, row=3, examples=640):
    """The id of a row of the batch that `step` sees."""
    job = train.build(config(), data=floats(examples))
    with job.batches(step - 1, step) as batches:
        return int(np.asarray(next(batches)["id"])[row])


def floats(train=640, bad=None, value=np.inf):
    """Pictures as floats, in one of which a pixel is `value`."""
    rng = np.random.default_rng(0)
    image = rng.random((train, 8, 8, 1), np.float32)
    if bad is not None:
        image[bad, 2, 2, 0] = value
    label = np.arange(train, dtype=np.int32) % 10
    roles = {"train": sources.ArraySource({"image": image, "label": label})}
    roles["validation"] = roles["test"] = sources.ArraySource(
        {"image": np.ones((20, 8, 8, 1), np.float32) / 2, "label": label[:20]}
    )
    return sources.Dataset("floats", roles["train"].spec, 10, tuple("0123456789"), lambda: roles)


@dataclasses.dataclass(frozen=True)
class Spoilt(Classification):
    """A task that fails on one example, in the way of `how`, when `bad` is its id."""

    bad: int = -1
    how: str = "losses"

    def losses(self, outputs, batch):
        here = batch["id"] == self.bad
        if self.how == "losses":
            return jnp.where(here, jnp.nan, super().losses(outputs, batch))
        if self.how == "whole":
            return jnp.where(here.any(), jnp.nan, super().losses(outputs, batch).mean())
        # The loss is finite; the slope of the root is not.
        return super().losses(outputs, batch) + jnp.sqrt(jnp.where(here, outputs[:, 0] * 0, 1))


@pytest.fixture(scope="module")
def bad():
    return position_of(BAD_STEP)


@pytest.mark.parametrize("changes", [dict(), dict(accumulate=2), dict(devices=1)], ids=["plain", "accumulate", "one"])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_stop_names_step_leaf_and_examples_and_keeps_them(value, changes, bad, tmp_path):
    with pytest.raises(NonFiniteError) as caught:
        train.run(config(**changes), tmp_path, data=floats(bad=bad, value=value))
    said = str(caught.value)
    assert f"at step {BAD_STEP}," in said and "first in batch/image" in said and f"examples {bad} of the batch" in said
    assert "\n" not in said and caught.value.exit_code == 3
    folder = tmp_path / "nonfinite" / str(BAD_STEP)
    report = json.loads((folder / "report.json").read_text())
    assert (report["step"], report["position"], report["examples"]) == (BAD_STEP, BAD_STEP - 1, [bad])
    assert report["not_finite"][0] == "batch/image" and "losses" in report["not_finite"]
    with np.load(folder / "batch.npz", allow_pickle=False) as batch:
        assert batch["id"].tolist().count(bad) == 1 and batch["image"].shape == (16, 8, 8, 1)
    assert checkpoint.Checkpoints(tmp_path / "checkpoints").latest() == 10


@pytest.mark.parametrize(("how", "leaf"), [("losses", "losses"), ("gradients", "gradients/"), ("whole", "losses")])
def test_the_first_leaf_is_found_wherever_it_is(how, leaf, bad, tmp_path):
    task = Spoilt(num_classes=10, bad=bad, how=how)
    with pytest.raises(NonFiniteError, match=f"at step {BAD_STEP},.*first in {leaf}"):
        train.run(config(), tmp_path, data=floats(), task=task)


def test_parameters_that_overflowed_are_named_by_their_path(tmp_path):
    with pytest.raises(NonFiniteError, match=r"first in (params/\S+|outputs|losses|gradients)"):
        train.run(config(optimizer=dict(name="sgd", learning_rate=1e30)), tmp_path, data=floats())
    assert checkpoint.Checkpoints(tmp_path / "checkpoints").latest() is None


def test_the_state_stays_that_before_the_fault_until_it_is_dealt_with(bad):
    """Parameters are those of the step before, though the loop was some steps further."""
    job = train.build(config(), data=floats(bad=bad))
    state = job.initial()
    with job.batches(0) as batches:
        for step in range(1, BAD_STEP + 4):
            state, _ = job.step(state, next(batches))
            if step == BAD_STEP - 1:
                before = jax.tree.map(jnp.copy, state)
    assert int(state.skipped_at) == BAD_STEP and int(state.skipped) == 1
    for field in ("params", "opt_state", "ema", "model_state"):
        assert same(getattr(state, field), getattr(before, field))


def test_what_cannot_be_found_again_is_said_to_be_so(tmp_path):
    """A device that miscounts once: the step is finite when computed again."""
    job = train.build(config(), data=floats())
    assert "not deterministic" in nonfinite.study(job, job.initial(), 1, tmp_path)


def run(folder, bad, stops=(), monkeypatch=None, **changes):
    """A run that rolls back at `bad`, stopped after each step of `stops` and started again."""
    wanted = config(on_nonfinite="rollback", **changes)
    for stop in stops:
        with monkeypatch.context() as patch:
            patch.setattr(train.Loop, "interrupted", lambda loop, stop=stop: loop.step >= stop)
            train.run(wanted, folder, data=floats(bad=bad))
    return train.run(wanted, folder, data=floats(bad=bad))


def without_clock(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: each for key, each in row.items() if not key.startswith(("time/", "memory/"))} for row in rows]


def test_a_rollback_leaves_the_window_out_and_the_run_ends(bad, tmp_path, capsys):
    result = run(tmp_path, bad, terminal="plain")
    assert int(result.state.step) == 24 and int(result.state.offset) == BAD_STEP - 10 and result.exit_code == 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result.params))
    assert "rolled back to step 10, leaving out batches 11 to 14" in capsys.readouterr().out
    steps = [row["step"] for row in without_clock(tmp_path) if "train/loss" in row]
    assert steps == [5, 10, 15, 20, 24]


@pytest.fixture(scope="module")
def rolled_back(bad, tmp_path_factory):
    """The state and the lines of a run that rolled back and was not stopped."""
    folder = tmp_path_factory.mktemp("through")
    return run(folder, bad).state, without_clock(folder)


@pytest.mark.parametrize("stops", [(3,), (12,), (13, 14, 15), (19, 23)], ids=str)
def test_a_run_that_rolled_back_resumes_exactly(stops, bad, rolled_back, tmp_path, monkeypatch):
    stopped = run(tmp_path, bad, stops, monkeypatch)
    assert same(rolled_back[0], stopped.state)
    assert rolled_back[1] == without_clock(tmp_path)


def test_the_batches_after_a_rollback_are_those_of_their_position(bad, tmp_path):
    """Nothing of the run but its offset tells of it: the same steps without the fault, begun further on."""
    job = train.build(config(), data=floats(bad=bad))
    result = run(tmp_path, bad)
    state = checkpoint.Checkpoints(tmp_path / "checkpoints")
    assert state.latest() == 24
    straight = job.initial()
    with job.batches(0, 10) as first, job.batches(14, 28) as rest:
        for batch in first:
            straight, _ = job.step(straight, batch)
        straight = dataclasses.replace(straight, offset=straight.offset + 4)
        for batch in rest:
            straight, _ = job.step(straight, batch)
    assert same(straight.params, result.state.params)


def test_rollbacks_are_bounded_and_begin_at_a_checkpoint(tmp_path):
    """A fault that no window explains: every batch of the run."""
    hopeless = config(on_nonfinite="rollback", max_rollbacks=2, optimizer=dict(name="sgd", learning_rate=1e30))
    with pytest.raises(NonFiniteError, match="2 rollbacks did not help"):
        train.run(hopeless, tmp_path, data=floats())
    assert checkpoint.Checkpoints(tmp_path / "checkpoints").latest() == 0


@pytest.mark.parametrize(("every", "lacking"), [("10st", "a workdir"), ("", "config.checkpoint.every")])
def test_a_rollback_to_nowhere_is_refused(every, lacking, tmp_path):
    wanted = config(on_nonfinite="rollback", checkpoint=dict(every=every, minutes=1.0))
    with pytest.raises(UserError, match=f"give it {lacking}"):
        train.run(wanted, None if "workdir" in lacking else tmp_path, data=floats())
    assert not list(tmp_path.iterdir())


def test_the_answer_may_change_in_a_used_workdir(bad, tmp_path):
    """After a stop one goes on in the same workdir with another answer."""
    with pytest.raises(NonFiniteError):
        train.run(config(), tmp_path, data=floats(bad=bad))
    result = train.run(config(on_nonfinite="skip"), tmp_path, data=floats(bad=bad))
    assert int(result.state.step) == 24 and int(result.state.skipped) == 1 and int(result.state.offset) == 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bare:
    step: jax.Array
    offset: jax.Array
    key: jax.Array


def unguarded(spec):
    """A step of a user's own that takes whatever comes."""

    def train_step(state, batch):
        new = dataclasses.replace(state, step=state.step + 1)
        return new, {"loss": jnp.sum(batch["image"])}

    return Steps(init=lambda key: Bare(counter(), counter(), key), train=train_step)


def test_a_step_of_a_users_own_rolls_back_by_report_intervals(bad, tmp_path):
    plain = dict(model=dict(name="cnn"), optimizer=dict(name="adamw", learning_rate=1e-3), schedule=dict(name="cosine"))
    wanted = config(**plain, ema=0.0, on_nonfinite="rollback", test="no", eval_every="")
    result = train.run(wanted, tmp_path, data=floats(bad=bad), step=unguarded)
    assert int(result.state.step) == 24 and int(result.state.offset) == 5  # batches 11 to 15


@dataclasses.dataclass(frozen=True)
class Steep(Classification):
    """Gradients whose squares overflow, so that no optimizer can use them; loss and gradients themselves are finite."""

    def losses(self, outputs, batch):
        return super().losses(outputs, batch) * 1e25


def test_a_gradient_too_large_to_have_a_norm_is_a_fault_with_its_name(tmp_path):
    with pytest.raises(NonFiniteError, match="at step 1, .*first in grad_norm"):
        train.run(config(), tmp_path, data=floats(), task=Steep(num_classes=10))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Growing(Bare):
    value: jax.Array


def growing(spec):
    """A step whose metrics are finite for ever, and whose state is not."""

    def train_step(state, batch):
        return dataclasses.replace(state, step=state.step + 1, value=state.value * 1e10), {"loss": jnp.float32(1)}

    return Steps(init=lambda key: Growing(counter(), counter(), key, jnp.ones(2)), train=train_step)


@pytest.mark.parametrize("answer", ["stop", "skip", "rollback"])
def test_a_state_that_is_not_finite_is_never_saved(answer, tmp_path):
    plain = dict(model=dict(name="cnn"), optimizer=dict(name="adamw", learning_rate=1e-3), schedule=dict(name="cosine"))
    wanted = config(**plain, on_nonfinite=answer, max_rollbacks=1, ema=0.0, test="no", eval_every="")
    with pytest.raises(NonFiniteError, match="state of step 10 is not finite: value"):
        train.run(wanted, tmp_path, data=floats(), step=growing)
    assert checkpoint.Checkpoints(tmp_path / "checkpoints").latest() in (None, 0)
