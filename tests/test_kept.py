"""What an earlier version left on disk can be read by this one, for every format number there has been."""

import pathlib
import shutil

import numpy as np
import pytest
import tiny

from jaxtrain import train
from jaxtrain.result import load
from jaxtrain.storage.checkpoint import Checkpoints

KEPT = pathlib.Path(__file__).parent / "kept"
CHANGES = dict(model=dict(name="nets:Dropout"), ema=0.9, optimizer=dict(name="adamw", learning_rate=0.01))


@pytest.mark.parametrize(("number", "checkpoints"), [(1, 1), (1, 2)])
def test_a_kept_workdir_predicts_and_goes_on(number, checkpoints, tmp_path):
    """The numbers are the formats of workdir and checkpoint. Each workdir holds checkpoints of its own time."""
    folder = tmp_path / "run"
    shutil.copytree(KEPT / f"workdir-{number}", folder)
    if (newer := KEPT / f"checkpoints-{checkpoints}").exists():
        shutil.rmtree(folder / "checkpoints")
        shutil.copytree(newer, folder / "checkpoints")
    assert f'"format": {checkpoints},' in (folder / "checkpoints" / "24" / "manifest.json").read_text()
    pictures = tiny.data().open()["test"].get(np.arange(21))["image"]
    found = load(folder, trust=True).predict(pictures)["probabilities"]
    np.testing.assert_allclose(found, np.load(KEPT / f"probabilities-{number}.npy"), rtol=1e-4, atol=1e-6)
    result = train.run(tiny.config(**CHANGES, total="30st"), folder, data=tiny.data())
    assert int(result.state.step) == 30
    assert [line["step"] for line in result.history if "train/loss" in line] == [5, 10, 15, 20, 24, 25, 30]


@pytest.mark.parametrize("folder", ["workdir-1/checkpoints", "checkpoints-2"])
def test_a_kept_checkpoint_is_verified_by_its_own_checksums(folder, tmp_path):
    shutil.copytree(KEPT / folder, tmp_path / "checkpoints")
    said = []
    checkpoints = Checkpoints(tmp_path / "checkpoints", say=said.append)
    assert checkpoints.latest() == 24
    for path in [path for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()]:
        content = path.read_bytes()
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        assert checkpoints.latest() is None, path
        path.write_bytes(content)
    assert checkpoints.latest() == 24 and len(said) == 1
