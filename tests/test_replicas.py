"""Several runs in one program: each member is the run that its values alone would give."""

import dataclasses
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from conftest import REPOSITORY
from tiny import same

from jaxtrain import main as entry
from jaxtrain import predict, train
from jaxtrain.config import checked, configfile, grid, overrides
from jaxtrain.data.sources import ArraySource
from jaxtrain.errors import NonFiniteError, UserError
from jaxtrain.metrics import Last, Mean, Members, compute, merge, names
from jaxtrain.result import load
from jaxtrain.tasks.classification import Classification

GRID = (("seed", 2), ("optimizer.learning_rate", (0.05, 0.2)))


def config(replicas=GRID, **changes):
    return tiny.config(devices=1, replicas=replicas, **changes)


def lines(history):
    """What the clock says left out."""
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "memory/"))} for row in history]


def of_member(history, index):
    """The lines that the member would write alone."""
    end = f"/{index}"
    own = [{name.removesuffix(end): row[name] for name in row if name.endswith(end)} for row in lines(history)]
    return [
        {name: each.get(name, row[name]) for name in row if name.count("/") < 2}
        for row, each in zip(lines(history), own, strict=True)
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("3", ("seed 7", "seed 8", "seed 9")),
        ("(('seed', 2),)", ("seed 7", "seed 8")),
        ("(('seed', (5, 1)),)", ("seed 5", "seed 1")),
        (
            "(('seed', 2), ('optimizer.momentum', (.5, 1)))",
            ("seed 7, momentum 0.5", "seed 7, momentum 1", "seed 8, momentum 0.5", "seed 8, momentum 1"),
        ),
        ("(('clip_norm', (1., 2.)),)", ("clip_norm 1", "clip_norm 2")),
    ],
)
def test_members_are_named_by_what_differs(given, expected):
    wanted = tiny.config(seed=7)
    overrides.apply(wanted, [f"replicas={given}"], print)
    found = grid.members(checked(wanted))
    assert tuple(each.name for each in found) == expected
    for each in found:
        alone = checked(grid.config_of(wanted, each))
        assert alone.replicas == 1 and all(value == _value(alone, key) for key, value in each.values.items())


def _value(config, key):
    for name in key.split("."):
        config = config[name]
    return config


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (0, ["config.replicas is 0", "1 or more"]),
        ((), ["config.replicas is ()", "a grid such as"]),
        ((("seed", 1),), ["one member"]),
        ((("model.hidden", (4, 8)),), ["'model.hidden'", "seed, clip_norm", "optimizer.momentum"]),
        ((("learning_rate", (0.1, 0.2)),), ["'learning_rate'", "did you mean 'optimizer.learning_rate'"]),
        ((("optimizer.nesterov", (0, 1)),), ["'optimizer.nesterov'"]),
        ((("optimizer.learning_rate", 3),), ["3", "a tuple of values"]),
        ((("optimizer.learning_rate", (0.1, 0.1)),), ["each once"]),
        ((("optimizer.learning_rate", (0.1, -0.1)),), ["-0.1", "0 or more"]),
        ((("clip_norm", (0, 1)),), ["clip_norm 0", "more than 0"]),
        ((("seed", (1, 2**31)),), ["seed 2147483648"]),
        ((("seed", 2), ("seed", 3)), ["'seed' twice"]),
    ],
)
def test_what_may_not_vary_is_refused_in_a_line(given, said):
    with pytest.raises(UserError) as caught:
        checked(tiny.config(replicas=given))
    line = str(caught.value)
    assert "\n" not in line and [text for text in said if text not in line] == [], line


def test_metrics_of_members_add_up_member_by_member():
    a, b = (
        {"loss": Members(Mean(jnp.float32([1, 8]) * k, jnp.int32([1, 2]))), "rate": Last(jnp.float32(0.5))}
        for k in (1, 3)
    )
    found = compute(merge(a, b))
    assert found == {"loss": 5.0, "loss/std": math.sqrt(18), "loss/0": 2.0, "loss/1": 8.0, "rate": 0.5}
    assert names(jax.eval_shape(lambda: a)) == [*found]


