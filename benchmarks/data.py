"""Reading by number: what a seek costs, and what random access costs beside tf.data reading the same file in order.

The set is the cifar10 of TFDS_DATA_DIR; where there is none, noise of the same shape.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from benchmarks.table import Row
from jaxtrain.data import host, order
from jaxtrain.data.feed import Feed
from jaxtrain.data.pictures import Pictures
from jaxtrain.data.tensorflow_cpu import tensorflow
from jaxtrain.data.tfds import tfds

ROUNDS = 9
BATCH = 128
STEPS = 150  # of one round, for rates
FAR = 1_000_000
LOADERS = ("threads", "tf.data")


def measure(rounds: int = ROUNDS, steps: int = STEPS) -> Iterator[Row]:
    """First batches near and far; raw records and decoded pictures, `steps` batches a round."""
    with tempfile.TemporaryDirectory() as folder:
        source = _source(Path(folder), BATCH * steps)
        for loader in LOADERS:
            first = partial(_first, source, loader)
            near, far = _interleaved(partial(first, 0), partial(first, FAR), 4 * rounds)
            detail = f"{1e3 * statistics.median(far):.1f} ms ÷ {1e3 * statistics.median(near):.1f} ms, loader {loader}"
            yield Row("first batch at step 1,000,000 ÷ at step 0", _ratio(far, near), 1.1, detail)
        raw, in_order = partial(_raw, source, steps), partial(_in_order, source, steps)
        yield _compared("raw records/s by number ÷ in order", raw, in_order, rounds, steps)
        for loader in LOADERS:
            name = f"decoded pictures/s by number, loader {loader}, ÷ in order"
            decoded = partial(_decoded, source, steps, loader)
            yield _compared(name, decoded, partial(in_order, decoded=True), rounds, steps)


def _compared(name: str, ours: Callable[[], float], theirs: Callable[[], float], rounds: int, steps: int) -> Row:
    """Of rates, so that more is better; the reference is tf.data."""
    one, other = _interleaved(ours, theirs, rounds)
    rates = [BATCH * steps / statistics.median(each) for each in (one, other)]
    return Row(name, _ratio(other, one), None, f"{rates[0]:,.0f}/s ÷ {rates[1]:,.0f}/s")


def _interleaved(one: Callable[[], float], other: Callable[[], float], rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of each, in turn and either first, so that whatever else the machine does hits both."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 1):
        for place, measured in [(0, one), (1, other)][:: 1 if turn % 2 else -1]:
            seconds[place].append(measured())
    return seconds[0][1:], seconds[1][1:]  # the first turn warms up


def _ratio(over: list[float], under: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def _first(source: Pictures, loader: str, step: int) -> float:
    plan = order.Shuffled((0,), BATCH, len(source))  # which remembers what it planned
    began = time.perf_counter()
    with Feed(source, plan, SingleDeviceSharding(jax.devices()[0]), start=step, kind=loader) as feed:
        jax.block_until_ready(next(feed))
        return time.perf_counter() - began


def _raw(source: Pictures, steps: int) -> float:
    """In one thread."""
    plan = order.Shuffled((0,), BATCH, len(source))
    began = time.perf_counter()
    for step in range(steps):
        source.records(plan(step)[0])
    return time.perf_counter() - began


def _decoded(source: Pictures, steps: int, loader: str) -> float:
    plan = order.Shuffled((0,), BATCH, len(source))
    began = time.perf_counter()
    for _ in host.batches(source, lambda step: plan(step)[0], 0, steps, kind=loader):
        pass
    return time.perf_counter() - began


def _in_order(source: Pictures, steps: int, decoded: bool = False) -> float:
    """As tf.data does it best: a file from its start, decoding in parallel."""
    tf = tensorflow()
    dataset = tf.data.TFRecordDataset(source.stored.paths).batch(BATCH, drop_remainder=True)
    if decoded:
        dataset = dataset.map(source.decode_graph, num_parallel_calls=tf.data.AUTOTUNE)
    began = time.perf_counter()
    for _ in dataset.prefetch(tf.data.AUTOTUNE).take(steps).as_numpy_iterator():
        pass
    return time.perf_counter() - began


def _source(folder: Path, size: int) -> Pictures:
    """The training split, whole."""
    there = (Path(os.environ.get("TFDS_DATA_DIR", folder)) / "cifar10").is_dir()
    options: dict[str, Any] = {"dataset": "cifar10"} if there else {"dataset": _made(folder, size), "dir": str(folder)}
    source = tfds(**options, validation=0, test=0).open()["train"]
    assert isinstance(source, Pictures)
    return source


def _made(folder: Path, size: int) -> str:
    """Noise, prepared as a TFDS set."""
    tensorflow()
    import tensorflow_datasets as library

    rng = np.random.default_rng(0)
    pixels = (rng.integers(0, 256, (32, 32, 3), np.uint8) for _ in range(size))
    examples = ((number, {"image": each, "label": number % 10}) for number, each in enumerate(pixels))
    image, label = library.features.Image(shape=(32, 32, 3)), library.features.ClassLabel(num_classes=10)
    library.dataset_builders.store_as_tfds_dataset(
        name="noise",
        version="1.0.0",
        features=library.features.FeaturesDict({"image": image, "label": label}),
        split_datasets={"train": examples},
        data_dir=folder,
    )
    return "noise"
