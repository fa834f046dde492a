"""The benchmarks run, at toy sizes. What they measure is not judged here: tests are never timed."""

import math

import pytest

from benchmarks import checkpoint

TOYS = {"checkpoint": lambda: checkpoint.measure(megabytes=1, rounds=1)}


@pytest.mark.parametrize("name", TOYS)
def test_a_benchmark_gives_ratios(name):
    rows = list(TOYS[name]())
    assert len(rows) >= 3
    for row in rows:
        assert math.isfinite(row.ratio) and row.ratio > 0 and row.detail
