"""What compiling a train step takes, tracing included: layers in a loop, and a cache of compiled programs.

References: the same network of a quarter of the depth; the same with its layers one after the other; an empty cache.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial

import jax
import numpy as np

from benchmarks.table import Row
from benchmarks.turns import interleaved, ratio
from jaxtrain import precision, train
from jaxtrain.config import base_config
from jaxtrain.data import sources
from jaxtrain.job import Job
from jaxtrain.machine import compilecache

ROUNDS = 3
DEPTH = 24
CONTEXT, WIDTH, HEADS, VOCABULARY, BATCH = 64, 64, 4, 256, 8


def measure(rounds: int = ROUNDS, depth: int = DEPTH) -> Iterator[Row]:
    """A GPT of `depth` layers, narrow: what a layer holds does not matter to the compiler."""
    jobs = {"scan": _job(depth, scan=True), "quarter": _job(depth // 4, scan=True), "unrolled": _job(depth)}
    compilecache.prepare("", say=print)
    seconds = interleaved({name: partial(_compile, job) for name, job in jobs.items()}, rounds)
    seconds |= _with_a_cache(jobs["unrolled"], rounds)
    for name, over, under, aim in (
        (f"compile of {depth} layers in a loop ÷ of {depth // 4}", "scan", "quarter", 1.3),
        (f"compile of {depth} layers in a loop ÷ one after the other", "scan", "unrolled", 0.25),
        (f"compile of {depth} layers with a warm cache ÷ cold", "warm", "cold", 0.3),
    ):
        middle = [statistics.median(seconds[each]) for each in (over, under)]
        yield Row(name, ratio(seconds[over], seconds[under]), aim, f"{middle[0]:.2f} s ÷ {middle[1]:.2f} s")


def _with_a_cache(job: Job, rounds: int) -> dict[str, list[float]]:
    """Each round in a folder of its own: first nothing is there, then the program is."""
    found: dict[str, list[float]] = {"cold": [], "warm": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            compilecache.prepare(folder, say=print)
            for seconds in found.values():
                seconds.append(_compile(job))
            compilecache.prepare("", say=print)
    return found


def _compile(job: Job) -> float:
    """Seconds, with nothing left in memory of earlier ones."""
    jax.clear_caches()
    began = time.perf_counter()
    with precision.scope(job.policy):
        jax.jit(job.steps.train, donate_argnums=0).lower(job.abstract, job.abstract_batch).compile()
    return time.perf_counter() - began


def _job(depth: int, scan: bool = False) -> Job:
    config = base_config()
    config.model = dict(name="gpt", context=CONTEXT, width=WIDTH, depth=depth, heads=HEADS, scan=scan)
    config.task = dict(name="language_modelling")
    config.batch_size, config.devices = BATCH, 1
    config.eval_every, config.test = "", "no"
    tokens = np.zeros((BATCH, CONTEXT + 1), np.uint8)
    return train.build(
        config, data=sources.from_arrays({"tokens": tokens}, validation=0, test=0, num_classes=VOCABULARY)
    )