def test_under_vmap_each_member_is_its_single_run():
    """To 1e-5 after one step, on the ids and keys of the single run at every step."""
    wanted = config(augment=(dict(name="crop", padding=1),))
    job = train.build(wanted, data=tiny.data())
    assert job.together.layout.mode == "vmap" and job.rows == 4 * 16
    state, shown = job.initial(), range(0, 4, 3)
    alone = [train.build(grid.config_of(checked(wanted), job.together.members[r]), data=tiny.data()) for r in shown]
    states = [other.initial() for other in alone]
    assert all(same(job.together.state(state, r), each) for r, each in zip(shown, states, strict=True))
    feeds = [[*other.batches(0, 3)] for other in alone]
    for step, batch in enumerate(job.batches(0, 3)):
        state, _ = job.step(state, batch)
        for place, r in enumerate(shown):
            assert np.array_equal(np.asarray(batch["id"]).reshape(4, 16)[r], feeds[place][step]["id"])
            states[place], _ = alone[place].step(states[place], feeds[place][step])
            mine, own = job.together.state(state, r), states[place]
            assert same((mine.key, mine.step, mine.offset), (own.key, own.step, own.offset))
            if not step:
                for a, b in zip(jax.tree.leaves(mine.params), jax.tree.leaves(own.params), strict=True):
                    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A grid, trained through."""
    folder = tmp_path_factory.mktemp("grid")
    return folder, train.run(config(), folder, data=tiny.data())


def test_stopped_and_resumed_equals_uninterrupted(finished, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(train.Loop, "interrupted", lambda loop: loop.step >= 13)
        assert int(train.run(config(), tmp_path, data=tiny.data()).state.step) == 13
    resumed = train.run(config(), tmp_path, data=tiny.data())
    assert same(resumed.state, finished[1].state) and lines(resumed.history) == lines(finished[1].history)


def test_a_run_tells_mean_deviation_and_each(finished):
    last = {name: value for row in finished[1].history for name, value in row.items()}
    for name in ("train/loss", "train/learning_rate", "eval/accuracy", "test/loss"):
        each = [last[f"{name}/{r}"] for r in range(4)]
        assert last[name] == pytest.approx(np.mean(each)) and last[f"{name}/std"] == pytest.approx(np.std(each, ddof=1))
    assert [last[f"train/learning_rate/{r}"] for r in range(4)] == pytest.approx([0.05, 0.2, 0.05, 0.2])
    log = (finished[0] / "log.txt").read_text()
    assert "4 members: seed 0, 1 × optimizer.learning_rate 0.05, 0.2; side by side" in log
    assert f"± {last['test/loss/std']:.2g}" in log
    for r, name in enumerate(finished[1].job.together.names):
        row = next(line for line in log.splitlines() if f"  {name}  " in line)
        assert f"{100 * last[f'test/accuracy/{r}']:.2f}%" in row


def test_a_member_is_carried_on_as_a_single_run(finished):
    own = finished[1].member(3)
    assert (own.config.seed, own.config.optimizer.learning_rate, own.config.replicas) == (1, 0.2, 1)
    alone = train.run(own.config, data=tiny.data())
    for a, b in zip(jax.tree.leaves(own.params), jax.tree.leaves(alone.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    more = own.config.copy_and_resolve_references()
    more.total = "26st"
    on = train.run(more, state=own.state, data=tiny.data())
    assert [row["step"] for row in on.history if "train/loss" in row] == [25, 26]


def test_predictions_are_those_of_each_member(finished):
    pictures = tiny.data().open()["test"].get(np.arange(5))
    found = load(finished[0], data=tiny.data()).predict(pictures)
    assert found["label"].shape == (4, 5) and found["probabilities"].shape == (4, 5, 10)
    alone = finished[1].member(2).predict(pictures)["probabilities"]
    np.testing.assert_allclose(found["probabilities"][2], alone, rtol=1e-5)
    for wrong in (-1, 4):
        with pytest.raises(UserError, match="members 0 to 3"):
            finished[1].member(wrong)
    with pytest.raises(UserError, match=r"4 members, each with its own: \.member\(0\)\.params"):
        _ = finished[1].params
    with pytest.raises(UserError, match="choose one with --member=0"):
        finished[1].only(None)


def test_the_member_whose_update_is_not_finite_is_named():
    wild = (("seed", 2), ("optimizer.learning_rate", (0.05, 1e20)))
    with pytest.raises(NonFiniteError, match=r"of seed 0, learning_rate 1e\+20 was not finite at step 2.*first in"):
        train.run(config(wild), data=tiny.data())
    result = train.run(config(wild, on_nonfinite="skip"), data=tiny.data())
    assert np.asarray(result.state.members.skipped).tolist() == [0, 23, 0, 23]
    assert math.isfinite(result.metrics["test/loss/0"])


CNN = dict(
    model=dict(name="cnn", width=4, dropout=0.3),
    augment=(dict(name="crop", padding=1), dict(name="cutout", size=3)),
    optimizer=dict(name="adamw", learning_rate=0.01, weight_decay=0.1),
    schedule=dict(name="cosine", warmup="3st"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "replicas",
    [
        3,
        (("seed", 2), ("optimizer.weight_decay", (0.0, 0.3))),
        (("optimizer.b1", (0.8, 0.9)), ("clip_norm", (0.1, 9.0))),
    ],
    ids=["seeds", "decay", "clip"],
)
def test_one_after_the_other_each_member_is_its_single_run_bit_by_bit(replicas):
    """Parameters, batch statistics, optimizer state, average, keys, and every line, over 24 steps."""
    wanted = config(replicas, ema=0.9, **CNN)
    result = train.run(wanted, data=tiny.data())
    together = result.job.together
    assert together.layout.mode == "unrolled"
    for r, each in enumerate(together.members):
        alone = train.run(grid.config_of(checked(wanted), each), data=tiny.data())
        assert alone.state.model_state and same(result.member(r).state, alone.state), each.name
        assert of_member(result.history, r) == lines(alone.history), each.name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "replicas", "devices", "spread"),
    [
        ("cnn", 4, 2, True),
        ("mlp", 8, 4, True),
        ("cnn", 3, 2, False),
        ("mlp", 3, 2, False),
        ("cnn", (("seed", 2), ("optimizer.b1", (0.8, 0.9))), 2, True),
    ],
)
def test_on_several_devices_each_member_is_its_single_run(model, replicas, devices, spread):
    """Spread over them where their number divides: then no device waits for another."""
    model = dict(name=model, width=4) if model == "cnn" else dict(name=model, hidden=(16,))
    wanted = tiny.config(**CNN | dict(model=model, total="3st", replicas=replicas, devices=devices))
    job = train.build(wanted, data=tiny.data())
    assert job.together.layout.spread == spread
    result = train.run(wanted, data=tiny.data())
    for r in (0, len(job.together.members) - 1):
        alone = grid.config_of(checked(wanted), job.together.members[r])
        alone.devices = 1
        own = train.run(alone, data=tiny.data()).state
        for a, b in zip(jax.tree.leaves(result.member(r).state.params), jax.tree.leaves(own.params), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


def test_members_of_their_own_devices_need_no_collective():
    """The step alone: only the reported sums are brought together."""
    job = train.build(tiny.config(replicas=8, devices=8), data=tiny.data())
    assert job.together.layout.spread
    text = jax.jit(job.steps.train, donate_argnums=0).lower(job.abstract, job.abstract_batch).compile().as_text()
    found = [name for name in ("all-reduce", "all-gather", "all-to-all", "collective-permute") if name in text]
    assert found == []


def count(predict, source, *, job, state):
    """An evaluation of a user's own, of the run that it is given."""
    label = predict(source.get(np.arange(3)))["label"]
    return {"rows": len(label), "seed": job.config.seed, "word": f"step {int(state.step)}"}


