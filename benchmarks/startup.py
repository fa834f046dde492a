"""How long until something happens. Reference: a process that imports the libraries and ends."""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.table import Row

ROUNDS = 7
ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = "import jax, flax, optax, orbax.checkpoint"
PACKAGE = "import jaxtrain.train"
# The command itself, left as soon as the first step of digits is done.
FIRST_STEP = """
import os, sys
from jaxtrain import main
imported = main._imported
def leave(loop):
    import jax
    jax.block_until_ready(loop.state.params)
    os._exit(0 if loop.step == 1 else 1)
def watched(name):
    module = imported(name)
    if name == "train":
        module.Loop.write_interval = leave
    return module
main._imported = watched
sys.argv[1:] = [
    "--config={root}/configs/digits.py", "--workdir={folder}/" + str(os.getpid()), "--config.report_every=1st"
]
main.command()
"""


def measure() -> Iterator[Row]:
    """Import, and process start to the first step with a warm compile cache."""
    with tempfile.TemporaryDirectory() as folder:
        programs = {
            "libraries": LIBRARIES,
            "package": PACKAGE,
            "first": FIRST_STEP.format(root=ROOT, folder=folder),
        }
        seconds: dict[str, list[float]] = {name: [] for name in programs}
        for turn in range(ROUNDS + 1):
            for name, program in programs.items():
                taken = _seconds(program)
                if turn:  # the first turn warms the compile cache and the file system
                    seconds[name].append(taken)
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    for name, key, aim in (
        ("import jaxtrain.train ÷ its libraries", "package", 1.15),
        ("process start to first digits step ÷ import of the libraries", "first", 2.0),
    ):
        ratio = statistics.median(a / b for a, b in zip(seconds[key], seconds["libraries"], strict=True))
        yield Row(name, ratio, aim, f"{middle[key]:.2f} s ÷ {middle['libraries']:.2f} s")


def _seconds(program: str) -> float:
    # As installed: with bytecode on disk, which the first turn writes.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL, cwd=ROOT, env=environment)
    return time.perf_counter() - began
