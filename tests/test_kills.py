"""Runs that are killed again and again, and faults inflicted on them, process by process, as a user would see it."""

import os

import pytest
from conftest import REPOSITORY

from jaxtrain import verify

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def at_home(monkeypatch):
    """One device, as at home, in a folder from which configs and examples are found."""
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("TFDS_DATA_DIR", os.environ.get("TFDS_DATA_DIR", str(REPOSITORY.parent / "shared" / "tfds")))


def test_twenty_kills_in_all_phases_change_no_bit(tmp_path):
    """Reports 4, 14, 35."""
    verdict = verify.verify("configs/digits.py:smoke", kills=20, minutes=20, keep=tmp_path)
    assert verdict.good, str(verdict)
    assert {"params", "opt_state", "model_state", "key", "counters", "batch ids", "metrics.jsonl", "event files"} <= {
        row.name for row in verdict.rows
    }
