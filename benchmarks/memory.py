"""The most memory that a run takes. Reference: its train step, jitted and donated, in a bare loop on one batch.

Each in a process of its own, of which the operating system tells the peak.
"""

import resource
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median

import jax
import numpy as np

from benchmarks.table import Row
from benchmarks.turns import interleaved, ratio
from jaxtrain import precision, train
from jaxtrain.config import base_config
from jaxtrain.data import sources

ROUNDS = 3
WIDTH, BATCH, STEPS = 4096, 256, 20


def measure(rounds: int = ROUNDS, width: int = WIDTH) -> Iterator[Row]:
    """Of an MLP whose parameters and moments are some 220 MB, on a CPU, where they are the process's own."""
    found = interleaved({name: partial(_peak, name, width) for name in ("run", "bare")}, rounds)
    detail = f"{median(found['run']):.0f} MiB ÷ {median(found['bare']):.0f} MiB"
    yield Row("peak memory of a run ÷ of its bare step", ratio(found["run"], found["bare"]), 1.05, detail)


def _peak(name: str, width: int) -> float:
    """MiB."""
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-m", "benchmarks.memory", name, str(width)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, cwd=root).stdout.split()[-1])


def train_and_tell(name: str, width: int) -> float:
    """Trains in this process; the peak of its resident memory, in MiB."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (4 * BATCH, 8, 8, 1), dtype=np.uint8)
    data = sources.from_arrays(images, np.arange(4 * BATCH, dtype=np.int32) % 10, validation=0, test=0)
    config = base_config()
    config.model = dict(name="mlp", hidden=(width, width))
    config.batch_size, config.devices, config.total = BATCH, 1, f"{STEPS}st"
    config.report_every, config.eval_every, config.test, config.terminal = "5st", "", "no", "quiet"
    if name == "run":
        train.run(config, data=data)
    else:
        job = train.build(config, data=data)
        state, step = job.initial(), jax.jit(job.steps.train, donate_argnums=0)
        with job.batches() as batches:
            batch = next(batches)
        with precision.scope(job.policy):
            for _ in range(STEPS):
                state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
    return peak()


def peak() -> float:
    """The most resident memory that this process has had, in MiB.

    On Linux that since it began as this program: what `getrusage` tells there is the parent's, where that had more.
    """
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        return int(line.split()[1]) / 2**10
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / (2**20 if sys.platform == "darwin" else 2**10)


if __name__ == "__main__":
    print(train_and_tell(sys.argv[1], int(sys.argv[2])))
