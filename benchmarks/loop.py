"""What the loop adds to a step: feed, order, metrics, reports, checks, against the bare jitted step.

Reference: the same train step, jitted and donated, called again and again on one batch that lies on the device.
"""

import statistics
import time
from collections.abc import Iterator

import jax
import numpy as np

from benchmarks.table import Row
from jaxtrain import train
from jaxtrain.config import base_config
from jaxtrain.data import sources

ROUNDS = 5


def measure() -> Iterator[Row]:
    """At a step of about 10 ms, and at one so small that there is nothing but overhead."""
    yield _compared("full loop ÷ bare step, at a 10 ms step", hidden=(1024, 1024), batch=256, steps=300, aim=1.02)
    yield _compared("full loop ÷ bare step, at a tiny step", hidden=(16,), batch=64, steps=2000, aim=None)


def _compared(name: str, hidden: tuple[int, ...], batch: int, steps: int, aim: float | None) -> Row:
    config, data = config_of(hidden, batch), data_of(batch)
    alone, whole = [], []
    for _ in range(ROUNDS):  # alternating, so that whatever else the machine does hits both
        alone.append(bare(config, data, steps))
        whole.append(full(config, data, steps))
    ratio = statistics.median(f / b for f, b in zip(whole, alone, strict=True))
    detail = f"{1e3 * statistics.median(whole):.3f} ms ÷ {1e3 * statistics.median(alone):.3f} ms a step"
    return Row(name, ratio, aim, detail)


def bare(config, data, steps: int) -> float:
    """Seconds a step."""
    job = train.build(config, data=data)
    state = job.initial()
    with job.batches() as batches:
        batch = next(batches)
    step = jax.jit(job.steps.train, donate_argnums=0)
    state, metrics = step(state, batch)
    jax.block_until_ready(metrics)
    began = time.perf_counter()
    for _ in range(steps):
        state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    return (time.perf_counter() - began) / steps


def full(config, data, steps: int) -> float:
    """Seconds a step of a whole run, start-up and compilation cancelled out: the longer run less the shorter one."""
    seconds = []
    for total in (10, 10 + steps):
        config.total = f"{total}st"
        began = time.perf_counter()
        train.run(config, data=data)
        seconds.append(time.perf_counter() - began)
    return (seconds[1] - seconds[0]) / steps


def config_of(hidden: tuple[int, ...], batch: int):
    config = base_config()
    config.model = dict(name="mlp", hidden=hidden)
    config.optimizer = dict(name="adamw", learning_rate=1e-4)
    config.batch_size = batch
    config.eval_every = ""
    config.report_every = "50st"
    config.test = "no"
    config.terminal = "quiet"
    return config


def data_of(batch: int) -> sources.Dataset:
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (8 * batch, 8, 8, 1), dtype=np.uint8)
    return sources.from_arrays(image, np.arange(8 * batch, dtype=np.int32) % 10, validation=0, test=0)
