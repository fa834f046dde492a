"""Records by number out of TFRecord and ArrayRecord files: raw bytes, without TensorFlow.

An uncompressed TFRecord file has no index, but each record starts with its length; one walk over the lengths,
kept in the user's cache, makes it random access. Files are memory-mapped: memory does not grow with the data.
"""

import bisect
import contextlib
import functools
import hashlib
import json
import mmap
import os
import pathlib
import struct
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from jaxtrain.data import example
from jaxtrain.errors import UserError

Arrays = dict[str, np.ndarray]

_CACHE_FORMAT = 1
_OPEN_FILES = 128  # memory maps kept open; each holds a file descriptor, of which a process often has 1,024
_HEADER, _FOOTER = 12, 4  # of a TFRecord: length uint64 and its crc uint32; the data's crc uint32


class Records(Protocol):
    """Shards of records, numbered through."""

    paths: list[str]

    def __len__(self) -> int: ...

    def read(self, ids: np.ndarray) -> list[bytes]:
        """The records of `ids` (integers [B]); several threads may call it."""

    def where(self, number: int) -> str:
        """Names one record: the file, and where in it."""

    def buffers(self) -> Iterator[tuple[Any, int, int]]:
        """All in order, each as (buffer, start, end); a scan touches only what it looks at."""


class TFRecords:
    """Uncompressed TFRecord shards. `lengths` are the numbers of records they should hold.

    Raises UserError naming the file that is missing, cut short, compressed, or of another length.
    """

    def __init__(self, paths: Sequence[str], lengths: Sequence[int]):
        self.paths = list(paths)
        self._ends = np.cumsum(lengths).tolist()  # number of the first record after each shard
        index = cached(paths, f"offsets of {list(lengths)}", lambda: _index(paths, lengths))
        self._offset, self._length = index["offset"], index["length"]  # int64 [N], of the data
        self._map = functools.lru_cache(maxsize=_OPEN_FILES)(lambda shard: _map(self.paths[shard]))

    def __len__(self) -> int:
        return len(self._offset)

    def read(self, ids: np.ndarray) -> list[bytes]:
        return [self._map(shard)[start:end] for shard, start, end in self._spans(ids)]

    def where(self, number: int) -> str:
        ((shard, start, _),) = self._spans(np.array([number]))
        return f"{self.paths[shard]} at byte {start}"

    def buffers(self) -> Iterator[tuple[Any, int, int]]:
        for shard, start, end in self._spans(np.arange(len(self))):
            yield self._map(shard), start, end

    def _spans(self, ids: np.ndarray) -> Iterator[tuple[int, int, int]]:
        """(shard, first byte, byte after the last) of each record."""
        start = self._offset[ids]
        end = start + self._length[ids]
        shard = np.searchsorted(self._ends, ids, side="right")
        return zip(shard.tolist(), start.tolist(), end.tolist(), strict=True)


class ArrayRecords:
    """ArrayRecord shards, which have an index of their own. Raises UserError as TFRecords does."""

    def __init__(self, paths: Sequence[str], lengths: Sequence[int]):
        self.paths = list(paths)
        self._ends = np.cumsum(lengths).tolist()
        _stamps(paths)
        try:
            from array_record.python.array_record_data_source import ArrayRecordDataSource
        except ImportError as error:
            raise UserError(f"{paths[0]} needs the package array_record: pip install array_record") from error
        try:
            self._source = ArrayRecordDataSource(self.paths)
        except (RuntimeError, ValueError, OSError) as error:
            raise UserError(f"{paths[0]} or a shard beside it is not a sound ArrayRecord file: {error}") from error
        if len(self._source) != len(self):
            raise UserError(f"{paths[0]} and its shards hold {len(self._source)} records, expected {len(self)}")

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, ids: np.ndarray) -> list[bytes]:
        return list(self._source.__getitems__(ids.tolist()))

    def where(self, number: int) -> str:
        shard = bisect.bisect_right(self._ends, number)
        return f"{self.paths[shard]} record {number - (self._ends[shard - 1] if shard else 0)}"

    def buffers(self) -> Iterator[tuple[Any, int, int]]:
        for first in range(0, len(self), 1024):
            for record in self.read(np.arange(first, min(first + 1024, len(self)))):
                yield record, 0, len(record)


