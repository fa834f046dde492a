"""A run saved on one layout of devices and processes goes on on another: the same examples, weights and losses.

Report 39. The ids are those of the batches that the steps were given.
"""

import json
import shutil

import peer
import processes
import pytest

from jaxtrain.storage.checkpoint import Checkpoints

PIECES = (("model", 2), ("data", -1))
RULES = (("hidden/kernel", (None, "model")),)

# What changes; what the workdir's log says of it. The first run has eight devices, data=8.
LAYOUTS = {
    "one device": (dict(devices=1), "devices 8 × cpu → 1 × cpu"),
    "two": (dict(devices=2), "devices 8 × cpu → 2 × cpu"),
    "four": (dict(devices=4), "devices 8 × cpu → 4 × cpu"),
    "another mesh": (dict(mesh=PIECES), "layout data=8 → model=2 data=4"),
    "a kernel in pieces": (
        dict(mesh=PIECES, sharding_rules=RULES),
        "layout data=8 → model=2 data=4, hidden/kernel None×model",
    ),
}
QUICK = ("one device", "a kernel in pieces")


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """A run on eight devices that went through; the workdir of one that was saved at step 10; what that one saved."""
    folder = tmp_path_factory.mktemp("eight")
    through = peer.elastic(folder / "through")
    peer.elastic(folder / "saved", "10st")
    stored = Checkpoints(folder / "saved" / "checkpoints").restore_flat(10, "state/params")
    begun = {path.removeprefix("state/params/"): peer.digest(array) for path, array in stored.items()}
    return through, folder / "saved", begun


def only_warning(folder):
    (line,) = [line for line in (folder / "log.txt").read_text().splitlines() if "continues, it does not" in line]
    return line


def carries_on(found, through, begun):
    assert found["begun"] == begun and len(begun) > 3
    assert found["ids"] == through["ids"][10:] and len(found["ids"]) == 10
    assert found["losses"][11] == pytest.approx(through["losses"][11], abs=1e-5)
    for step in range(12, 21):  # rounding grows from step to step
        assert found["losses"][step] == pytest.approx(through["losses"][step], abs=1e-3)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_another_layout_carries_on(name, eight, tmp_path):
    changes, told = LAYOUTS[name]
    through, saved, begun = eight
    folder = shutil.copytree(saved, tmp_path / "run")
    carries_on(peer.elastic(folder, **changes), through, begun)
    assert len(json.loads((folder / "environment.json").read_text())["starts"]) == 2
    assert told in only_warning(folder)


def test_pieces_carry_on_as_wholes(eight, tmp_path):
    through = eight[0]
    peer.elastic(tmp_path, "10st", mesh=PIECES, sharding_rules=RULES)
    found = peer.elastic(tmp_path, devices=1)
    assert found["ids"] == through["ids"][10:]
    assert found["losses"][11] == pytest.approx(through["losses"][11], abs=1e-5)


@pytest.mark.slow
def test_two_processes_carry_on_what_one_saved_and_the_other_way(eight, tmp_path):
    through, saved, begun = eight
    folder = shutil.copytree(saved, tmp_path / "run")
    first, second = (ended.result for ended in in_two("carry_on", folder))
    carries_on(first | {"ids": joined(first, second), "losses": numbered(first)}, through, begun)
    assert first["begun"] == second["begun"] and first["losses"] == second["losses"]
    assert "processes 1 → 2; layout data=8 → model=2 data=2" in only_warning(folder)
    assert "2 processes" in (folder / "log.txt").read_text()

    first, second = (ended.result for ended in in_two("save", tmp_path / "pieces"))
    assert joined(first, second) == through["ids"][:10]
    alone = peer.elastic(tmp_path / "pieces", devices=1)
    assert alone["ids"] == through["ids"][10:]
    assert alone["losses"][11] == pytest.approx(through["losses"][11], abs=1e-5)
    assert {step: alone["losses"][step] for step in range(1, 11)} == numbered(first)


def in_two(scenario, folder):
    ended = processes.run(*[["tests/peer.py", scenario, str(folder)]] * 2, seconds=100)
    assert [each.code for each in ended] == [0, 0], ended
    return ended


def joined(first, second):
    """The ids that the two processes had of each batch, all of them once or, where a row is on both, equal."""
    batches = []
    for one, other in zip(first["ids"], second["ids"], strict=True):
        assert all(other[row] == one[row] for row in one.keys() & other.keys())
        batches.append({int(row): ids for row, ids in sorted((one | other).items(), key=lambda each: int(each[0]))})
    return batches


def numbered(found):
    """Losses by step, which JSON made a text."""
    return {int(step): loss for step, loss in found["losses"].items()}
