"""What safety costs a checkpoint: the loop's wait for a save, the checksums, the verification on restore.

References: the same save waited for; orbax's own restore of the same files onto the same devices.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from benchmarks.table import Row
from jaxtrain.storage.checkpoint import Checkpoints
from jaxtrain.storage.manifest import Manifest, checksums

ARRAYS = 60
MEGABYTES = 500
ROUNDS = 7


def measure(megabytes: float = MEGABYTES, rounds: int = ROUNDS) -> Iterator[Row]:
    """With a state of 60 arrays that does not compress. Writes below the folder for temporary files."""
    state = _state(megabytes)
    seconds: dict[str, list[float]] = {}
    for _ in range(rounds):  # alternating, so that whatever else the machine does hits both
        with tempfile.TemporaryDirectory() as folder:
            for name, taken in _round(Path(folder), state):
                seconds.setdefault(name, []).append(taken)
    size = f"{sum(leaf.nbytes for leaf in state.values()) / 1e6:.0f} MB"
    for name, a, b, aim in (
        (f"async save of {size} until the loop goes on ÷ until it is on disk", "return", "save", 0.10),
        (f"checksums of {size} ÷ the save with them", "checksums", "save", 0.10),
        (f"verified restore of {size}, files in memory ÷ orbax's restore", "warm", "orbax warm", 1.3),
        (f"verified restore of {size}, files on disk ÷ orbax's restore", "cold", "orbax cold", 1.3),
    ):
        if a in seconds:
            yield _row(name, seconds[a], seconds[b], aim)


def _row(name: str, a: list[float], b: list[float], aim: float) -> Row:
    ratio = statistics.median(x / y for x, y in zip(a, b, strict=True))
    detail = f"{statistics.median(a):.3f} s ÷ {statistics.median(b):.3f} s; fastest {min(a):.3f} s ÷ {min(b):.3f} s"
    return Row(name, ratio, aim, detail)


def _round(folder: Path, state: dict[str, jax.Array]) -> Iterator[tuple[str, float]]:
    """One save and its restores: what was timed, and its seconds."""
    began = time.perf_counter()
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, state)
        yield "return", time.perf_counter() - began
        checkpoints.wait()
        yield "save", time.perf_counter() - began
    manifest = Manifest.read(folder / "1")
    arrays = folder / "1" / manifest.arrays
    yield "checksums", _timed(lambda: checksums(arrays))
    os.sync()
    wanted = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in state.items()}
    restores: dict[str, Callable[[], Any]] = {
        "orbax ": lambda: _orbax(arrays, wanted),
        "": lambda: Checkpoints(folder).restore_latest(wanted),
    }
    for who, restore in restores.items():
        yield f"{who}warm", _timed(restore)
    if hasattr(os, "posix_fadvise"):  # else files cannot be taken out of memory
        for who, restore in restores.items():
            _forget(arrays)
            yield f"{who}cold", _timed(restore)


def _orbax(arrays: Path, wanted: dict[str, jax.ShapeDtypeStruct]) -> Any:
    args = {name: ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=leaf.sharding) for name, leaf in wanted.items()}
    request = ocp.args.PyTreeRestore(item=dict.fromkeys(args, 0), restore_args=args)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as reader:
        return reader.restore(arrays, request)


def _timed(action: Callable[[], Any]) -> float:
    """Seconds. Whatever came out is freed after the clock has stopped."""
    began = time.perf_counter()
    result = action()
    jax.block_until_ready(result)
    return time.perf_counter() - began


def _forget(folder: Path) -> None:
    """Has the operating system drop its copies of the files below `folder`."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _state(megabytes: float) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    rows = max(1, round(megabytes * 1e6 / ARRAYS / 4 / 256))
    return {str(number): jnp.asarray(rng.standard_normal((rows, 256), np.float32)) for number in range(ARRAYS)}
