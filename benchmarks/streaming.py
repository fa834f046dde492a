"""Whether input keeps up: what streamed batches add to a step, and random crops of JPEGs against the bare work.

References: the same step on one batch that lies on the device, in the same process; Pillow's own decode, crop and
resize of the same files in as many threads.
"""

import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np
from PIL import Image

from benchmarks.table import Row
from benchmarks.turns import interleaved, ratio
from jaxtrain import precision, train
from jaxtrain.config import base_config
from jaxtrain.data import host, order
from jaxtrain.data.folder import folder
from jaxtrain.data.sources import VaryingSource
from jaxtrain.loop.advance import plain_advance, zero_sums
from jaxtrain.machine.hardware import cpu_count

ROUNDS = 7
STEPS, BATCH = 25, 64  # of a round, of streaming
PICTURES, SIZE, SIDES = 256, 224, (500, 375)  # ImageNet's usual size


def measure(rounds: int = ROUNDS, steps: int = STEPS, pictures: int = PICTURES) -> Iterator[Row]:
    """On a folder of `pictures` JPEGs of 500×375 that this makes."""
    with tempfile.TemporaryDirectory() as name:
        _write_pictures(Path(name), pictures)
        if hasattr(os, "sched_setaffinity") and cpu_count() > 1:
            yield _streamed(rounds, steps)
        else:
            print("streaming ÷ synthetic: skipped, it needs two cores and a system that pins threads", file=sys.stderr)
        yield _crops(Path(name), rounds)


def _streamed(rounds: int, steps: int) -> Row:
    """In a process of its own: which core a thread runs on is settled when it starts."""
    command = [sys.executable, "-m", "benchmarks.streaming", str(rounds), str(steps)]
    root = Path(__file__).resolve().parent.parent
    ended = subprocess.run(command, check=True, capture_output=True, text=True, cwd=root)
    seconds = json.loads(ended.stdout.splitlines()[-1])
    middle = [1e3 * median(seconds[name]) for name in ("streamed", "synthetic")]
    detail = f"{middle[0]:.1f} ms ÷ {middle[1]:.1f} ms, compute on one core, loader on another"
    return Row("step on streamed CIFAR pictures ÷ on one batch", ratio(*seconds.values()), 1.03, detail)


def pinned(rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds a step, streamed and synthetic. Threads stay on the core on which their creator was."""
    compute, loader, *_ = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {compute})
    job = train.build(_config())
    state, sums, advance = job.initial(), zero_sums(job), plain_advance(job)
    os.sched_setaffinity(0, {loader})
    with job.batches() as batches:
        batch = next(batches)  # by which time the loader's threads are there
        os.sched_setaffinity(0, {compute})

        def run(streamed: bool) -> float:
            nonlocal state, sums
            began = time.perf_counter()
            with precision.scope(job.policy):
                for _ in range(steps):
                    state, sums = advance(state, sums, next(batches) if streamed else batch, 1)
            jax.block_until_ready(state)
            return (time.perf_counter() - began) / steps

        return interleaved({"streamed": partial(run, True), "synthetic": partial(run, False)}, rounds)


def _config() -> Any:
    """A CNN on CIFAR-10, on noise of its shape where TFDS_DATA_DIR has none."""
    config = base_config()
    config.data = dict(name="tfds", dataset="cifar10")
    config.synthetic = "if_absent"
    config.model = dict(name="cnn", width=16)
    config.augment = (dict(name="flip"), dict(name="crop", padding=4))
    config.batch_size, config.devices = BATCH, 1
    config.steps_per_dispatch, config.data.resident = 1, "no"
    config.eval_every, config.test = "", "no"
    return config


def _crops(root: Path, rounds: int) -> Row:
    """Of rates, so that more is better."""
    source = folder(dir=str(root), size=SIZE, validation=0, test=0).open()["train"]
    assert isinstance(source, VaryingSource)
    varied, files = source.varied(0), sorted(root.rglob("*.jpg"))
    batch = min(32, len(files))
    plan = order.Shuffled((0,), batch, len(files))
    steps = len(files) // batch

    def ours() -> float:
        began = time.perf_counter()
        for _ in host.batches(varied, lambda step: plan(step)[0], 0, steps):
            pass
        return time.perf_counter() - began

    def bare() -> float:
        began = time.perf_counter()
        with ThreadPoolExecutor(cpu_count()) as pool:
            for _ in pool.map(_decode_and_crop, files[: steps * batch], range(steps * batch)):
                pass
        return time.perf_counter() - began

    seconds = interleaved({"bare": bare, "ours": ours}, rounds)
    rates = [steps * batch / median(seconds[name]) for name in ("ours", "bare")]
    detail = f"{rates[0]:,.0f}/s ÷ {rates[1]:,.0f}/s"
    return Row(
        "random crops of 224 out of JPEGs a second ÷ the bare work",
        ratio(*seconds.values()),
        0.9,
        detail,
        at_least=True,
    )


def _decode_and_crop(path: Path, seed: int) -> np.ndarray:
    """Nothing but the work: read, decode, a random part of at least 8 % of the area, resized."""
    random = np.random.default_rng(seed)
    with Image.open(io.BytesIO(path.read_bytes())) as picture:
        width, height = picture.size
        share = random.uniform(0.08, 1) ** 0.5
        left, top = random.uniform(0, width * (1 - share)), random.uniform(0, height * (1 - share))
        box = (left, top, left + share * width, top + share * height)
        return np.asarray(picture.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box))


def _write_pictures(root: Path, number: int) -> None:
    """Blurred noise, which takes a JPEG of some 40 KB, half of it in each of two classes."""
    rng = np.random.default_rng(0)
    for name in range(number):
        small = Image.fromarray(rng.integers(0, 256, (SIDES[1] // 6, SIDES[0] // 6, 3), np.uint8))
        path = root / "ab"[name % 2] / f"{name}.jpg"
        path.parent.mkdir(exist_ok=True)
        small.resize(SIDES, Image.Resampling.BICUBIC).save(path, quality=90)


if __name__ == "__main__":
    print(json.dumps(pinned(*map(int, sys.argv[1:]))))
