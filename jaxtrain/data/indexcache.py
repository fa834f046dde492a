"""Arrays that are derived from a data set's files once and kept in the user's cache: offsets, labels, cuts.

What is kept is memory-mapped: it takes no memory that the system cannot have back, whatever the set's size. An
entry is one `.npy` file with the CRC-32C of all of it in four bytes behind; one that is damaged is made anew.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import tempfile
from collections.abc import Callable, Sequence

import crc32c
import numpy as np

from jaxtrain.errors import UserError

Stamp = tuple[str, int, int]  # path, size, time of last change in nanoseconds

_FORMAT = 2  # part of every key; to be raised when what is derived changes its meaning
_BLOCK = 1 << 20  # bytes read at a time


def stamps(paths: Sequence[str]) -> list[Stamp]:
    """What tells one state of these files from another. Raises UserError for a missing file."""
    found = []
    for path in paths:
        try:
            stat = os.stat(path)
        except OSError as error:
            raise UserError(
                f"{path}: {error.strerror}; the data set is incomplete: prepare it again or copy the file"
            ) from error
        found.append((os.path.abspath(path), stat.st_size, stat.st_mtime_ns))
    return found


def cached(files: Sequence[Stamp], what: str, build: Callable[[], np.ndarray]) -> np.ndarray:
    """`build()`, or what it returned before for files of the same paths, sizes and times of change; read-only.

    A cache that cannot be read or written costs the time to build, and the memory of the array.
    """
    key = hashlib.sha256(json.dumps([_FORMAT, what, files]).encode()).hexdigest()[:32]
    with contextlib.suppress(OSError, ValueError):
        return _read(_folder() / f"{key}.npy")
    array = build()
    with contextlib.suppress(OSError, ValueError):
        _write(_folder() / f"{key}.npy", array)
        return _read(_folder() / f"{key}.npy")
    array.flags.writeable = False
    return array


def _folder() -> pathlib.Path:
    """In this user's cache. Raises OSError for a user without a home."""
    try:
        return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "jaxtrain" / "index"
    except RuntimeError as error:
        raise OSError(str(error)) from error


def _read(file: pathlib.Path) -> np.ndarray:
    """The array, mapped. Raises OSError or ValueError where there is none or it is damaged."""
    with file.open("rb") as stream:
        left, check = file.stat().st_size - 4, 0
        while left > 0 and (block := stream.read(min(_BLOCK, left))):
            left, check = left - len(block), crc32c.crc32c(block, check)
        if left or stream.read() != check.to_bytes(4, "little"):
            raise ValueError("damaged")
    return np.load(file, mmap_mode="r", allow_pickle=False).view(np.ndarray)


def _write(file: pathlib.Path, array: np.ndarray) -> None:
    """Whole or not at all, also beside another process that writes the same."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, suffix=".partial")
    try:
        with os.fdopen(handle, "w+b") as stream:
            np.save(stream, array, allow_pickle=False)
            stream.seek(0)
            check = 0
            while block := stream.read(_BLOCK):
                check = crc32c.crc32c(block, check)
            stream.write(check.to_bytes(4, "little"))
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise
