"""A workdir is data: whoever wrote it gets no code to run and nothing to write outside of it."""

import json
import sys
import textwrap

import pytest
import tiny

from jaxtrain import train
from jaxtrain.errors import UserError
from jaxtrain.result import load

NAMED = "wicked:net"
MODULE = """
    import pathlib
    pathlib.Path(__file__).with_name("ran").touch()

    from jaxtrain.models.mlp import MLP

    def net(num_classes: int = 10, input_shape: tuple = (), *, rngs):
        return MLP(hidden=(16,), num_classes=num_classes, input_shape=input_shape, rngs=rngs)
"""
PLACES = {  # key of config.json -> what stands there
    "model": {"name": NAMED},
    "task": {"name": NAMED},
    "step": {"name": NAMED},
    "data": {"name": NAMED},
    "optimizer": {"name": NAMED, "learning_rate": 0.1},
    "schedule": {"name": NAMED},
    "augment": [{"name": NAMED}],
    "preprocess": [{"name": NAMED}],
    "evals": {"own": {"fn": NAMED}},
}


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """A used workdir, and a function that puts a foreign name into its config.json. The module is importable."""
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "wicked.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.syspath_prepend(tmp_path / "lab")
    monkeypatch.delitem(sys.modules, "wicked", raising=False)
    train.run(tiny.config(total="2st"), tmp_path / "run", data=tiny.data())
    path = tmp_path / "run" / "config.json"

    def spoil(key):
        content = json.loads(path.read_text())
        content["config"][key] = PLACES[key]
        path.write_text(json.dumps(content))
        return tmp_path / "run", tmp_path / "lab" / "ran"

    return spoil


@pytest.mark.parametrize("key", PLACES)
def test_a_name_in_a_workdir_imports_nothing_unless_trusted(key, workdir):
    folder, ran = workdir(key)
    with pytest.raises(UserError, match=r"wicked:net.*trust=True"):
        load(folder)
    with pytest.raises(UserError, match="holds another run.*wicked:net"):
        train.run(tiny.config(total="2st"), folder, data=tiny.data())
    with pytest.raises(UserError, match="holds another run.*wicked:net"):
        train.run(tiny.config(total="2st"), folder, mode="eval", data=tiny.data())
    assert not ran.exists() and "wicked" not in sys.modules


def test_a_trusted_workdir_is_loaded(workdir):
    folder, ran = workdir("model")
    assert int(load(folder, trust=True).state.step) == 2
    assert ran.exists()


def test_a_workdir_of_our_own_names_needs_no_trust(tmp_path):
    train.run(tiny.config(total="2st"), tmp_path, data=tiny.data())
    assert int(load(tmp_path).state.step) == 2
