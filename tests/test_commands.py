"""The commands as a user types them, and every config that comes with the package."""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest
from conftest import QUICK_FLAGS

from jaxtrain import main as entry
from jaxtrain import train
from jaxtrain.config import load

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONFIGS = sorted(path.name for path in (ROOT / "configs").glob("*.py"))
QUICK = ("digits.py", "gpt.py")  # to compile; the others run with the slow tests, and are killed there (test_kills.py)
RUNS = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CONFIGS]


def command(*arguments, cwd=ROOT, **environment):
    """A process of its own with one device, as at home."""
    variables = os.environ | {"XLA_FLAGS": QUICK_FLAGS, "PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(
        [sys.executable, "-m", "jaxtrain.main", *arguments], capture_output=True, text=True, env=variables, cwd=cwd
    )


def is_complete(workdir):
    """It holds what a run that went through leaves behind."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    for key in ("train/loss", "eval/accuracy", "test/accuracy"):
        assert any(key in line for line in lines), key
    for file in ("config.json", "environment.json", "log.txt"):
        assert (workdir / file).stat().st_size
    assert list(workdir.glob("events.out.tfevents.*"))


@pytest.mark.parametrize("name", QUICK)
def test_smoke_trains_evaluates_saves_and_is_done_when_run_again(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TFDS_DATA_DIR", os.environ.get("TFDS_DATA_DIR", str(ROOT.parent / "shared" / "tfds")))
    arguments = [f"--config=configs/{name}:smoke", f"--workdir={tmp_path}", "--config.devices=2"]
    assert entry.main(arguments) == 0
    is_complete(tmp_path)
    capsys.readouterr()
    assert entry.main(arguments) == 0
    assert "already finished" in capsys.readouterr().out


@pytest.mark.parametrize("name", RUNS)
def test_smoke_without_the_data_is_synthetic_and_says_so(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "empty"))
    synthetic = "--config.synthetic=yes" if name == "digits.py" else "--config.report_every=5st"
    arguments = [f"--config=configs/{name}:smoke", f"--workdir={tmp_path / 'run'}", "--config.devices=2", synthetic]
    assert entry.main(arguments) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if "epoch" in line and "loss" in line]
    assert shown and all("SYNTHETIC" in line for line in shown)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["synthetic"] for line in lines)


# Made for larger machines, or for weights and data that a user brings.
MAY_BE_UNMEASURED = {"imagenet.py", "gpt2_124m.py", "finetune.py"}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_header_gives_command_hardware_time_accuracy_and_runs(name):
    spec = importlib.util.spec_from_file_location(name[:-3], ROOT / "configs" / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    header = module.__doc__
    assert f"python -m jaxtrain.main --config=configs/{name}" in header
    for word in ("Hardware", "Time", "Accuracy", "Runs"):
        (told,) = re.findall(rf"^{word}: (.*)$", header, re.MULTILINE)
        measured = "not measured" not in told and re.search(r"[1-9]", told)
        assert measured or (name in MAY_BE_UNMEASURED and re.match("0 at this size|not measured yet", told)), word


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "parameters"), [("resnet", 25_557_032), ("vit", 22_050_664 - 2 * 384), ("convnext", 28_589_128)]
)
def test_imagenet_is_traced_at_full_size(model, parameters, tmp_path):
    """The whole step on the whole batch, over eight devices: shapes only, nothing is read, allocated or compiled."""
    for number in range(1000):
        for role in ("train", "val"):
            picture = tmp_path / role / f"n{number:08}" / "1.jpg"
            picture.parent.mkdir(parents=True)
            picture.write_bytes(b"")
    job = train.build(load(f"configs/imagenet.py:data={tmp_path},model={model}"))
    assert job.abstract_batch["image"].shape == (1024, 224, 224, 3)
    # Mean pooling has neither the CLS token nor its position.
    assert sum(leaf.size for leaf in jax.tree.leaves(job.abstract.params)) == parameters
    assert {"loss", "top5_accuracy"} <= job.outcome.keys() and job.outcome["loss"].total.shape == ()


def test_one_command_then_evaluate_then_print(tmp_path):
    digits = "--config=configs/digits.py:smoke"
    trained = command(digits, f"--workdir={tmp_path}")
    assert trained.returncode == 0, trained.stderr
    assert "\x1b" not in trained.stdout and "finished at step 40" in trained.stdout
    evaluated = command(digits, f"--workdir={tmp_path}", "--mode=eval")
    test_accuracy = re.search(r"test +accuracy (\S+)", trained.stdout).group(1)
    assert evaluated.returncode == 0 and test_accuracy in evaluated.stdout
    shown = command(digits, "--print", cwd=ROOT)
    assert shown.returncode == 0 and "head" in shown.stdout and "batch_size" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--config.platform=gpu"], "gpu"),
        (["--config.model=resnt"], "resnet"),
        (["--config.data=tfds", "--config.data.dataset=cifar11"], "cifar10"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_is_one_line_and_leaves_nothing(arguments, named, tmp_path):
    """Reports 9 and 46, through a process of its own."""
    found = command("--config=configs/digits.py:smoke", f"--workdir={tmp_path / 'run'}", *arguments)
    lines = [line for line in found.stderr.splitlines() if line]
    assert found.returncode == 2 and len(lines) == 1 and named in lines[0], found.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--config=configs/digits.py:smoke", "--config.batch_size=63", "--config.devices=2"], "63"),
        (["--config=configs/digits.py:smoke", "--config.optimizer.learning_rat=1"], "learning_rate"),
        # Report 44, for a set that was never prepared here.
        (["--config=configs/cifar.py", "--config.data.dir=nothing"], "TFDS_DATA_DIR"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_in_this_process_is_one_line_and_leaves_nothing(arguments, named, tmp_path, monkeypatch, capsys):
    """Reports 9, 44 and 46."""
    monkeypatch.chdir(ROOT)
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    arguments = [each.replace("=nothing", f"={tmp_path / 'nothing'}") for each in arguments]
    assert entry.main([*arguments, f"--workdir={tmp_path / 'run'}"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(lines) == 1 and named in lines[0], lines
    assert not (tmp_path / "run").exists()


SHORT = ("--config.model=mlp", "--config.total=2st", "--config.schedule.warmup=1st")


def test_an_unusable_cache_folder_stops_nothing(tmp_path):
    """Report 48."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    found = command(
        "--config=configs/digits.py:smoke", f"--workdir={tmp_path / 'run'}", f"--config.compile_cache={blocked}/cache",
        *SHORT,
    )  # fmt: skip
    assert found.returncode == 0 and "compile" in found.stdout


def test_preset_variables_stay(tmp_path):
    """Report 45: what the user set for XLA is not touched, and TensorFlow is not imported at all for arrays."""
    code = (
        "import os, sys; from jaxtrain import main; "
        f"assert main.main({['--config=configs/digits.py:smoke', f'--workdir={tmp_path}', *SHORT]}) == 0; "
        "print(os.environ['XLA_FLAGS'], os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'], 'tensorflow' in sys.modules)"
    )
    variables = os.environ | {"XLA_FLAGS": "--xla_cpu_enable_fast_math=false", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables, cwd=ROOT)
    assert found.stdout.splitlines()[-1] == "--xla_cpu_enable_fast_math=false false False", found.stderr