@pytest.mark.slow
def test_evaluations_of_ones_own_see_one_member_at_a_time(tmp_path, capsys):
    evals = {
        "own": dict(source="test", fn=f"{__name__}:count", every="3st"),
        "other": dict(source="test", task=dict(name="classification", top_k=2), every="3st"),
    }
    result = train.run(config(2, total="3st", evals=evals), tmp_path, data=tiny.data())
    last = {name: value for row in result.history for name, value in row.items()}
    assert [last[f"eval_own/{name}"] for name in ("rows", "rows/std", "seed/0", "seed/1")] == [3, 0, 0, 1]
    assert 0 <= last["eval_other/top2_accuracy/1"] <= 1
    assert "eval_own/word/1 of step 3" in (tmp_path / "log.txt").read_text()
    capsys.readouterr()
    told = config(2, total="3st", evals=evals, terminal="plain")
    again = train.run(told, tmp_path, mode="eval", data=tiny.data())
    assert again.metrics["eval/loss/1"] == result.metrics["eval/loss/1"]
    table = capsys.readouterr().out.partition("evaluated step 3")[2]
    for r in (0, 1):
        assert f"{again.metrics[f'eval/accuracy/{r}']:.2%}" in re.search(rf"seed {r} .*", table)[0]


@pytest.mark.slow
def test_all_members_begin_with_the_weights_of_another_run(tmp_path):
    first = train.run(config(1, total="3st"), tmp_path / "one", data=tiny.data())
    wanted = config(
        2, total="1st", init_from=str(tmp_path / "one"), ema=0.5, optimizer=dict(name="sgd", learning_rate=0.0)
    )
    result = train.run(wanted, tmp_path / "two", data=tiny.data())
    assert all(same(result.member(r).params, first.params) for r in range(2))
    with pytest.raises(UserError, match="a run of several members"):
        train.run(config(1, init_from=str(tmp_path / "two")), data=tiny.data())


@pytest.mark.slow
def test_members_roll_back_together(tmp_path):
    """One member's fault takes a batch away from all; a fault of each comes before the next checkpoint."""
    task = Spoilt(num_classes=10)
    wanted = config(2, total="12st", on_nonfinite="rollback", checkpoint=dict(every="4st", minutes=0.0))
    result = train.run(wanted, tmp_path, data=tiny.data(), task=task)
    assert int(result.state.offset) > 0 and int(result.state.step) == 12
    assert all(int(result.member(r).state.offset) == int(result.state.offset) for r in range(2))
    assert "rolled back to step 4" in (tmp_path / "log.txt").read_text()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spoilt(Classification):
    """The loss of example 3 is NaN in epoch 1."""

    def losses(self, outputs, batch):
        return super().losses(outputs, batch) * jnp.where((batch["id"] == 3) & (batch["epoch"] == 1), jnp.nan, 1)


@pytest.mark.slow
def test_a_batch_of_members_of_their_own_devices_need_not_divide():
    job = train.build(tiny.config(replicas=4, devices=4, batch_size=5, total="2st"), data=tiny.data())
    assert job.together.layout.spread and job.rows == 20
    assert int(train.run(job.config, data=tiny.data()).state.step) == 2
    with pytest.raises(UserError, match="does not divide over 4 devices"):
        train.build(tiny.config(replicas=3, devices=4, batch_size=5), data=tiny.data())


@pytest.mark.slow
def test_a_grid_on_digits_finds_the_better_rate(tmp_path, capsys):
    """From the command line to a member's predictions."""
    command = [
        *("--config=configs/digits.py", f"--workdir={tmp_path}", "--config.model.width=8", "--config.total=6ep"),
        "--config.replicas=(('seed', 2), ('optimizer.learning_rate', (1e-5, 5e-3)))",
    ]
    assert entry.main(command) == 0
    last = {name: value for line in read(tmp_path) for name, value in line.items()}
    accuracies = [last[f"test/accuracy/{r}"] for r in range(4)]
    assert min(accuracies[1::2]) > 0.8 > max(accuracies[::2])
    assert "seed 1, learning_rate 0.005" in capsys.readouterr().out
    np.save(tmp_path / "pictures.npy", np.zeros((2, 8, 8, 1), np.uint8))
    asked = [f"--workdir={tmp_path}", f"--input={tmp_path / 'pictures.npy'}"]
    assert predict.main(asked) == 2 and "--member=0" in capsys.readouterr().err
    assert predict.main([*asked, "--member=3"]) == 0 and capsys.readouterr().out.count("\n") == 3


def read(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_steps_of_ones_own_train_side_by_side(monkeypatch):
    """A GAN: its optimizers take their numbers from the config, so these may vary."""
    monkeypatch.syspath_prepend(REPOSITORY)
    wanted = configfile.read(f"{REPOSITORY}/examples/gan.py")
    changes = dict(batch_size=32, total="3st", devices=1, terminal="quiet", tensorboard=False, test="no")
    for key, value in (changes | dict(replicas=(("optimizer.learning_rate", (1e-3, 2e-3)),))).items():
        wanted[key] = value
    result = train.run(wanted)
    for r, each in enumerate(result.job.together.members):
        alone = train.run(grid.config_of(checked(wanted), each))
        for a, b in zip(
            jax.tree.leaves(result.member(r).state.params), jax.tree.leaves(alone.state.params), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def stubborn(learning_rate, momentum: float = 0.9):
    """An optimizer that decides in Python."""
    return optax.sgd(learning_rate, momentum if momentum > 0.5 else None)


def test_a_number_that_is_decided_by_in_python_is_refused_by_name():
    wanted = config(
        (("optimizer.momentum", (0.8, 0.9)),),
        optimizer=dict(name=f"{__name__}:stubborn", learning_rate=0.1),
    )
    with pytest.raises(
        UserError, match=r"varies 'optimizer\.momentum', which step supervised with .*stubborn does not take"
    ):
        train.build(wanted, data=tiny.data())


class Drawn(ArraySource):
    """A VaryingSource: its examples are drawn by the seed, on the host."""

    def varied(self, seed):
        return self

    def describe(self, number):
        return str(number)


def test_a_set_that_is_drawn_by_the_seed_serves_one_seed():
    roles = tiny.data().open()
    data = dataclasses.replace(tiny.data(), open=lambda: roles | {"train": Drawn(roles["train"].get(np.arange(64)))})
    with pytest.raises(UserError, match="varies 'seed', by which data set tiny draws its examples on the host"):
        train.build(config(2), data=data)
    assert train.build(config((("clip_norm", (1.0, 2.0)),)), data=data).seeds == (0, 0)
