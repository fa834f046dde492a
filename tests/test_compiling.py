"""What XLA is told beside a program: in which programs, and that it knows it."""

import types

import jax
import numpy as np
import pytest
import tiny

from jaxtrain import evaluate, job, train
from jaxtrain.machine import compiling


def mesh_of(platform):
    return types.SimpleNamespace(devices=np.array([types.SimpleNamespace(platform=platform)]))


@pytest.mark.parametrize(
    ("platform", "version", "told"),
    [("cpu", (0, 10, 2), True), ("cpu", (0, 12, 0), True), ("cpu", (0, 13, 0), False), ("gpu", (0, 10, 2), False)],
)
def test_options_are_told_where_they_were_measured(platform, version, told, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", version)
    assert bool(compiling.options(mesh_of(platform))) == told


PROGRAMS = {
    "train": lambda made, state, batch: train.run(made.config, data=tiny.data()),
    "step": lambda made, state, batch: made.step(state, batch),
    "evaluate": lambda made, state, batch: made.evaluate("test", state),
    "predict": lambda made, state, batch: made.predict(state, np.asarray(batch["image"])),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_of_a_run_is_told(program, monkeypatch):
    """XLA refuses an option that it does not know, and so shows where one came."""
    made = train.build(tiny.config(total="1st"), data=tiny.data())
    state = made.initial()
    with made.batches() as batches:
        batch = next(batches)
    monkeypatch.setattr(compiling, "options", lambda mesh: {"no_such_option": "1"})
    for kept in (evaluate._programs, job._caller):
        kept.cache_clear()
    try:
        with pytest.raises(Exception, match="no_such_option"):
            PROGRAMS[program](made, state, batch)
    finally:
        for kept in (evaluate._programs, job._caller):
            kept.cache_clear()
