"""The benchmarks run, at toy sizes. What they measure is not judged here: tests are never timed."""

import math

import pytest

from benchmarks import checkpoint, data

TOYS = {
    "checkpoint": lambda: checkpoint.measure(megabytes=1, rounds=1),
    "data": lambda: data.measure(rounds=1, steps=2),
}


@pytest.mark.parametrize("name", ("checkpoint", pytest.param("data", marks=pytest.mark.slow)))
def test_a_benchmark_gives_ratios(name, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TFDS_DATA_DIR", raising=False)  # where it is absent, a set is made
    rows = list(TOYS[name]())
    assert len(rows) >= 3
    for row in rows:
        assert math.isfinite(row.ratio) and row.ratio > 0 and row.detail
