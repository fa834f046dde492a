"""`python -m jaxtrain.compare_precision`: the steps of the run itself in each precision; a mistake costs one line."""

import dataclasses
import math
import types

import pytest
import tiny

from jaxtrain import compare_precision, train
from jaxtrain.compare_precision import Measured, measure, table
from jaxtrain.errors import UserError

SMOKE = "--config=configs/digits.py:smoke"


def test_the_steps_are_those_of_the_run():
    config = tiny.config(total="4st", report_every="1st", test="no", eval_every="", devices=1)
    found = measure(train.build(config, data=tiny.data()), 3)
    history = train.run(config, data=tiny.data()).history
    assert found.losses == pytest.approx([line["train/loss"] for line in history if "train/loss" in line][:3], rel=1e-5)
    assert (found.precision, found.platform, found.batch_size, found.of_device) == ("float32", "cpu", 16, False)
    assert found.memory > 16 * 8 * 8 and found.step_seconds > 0 and found.compile_seconds > 0


MEASURED = Measured("float32", "cpu", 16, [4.0, 3.0, 2.0, 1.0], 0.5, 2.0, 3_000_000, False)


def test_a_table_says_what_differs_and_what_was_left_out():
    half = dataclasses.replace(
        MEASURED, precision="float16", losses=[math.nan, 3.0, 2.0, 1.1], step_seconds=0.25, memory=2_000_000
    )
    text = table([MEASURED, half])
    header, first, second, *notes = text.splitlines()
    assert header.split("  ")[0] == "precision" and "loss at 3" in header and "memory MB" in header
    assert first.split() == [
        "float32",
        "4.0000",
        "3.0000",
        "2.0000",
        "1.0000",
        "+0.00%",
        "500.00",
        "1.00×",
        "2.0",
        "3.0",
    ]
    assert second.split() == [
        "float16",
        "nan",
        "3.0000",
        "2.0000",
        "1.1000",
        "+10.00%",
        "250.00",
        "2.00×",
        "2.0",
        "2.0",
    ]
    assert "float16: 1 of the updates not finite" in notes[-1] and "its own analysis" in text
    alone = table([dataclasses.replace(half, of_device=True, losses=[math.nan])])
    assert "nan%" in alone.splitlines()[1] and "the peak of the device" in alone


def test_a_step_without_a_loss_cannot_be_compared():
    job = types.SimpleNamespace(outcome={"fake": 0, "real": 0}, step_name="my_lab.gan:steps")
    with pytest.raises(UserError, match="my_lab.gan:steps reports no `loss`.*fake, real"):
        measure(job, 1)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "no config given: python -m jaxtrain.compare_precision"),
        ([SMOKE, "--stesp=3"], "Did you mean '--steps'"),
        ([SMOKE, "--steps=0"], "--steps=0, expected 1 or more"),
        ([SMOKE, "--precisions=float32,bfloat61"], "Did you mean 'bfloat16'"),
        ([SMOKE, "--precisions=float32,"], "'' is unknown"),
        ([SMOKE, "--config.precision=float16"], "--precisions=float32,bfloat16"),
        ([SMOKE, "--config.model.wdth=3"], "Did you mean 'width'"),
        (["--config=configs/nowhere.py"], "configs/nowhere.py"),
    ],
)
def test_mistakes_are_one_line(argv, words, capsys):
    assert compare_precision.main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


@pytest.mark.slow
@pytest.mark.parametrize(("config", "steps"), [("digits", 8), ("gpt", 4)])
def test_the_command_compares_and_writes_nothing(config, steps, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    argv = [f"--config=configs/{config}.py:smoke", f"--steps={steps}", "--config.synthetic=yes", "--config.devices=1"]
    assert compare_precision.main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split() for line in lines[1:4]}
    assert list(rows) == ["float32", "bfloat16", "float16"] and not list(tmp_path.iterdir())
    apart = [float(row[-5].rstrip("%")) for row in rows.values()]
    assert apart[0] == 0 and all(abs(each) < 3 for each in apart)
    with pytest.raises(SystemExit) as ended:  # only the process that runs it finds out, and has said so
        compare_precision.main([*argv, "--config.devices=64", "--precisions=float32,bfloat16"])
    assert ended.value.code == 2
