"""Fused steps against single ones, and augmentation of a resident set against tf.data's."""

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.table import Row
from benchmarks.turns import interleaved, ratio
from jaxtrain import sharding, train
from jaxtrain.config import base_config
from jaxtrain.data import augment, resident, sources
from jaxtrain.data.order import Shuffled
from jaxtrain.data.tensorflow_cpu import tensorflow
from jaxtrain.loop.advance import plain_advance, zero_sums
from jaxtrain.loop.intake import open_intake

ROUNDS = 5
STEPS = 960  # a multiple of 32
PICTURES, BATCH, SIDE, PADDING = 5_000, 500, 32, 4


def measure() -> Iterator[Row]:
    """A tiny MLP on resident data; flips and crops of 32×32 pictures."""
    found = interleaved({"single": _timed(_steps(1)), "fused": _timed(_steps(32))}, ROUNDS)
    detail = "{single:.0f} µs single, {fused:.0f} µs a step of 32".format(**_medians(found, 1e6 / STEPS))
    yield Row(
        "steps/s, 32 fused ÷ single, tiny MLP", ratio(found["single"], found["fused"]), 1.4, detail, at_least=True
    )
    found = interleaved({"ours": _timed(_on_device()), "theirs": _timed(_by_tf_data())}, ROUNDS)
    detail = "{ours:.2f} µs a picture, {theirs:.2f} by tf.data".format(**_medians(found, 1e6 / PICTURES))
    name = "pictures/s, gather, flip and crop of a resident set ÷ tf.data's flip and crop"
    yield Row(name, ratio(found["theirs"], found["ours"]), 5, detail, at_least=True)


def _timed(function: Callable[[], None]) -> Callable[[], float]:
    """The seconds that it takes."""

    def seconds() -> float:
        began = time.perf_counter()
        function()
        return time.perf_counter() - began

    return seconds


def _medians(found: Mapping[str, list[float]], unit: float) -> dict[str, float]:
    return {name: unit * statistics.median(seconds) for name, seconds in found.items()}


def _steps(number: int) -> Callable[[], None]:
    """Takes STEPS steps, `number` a dispatch."""
    config = base_config()
    config.model = dict(name="mlp", hidden=(16,))
    config.batch_size = 64
    config.steps_per_dispatch = number
    config.data.resident = "yes"
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (1024, 8, 8, 1), dtype=np.uint8)
    job = train.build(config, data=sources.from_arrays(images, np.arange(1024) % 10, validation=0, test=0))
    advance, intake = plain_advance(job), open_intake(job, 0)
    state, sums = job.initial(), zero_sums(job)

    def run() -> None:
        nonlocal state, sums
        left = STEPS
        while left:
            data, steps = intake.take(left)
            state, sums = advance(state, sums, data, steps)
            left -= steps
        jax.block_until_ready((state, sums))

    return run


def _pictures() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (PICTURES, SIDE, SIDE, 3), dtype=np.uint8)


def _on_device() -> Callable[[], None]:
    mesh = sharding.make_mesh(jax.devices()[:1])
    source = sources.ArraySource({"image": _pictures()})
    columns, plan = resident.upload(source, mesh, lambda batch: None), Shuffled((0,), BATCH, PICTURES)
    change = augment.chain([augment.flip(), augment.crop(PADDING)])

    @jax.jit
    def batch(columns, position):
        found = resident.batch(columns, position, plan, mesh)
        return change(jax.random.key(position), found)["image"]

    def run() -> None:
        for position in range(PICTURES // BATCH):
            batch(columns, jnp.uint32(position)).block_until_ready()

    return run


def _by_tf_data() -> Callable[[], None]:
    """Decoded pictures in memory, mapped in parallel, batched: the usual pipeline."""
    tf = tensorflow()
    pictures = _pictures()

    def change(picture):
        picture = tf.image.random_flip_left_right(picture)
        picture = tf.pad(picture, [[PADDING, PADDING], [PADDING, PADDING], [0, 0]], mode="REFLECT")
        return tf.image.random_crop(picture, [SIDE, SIDE, 3])

    dataset = (
        tf.data.Dataset.from_tensor_slices(pictures)
        .shuffle(PICTURES)
        .map(change, num_parallel_calls=tf.data.AUTOTUNE)
        .batch(BATCH)
        .prefetch(tf.data.AUTOTUNE)
    )
    return functools.partial(_drain, dataset)


def _drain(dataset) -> None:
    for _ in dataset.as_numpy_iterator():
        pass
