"""Long runs (Report 49): after the warm-up nothing grows, neither arrays nor memory, threads or open files."""

import gc
import json
import os
import pathlib
import subprocess
import sys
import threading

import jax
import pytest
from conftest import QUICK_FLAGS, REPOSITORY

SCRIPT = """
import sys
import tiny
from jaxtrain import train

config = tiny.config(
    total="3000st", report_every="20st", eval_every="100st", ema=0.99, tensorboard=True, platform="cpu",
    optimizer=dict(name="adamw", learning_rate=1e-3), checkpoint=dict(every="100st", minutes=0.0), test="best",
    evals=dict(size=dict(fn="test_long_runs:sizes", source="validation", every="500st")),
)
train.run(config, sys.argv[1], data=tiny.data())
"""


def sizes(predict, source):
    """An evaluation that measures this process."""
    gc.collect()
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return {
        "resident_bytes": float(pages * os.sysconf("SC_PAGE_SIZE")),
        "live_arrays": float(len(jax.live_arrays())),
        "threads": float(threading.active_count()),
        "system_threads": float(len(os.listdir("/proc/self/task"))),
        "open_files": float(len(os.listdir("/proc/self/fd"))),
    }


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc/self/statm").exists(), reason="needs /proc to see memory and open files")
def test_nothing_grows_in_three_thousand_steps(tmp_path):
    """With reports, evaluations, checkpoints and event files all the way; a process of its own, on one device."""
    tests = str(REPOSITORY / "tests")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([tests, str(REPOSITORY)]), "XLA_FLAGS": QUICK_FLAGS}
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], env=environment, check=True, timeout=300)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rows = [line for line in lines if "eval_size/live_arrays" in line]
    assert [row["step"] for row in rows] == [500, 1000, 1500, 2000, 2500, 3000]
    seen = {name: [row[f"eval_size/{name}"] for row in rows] for name in sizes(None, None)}
    print(seen)
    assert max(seen["resident_bytes"]) - seen["resident_bytes"][0] < 20e6
    for name, most in (("live_arrays", 5), ("threads", 2), ("system_threads", 4), ("open_files", 3)):
        assert max(seen[name]) - min(seen[name]) <= most, (name, seen[name])
