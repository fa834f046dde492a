"""benchmarks/gpu.py runs from end to end where there is no GPU, and what goes wrong in it is seen."""

import io
import json
import os
import subprocess
import sys
import tarfile

import numpy as np
import pytest
from conftest import QUICK_FLAGS, REPOSITORY
from PIL import Image

from benchmarks import gpu


@pytest.mark.slow
def test_every_part_runs_at_toy_size(tmp_path):
    """On two devices, with pictures from an archive."""
    archive = tmp_path / "pictures.tar.xz"
    with tarfile.open(archive, "w:xz") as tar:
        for number in range(600):
            picture = io.BytesIO()
            Image.fromarray(np.full((32, 32, 3), number % 256, np.uint8)).save(picture, "JPEG")
            entry = tarfile.TarInfo(f"{'train' if number < 480 else 'test'}/class{number % 10}/{number}.jpg")
            entry.size = picture.tell()
            picture.seek(0)
            tar.addfile(entry, picture)
    command = [sys.executable, "-m", "benchmarks.gpu", "--toy", "--minutes=30", f"--output={tmp_path / 'found.json'}"]
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count=2 {QUICK_FLAGS}",  # how fast it is does not matter here
        "CIFAR_JPEG": str(archive),
        "XDG_CACHE_HOME": str(tmp_path),
    }
    ended = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    found = json.loads((tmp_path / "found.json").read_text())["parts"]
    assert list(found) == list(gpu.PARTS)
    assert found["recipe"]["pictures"] == "JPEG files" and 0 <= found["recipe"]["test_accuracy"] <= 1
    figures = {
        "recipe": ("steps", "seconds", "compile_seconds", "upload_seconds", "all_in_all_seconds"),
        "resnet50": ("images_per_second", "step_ms", "tflops"),
        "vit_b16": ("images_per_second", "step_ms", "tflops"),
        "gpt2_124m": ("tokens_per_second", "step_ms", "tflops"),
        "loop": ("bare_step_ms",),
        "save": ("stall_ms", "save_seconds"),
        "first_step": ("cold_seconds", "warm_seconds"),
        "several": ("devices", "efficiency", "all_reduce_gb_per_second"),
    }
    for part, names in figures.items():
        assert all(found[part][name] > 0 for name in names), (part, found[part])


def test_a_part_that_fails_is_written_down_and_told_by_the_exit_code(monkeypatch, tmp_path, capsys):
    def broken(sizes):
        raise ValueError("no such\nthing")

    monkeypatch.setattr(gpu, "PARTS", {"broken": broken, "well": lambda sizes: {"figure": sizes.of(1, 2)}})
    assert gpu.main(["--toy", f"--output={tmp_path / 'found.json'}"]) == 1
    parts = json.loads((tmp_path / "found.json").read_text())["parts"]
    assert parts["broken"]["error"] == "ValueError: no such thing" and parts["well"]["figure"] == 2
    assert gpu.main(["well", "--minutes=-1"]) == 0
    assert json.loads(capsys.readouterr().out)["parts"]["well"] == {"skipped": "out of time"}


def test_aims_are_judged():
    assert gpu.judged("recipe", {"seconds": 1.1}) == {"seconds": "met (<= 1.2)"}
    assert gpu.judged("resnet50", {"images_per_second": 10}) == {"images_per_second": "missed (>= 6000)"}
    assert gpu.judged("save", {"error": "x"}) == {}
