"""What an earlier version left on disk can be read by this one, for every format number there has been."""

import pathlib
import shutil

import numpy as np
import pytest
import tiny

from jaxtrain import train
from jaxtrain.result import load

KEPT = pathlib.Path(__file__).parent / "kept"
CHANGES = dict(model=dict(name="nets:Dropout"), ema=0.9, optimizer=dict(name="adamw", learning_rate=0.01))


@pytest.mark.parametrize("number", [1])
def test_a_kept_workdir_predicts_and_goes_on(number, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(KEPT / f"workdir-{number}", folder)
    pictures = tiny.data().open()["test"].get(np.arange(21))["image"]
    found = load(folder).predict(pictures)["probabilities"]
    np.testing.assert_allclose(found, np.load(KEPT / f"probabilities-{number}.npy"), rtol=1e-4, atol=1e-6)
    result = train.run(tiny.config(**CHANGES, total="30st"), folder, data=tiny.data())
    assert int(result.state.step) == 30
    assert [line["step"] for line in result.history if "train/loss" in line] == [5, 10, 15, 20, 24, 25, 30]
