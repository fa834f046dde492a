"""The benchmarks run, at toy sizes. What they measure is not judged here: tests are never timed."""

import math

import jax
import numpy as np
import pytest
from conftest import QUICK_FLAGS

from benchmarks import checkpoint, compiling, data, frameworks, memory, models, replicas, results, streaming
from benchmarks.table import Row, render
from benchmarks.turns import interleaved, ratio
from jaxtrain.config import load

TOYS = {
    "checkpoint": lambda: checkpoint.measure(megabytes=1, rounds=1),
    "data": lambda: data.measure(rounds=1, steps=2),
    "compiling": lambda: compiling.measure(rounds=1, depth=4),
    "frameworks": lambda: frameworks.measure(rounds=1, steps=50),
    "memory": lambda: memory.measure(rounds=1, width=64),
    "replicas": lambda: replicas.measure(members=2, changes=("model.width=4", "total=40st", "report_every=10st")),
    "models": lambda: models.measure(rounds=1, steps=1, shrink=8),
    "streaming": lambda: streaming.measure(rounds=1, steps=2, pictures=8),
}
QUICK = {"checkpoint"}


@pytest.fixture(autouse=True)
def as_at_home():
    """Keras, and what is written by hand, rely on rank promotion."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in TOYS])
def test_a_benchmark_gives_ratios(name, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XLA_FLAGS", QUICK_FLAGS)  # of the processes that it starts
    monkeypatch.delenv("TFDS_DATA_DIR", raising=False)  # where it is absent, a set is made
    rows = list(TOYS[name]())
    assert rows
    for row in rows:  # a difference of two times may be below zero, where there is little to time
        assert math.isfinite(row.ratio) and row.ratio and row.detail


@pytest.mark.slow
@pytest.mark.parametrize("network", models.networks(shrink=8), ids=lambda network: network.title)
def test_the_network_by_hand_is_the_same_network(network):
    job = models.our_job(network)
    state = job.initial()
    rng = np.random.default_rng(0)

    def random(leaf):  # what begins at zero would hide what it is multiplied with
        return leaf + 0.1 * rng.standard_normal(leaf.shape, np.float32)

    params, statistics = jax.tree.map(random, state.params), state.model_state
    inputs, _ = network.examples()
    ours_of = inputs if network.length else np.float32(inputs / 255)
    ours, after = job.parts.model.apply(params, statistics, ours_of, key=jax.random.key(0), train=True)
    theirs, theirs_after = network.hand(params, statistics, inputs)
    assert np.abs(ours).max() > 0.1
    np.testing.assert_allclose(theirs, ours, rtol=1e-3, atol=1e-4 * np.abs(ours).max())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), theirs_after, after)


@pytest.mark.slow
def test_pytorch_learns_the_same_from_the_same_weights(shared_tfds, monkeypatch):
    pytest.importorskip("torch", reason="PyTorch is no dependency; this compares with it where it is installed")
    from benchmarks import torch_char_lm

    monkeypatch.setenv("TFDS_DATA_DIR", str(shared_tfds))
    config = load("configs/gpt.py:width=16,depth=1,heads=2,window=16,batch_size=8,steps=60")
    config.schedule.warmup, config.eval_every, config.report_every = "20st", "30st", "10st"
    config.evals, config.test, config.terminal, config.devices = {}, "no", "quiet", 1
    lines = [line.strip("| ").split(" | ") for line in torch_char_lm.compared(config)]
    losses = {step: (float(ours), float(theirs)) for step, ours, theirs in lines[2:-1]}
    assert losses.keys() == {"30", "60"} and losses["60"][0] < losses["30"][0]
    for ours, theirs in losses.values():
        assert abs(ours - theirs) < 1e-3


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (Row("a", 1.0, 1.0, ""), "met"),
        (Row("a", 1.1, 1.0, ""), "missed"),
        (Row("a", 3.0, 3.0, "", at_least=True), "met"),
        (Row("a", 2.9, 3.0, "", at_least=True), "missed"),
        (Row("a", 2.9, None, ""), ""),
    ],
)
def test_the_aim_is_a_bound_from_above_or_below(row, verdict):
    assert row.verdict == verdict
    assert f"| {verdict} |" in render([row]) and ("≥" in render([row])) == row.at_least


def test_turns_go_both_ways_and_the_first_one_only_warms_up():
    order: list[str] = []
    found = interleaved({name: lambda name=name: order.append(name) or len(order) for name in "ab"}, rounds=2)
    assert order == ["b", "a", "a", "b", "b", "a"]
    assert found == {"a": [3, 6], "b": [4, 5]} and ratio(found["a"], found["b"]) == (3 / 4 + 6 / 5) / 2


def test_a_saved_table_replaces_its_own_section_only(tmp_path):
    path = tmp_path / "RESULTS.md"
    results.save({"loop": "| old |", "data": "| kept |"}, "yesterday, 2 cores", path)
    results.save({"loop": "| new |"}, "today, 2 cores", path)
    text = path.read_text()
    assert "old" not in text and text.count("yesterday") == text.count("today") == 1
    assert text.index("## data") < text.index("| kept |") < text.index("## loop") < text.index("| new |")
    results.save({}, "", path)
    assert path.read_text() == text