def integers(records: Records, feature: str) -> np.ndarray:
    """One integer feature of all records (int32 [N]), such as the labels; read once, then from the cache."""

    def scan() -> Arrays:
        values = np.zeros(len(records), np.int32)
        for number, (buffer, start, end) in enumerate(records.buffers()):
            try:
                values[number] = example.features(buffer, start, end, {feature: int})[feature]
            except (ValueError, IndexError, KeyError, OverflowError) as error:
                raise UserError(
                    f"{records.where(number)}: no integer feature {feature!r} in this record; the file is "
                    "damaged or was not written by tensorflow-datasets"
                ) from error
        return {"values": values}

    return cached(records.paths, f"integers of {feature}", scan)["values"]


def cached(paths: Sequence[str], what: str, build: Callable[[], Arrays]) -> Arrays:
    """`build()`, or what it returned before for files of the same paths, sizes and times of change.

    A cache that cannot be read or written only costs the time to build. Raises UserError for a missing file.
    """
    key = hashlib.sha256(json.dumps([_CACHE_FORMAT, what, _stamps(paths)]).encode()).hexdigest()[:32]
    try:
        with np.load(_cache_folder() / f"{key}.npz", allow_pickle=False) as stored:
            return dict(stored)
    except (OSError, RuntimeError, ValueError, EOFError, zipfile.BadZipFile):
        arrays = build()
    with contextlib.suppress(OSError, RuntimeError):
        _write(_cache_folder() / f"{key}.npz", arrays)
    return arrays


def _cache_folder() -> pathlib.Path:
    """In this user's cache. Raises RuntimeError for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "jaxtrain" / "index"


def _write(file: pathlib.Path, arrays: Arrays) -> None:
    """Whole or not at all, also beside another process that writes the same."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            np.savez(stream, allow_pickle=False, **arrays)
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise


def _stamps(paths: Sequence[str]) -> list[tuple[str, int, int]]:
    """(path, size, time of last change) of each file."""
    stamps = []
    for path in paths:
        try:
            stat = os.stat(path)
        except OSError as error:
            raise UserError(
                f"{path}: {error.strerror}; the data set is incomplete: prepare it again or copy the file"
            ) from error
        stamps.append((os.path.abspath(path), stat.st_size, stat.st_mtime_ns))
    return stamps


def _map(path: str) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _index(paths: Sequence[str], lengths: Sequence[int]) -> Arrays:
    """Where each record's data is: {"offset", "length"} int64 [N]."""
    spans = [_walk(path, length) for path, length in zip(paths, lengths, strict=True)]
    both = np.concatenate(spans)  # [N, 2]
    return {"offset": both[:, 0], "length": both[:, 1]}


def _walk(path: str, expected: int) -> np.ndarray:
    """(offset, length) of the records of one file, int64 [n, 2], from length to length."""
    size = os.path.getsize(path)
    unpack, position, spans = struct.Struct("<Q").unpack_from, 0, []
    with _map(path) if size else contextlib.nullcontext(b"") as data:
        while position + _HEADER <= size:
            (length,) = unpack(data, position)
            spans.append((position + _HEADER, length))
            position += _HEADER + length + _FOOTER
    if position != size:
        number = len(spans) - (position > size)
        raise UserError(
            f"{path}: record {number} of {expected} does not end within the file's {size} bytes; it is cut "
            "short or not an uncompressed TFRecord file: prepare the data set again or copy the file"
        )
    if len(spans) != expected:
        raise UserError(
            f"{path} holds {len(spans)} records, dataset_info.json says {expected}: prepare the set again "
            "or copy the file"
        )
    return np.array(spans, np.int64).reshape(-1, 2)
