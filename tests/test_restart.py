"""A restart in a used workdir: what it may change, and what it says when the result is no reproduction (Report 25)."""

import json
import sys
import textwrap

import pytest
import tiny

from jaxtrain import train
from jaxtrain.storage import environment


def warnings(folder):
    return (folder / "log.txt").read_text()


@pytest.mark.parametrize(
    ("schedule", "told"),
    [("constant", ""), ("cosine", "was 0.025 and is 0.0375 now"), ("linear", "was 0.025 and is 0.03333 now")],
)
def test_a_longer_total_tells_the_learning_rate_before_and_after(schedule, told, tmp_path):
    shape = dict(schedule=dict(name=schedule), checkpoint=dict(every="5st", minutes=0.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Loop, "interrupted", lambda loop: loop.step >= 5)
        train.run(tiny.config(total="10st", **shape), tmp_path, data=tiny.data())
    train.run(tiny.config(total="15st", **shape), tmp_path, data=tiny.data())
    said = "total 10st → 15st: the learning rate at step 5 " + told
    assert (said in warnings(tmp_path)) == bool(told), warnings(tmp_path)
    assert ("continued, not reproduced" in warnings(tmp_path)) == bool(told)


def test_the_rate_of_a_group_counts_too(tmp_path):
    group = dict(name="sgd", learning_rate=0.1, paths="bias", schedule="linear")
    shape = dict(param_groups=(group,), checkpoint=dict(every="5st", minutes=0.0))
    train.run(tiny.config(total="10st", **shape), tmp_path, data=tiny.data())
    train.run(tiny.config(total="20st", **shape), tmp_path, data=tiny.data())
    assert "the learning rate at step 10 was 0 and is 0.05 now: continued, not reproduced" in warnings(tmp_path)
    ended = [dict(group, until="5st")]
    train.run(tiny.config(total="10st", param_groups=ended), tmp_path / "b", data=tiny.data())
    train.run(tiny.config(total="20st", param_groups=ended), tmp_path / "b", data=tiny.data())
    assert "not reproduced" not in warnings(tmp_path / "b")


def test_another_total_of_the_same_length_changes_nothing(tmp_path):
    train.run(tiny.config(total="12st", schedule=dict(name="linear")), tmp_path, data=tiny.data())
    train.run(tiny.config(total="3ep", schedule=dict(name="linear")), tmp_path, data=tiny.data())
    assert "not reproduced" not in warnings(tmp_path)


MODEL = """
    from jaxtrain.models.mlp import MLP

    def net(num_classes: int = 10, input_shape: tuple = (), *, rngs):
        return MLP(hidden=({width},), num_classes=num_classes, input_shape=input_shape, rngs=rngs)
"""


def test_changed_modules_of_a_users_own_are_told(tmp_path, monkeypatch):
    """The same name, another source: the run goes on, and says that it reproduces nothing."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lab.py").write_text(textwrap.dedent(MODEL.format(width=16)))
    config = tiny.config(model=dict(name="lab:net"), total="4st")
    train.run(config, tmp_path / "run", data=tiny.data())
    (tmp_path / "lab.py").write_text(textwrap.dedent(MODEL.format(width=16)) + "\n# another revision\n")
    monkeypatch.delitem(sys.modules, "lab")
    train.run(config, tmp_path / "run", data=tiny.data())
    assert "lab " in warnings(tmp_path / "run") and "it does not reproduce" in warnings(tmp_path / "run")


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("code", "0123456789ab", "code 0123456789ab → "),
        ("packages", {"jax": "0.0.1"}, "jax 0.0.1 → "),
        ("devices", "64 × tpu v5e", "devices 64 × tpu v5e → "),
        ("python", "3.9.1", "python 3.9.1 → "),
    ],
)
def test_another_environment_is_told_and_recorded(field, value, told, tmp_path):
    config = tiny.config(total="4st")
    train.run(config, tmp_path, data=tiny.data())
    path = tmp_path / "environment.json"
    content = json.loads(path.read_text())
    old = content["starts"][0]
    old[field] = old[field] | value if isinstance(value, dict) else value
    path.write_text(json.dumps(content))
    train.run(config, tmp_path, data=tiny.data())
    assert told in warnings(tmp_path) and "it does not reproduce" in warnings(tmp_path)
    assert len(environment.read(path)) == 2


def test_the_same_environment_says_nothing(tmp_path):
    for _ in range(2):
        train.run(tiny.config(total="4st"), tmp_path, data=tiny.data())
    assert "reproduce" not in warnings(tmp_path)
