"""Records by number out of TFRecord and ArrayRecord files: raw bytes, without TensorFlow.

An uncompressed TFRecord file has no index, but each record starts with its length; one walk over the lengths,
kept in the user's cache, makes it random access. Records are read, not memory-mapped: other threads run on
while a slow disk answers, and a file that vanishes is an error that can be told. What is read is checked
against the checksum that stands in the file.
"""

import array
import contextlib
import functools
import mmap
import os
import resource
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, Protocol

import crc32c
import numpy as np

from jaxtrain.data import example
from jaxtrain.data.indexcache import Stamp, cached, stamps
from jaxtrain.errors import UserError

UNREADABLE = np.iinfo(np.int32).min  # in `integers`, for a record that does not hold the feature

_HEADER, _FOOTER = 12, 4  # of a TFRecord: length uint64 and its checksum uint32; the data's checksum uint32
_THREADS = 32  # that open or walk files at once: most of their time is spent waiting for a disk


class Compressed(UserError):
    """A TFRecord file that is compressed as a whole, which leaves no way to a record in its middle."""


class Records(Protocol):
    """Shards of records, numbered through."""

    paths: list[str]
    stamps: list[Stamp]

    def __len__(self) -> int: ...

    def read(self, ids: np.ndarray) -> list[bytes]:
        """The records of `ids` (integers [B]); several threads may call it.

        Raises OSError where the disk fails, another exception where a record is damaged.
        """

    def where(self, number: int) -> str:
        """Names one record: the file, and where in it."""

    def buffers(self) -> Iterator[tuple[Any, int, int]]:
        """All in order, each as (buffer, start, end); a scan touches only what it looks at."""


class TFRecords:
    """Uncompressed TFRecord shards. `lengths` are the numbers of records they should hold.

    Raises UserError naming the file that is missing, cut short, or of another length; Compressed.
    """

    def __init__(self, paths: Sequence[str], lengths: Sequence[int]):
        self.paths, self.stamps = list(paths), stamps(paths)
        self._ends = np.cumsum(lengths)  # number of the first record after each shard
        # Where each record starts and, behind the last of a shard, where that ends: int64 [N + shards].
        self._bounds = cached(self.stamps, f"offsets of {list(lengths)}", lambda: _index(paths, lengths))
        self._file = _kept_open(_File, self.paths)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, ids: np.ndarray) -> list[bytes]:
        return [_sound(self._file(shard).read(start + _HEADER, end)) for shard, start, end in self._spans(ids)]

    def where(self, number: int) -> str:
        ((shard, start, _),) = self._spans(np.array([number]))
        return f"{self.paths[shard]} record {_within(self._ends, shard, number)} at byte {start}"

    def buffers(self) -> Iterator[tuple[Any, int, int]]:
        spans = self._spans(np.arange(len(self)))
        mapped, file = -1, None
        for shard, start, end in spans:
            if shard != mapped:
                mapped, file = shard, _map(self.paths[shard])
            yield file, start + _HEADER, end - _FOOTER

    def _spans(self, ids: np.ndarray) -> Iterator[tuple[int, int, int]]:
        """(shard, first byte, byte after the last) of each record with its frame."""
        shard = np.searchsorted(self._ends, ids, side="right")
        at = ids + shard
        return zip(shard.tolist(), self._bounds[at].tolist(), self._bounds[at + 1].tolist(), strict=True)


class ArrayRecords:
    """ArrayRecord shards, which have an index and checksums of their own. Raises UserError as TFRecords does."""

    def __init__(self, paths: Sequence[str], lengths: Sequence[int]):
        self.paths, self.stamps = list(paths), stamps(paths)
        self._ends = np.cumsum(lengths)
        # To count takes opening every shard: once is enough.
        cached(self.stamps, f"counts of {list(lengths)}", lambda: _counted(paths, lengths))
        self._reader = _kept_open(_reader, self.paths)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, ids: np.ndarray) -> list[bytes]:
        shard = np.searchsorted(self._ends, ids, side="right")
        found = [b""] * len(ids)
        for each in np.unique(shard).tolist():
            (rows,) = np.nonzero(shard == each)
            positions = _within(self._ends, each, ids[rows]).tolist()
            for row, record in zip(rows.tolist(), self._reader(each).read(positions), strict=True):
                found[row] = record
        return found

    def where(self, number: int) -> str:
        shard = int(np.searchsorted(self._ends, number, side="right"))
        return f"{self.paths[shard]} record {_within(self._ends, shard, number)}"

    def buffers(self) -> Iterator[tuple[Any, int, int]]:
        for first in range(0, len(self), 1024):
            for record in self.read(np.arange(first, min(first + 1024, len(self)))):
                yield record, 0, len(record)


def integers(records: Records, feature: str, *, lenient: bool = False) -> np.ndarray:
    """One integer feature of all records (int32 [N]), such as the labels; read once, then from the cache.

    Raises UserError naming a record without it; where `lenient`, that one's is UNREADABLE.
    """

    def scan() -> np.ndarray:
        values = np.zeros(len(records), np.int32)
        for number, (buffer, start, end) in enumerate(records.buffers()):
            try:
                values[number] = example.features(buffer, start, end, {feature: int})[feature]
            except (ValueError, IndexError, OverflowError):
                values[number] = UNREADABLE
        return values

    values = cached(records.stamps, f"integers of {feature}", scan)
    if not lenient and (values == UNREADABLE).any():
        raise UserError(
            f"{records.where(int(np.argmax(values == UNREADABLE)))}: no integer feature {feature!r} in this record; "
            "the file is damaged or was not written by tensorflow-datasets"
        )
    return values


def masked_crc32c(data: bytes | bytearray) -> int:
    """The checksum of the TFRecord format, which must not be that of data with a checksum in it."""
    value = crc32c.crc32c(data)
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF


class _File:
    """An open file that is closed when nobody holds it any more: a reader may outlast its place in a cache."""

    def __init__(self, path: str):
        self._descriptor = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self._descriptor).st_size
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, start: int, end: int) -> bytes:
        return os.pread(self._descriptor, end - start, start)


def _kept_open(opened: Callable[[str], Any], paths: list[str]) -> Callable[[int], Any]:
    """Shard → the opened file; the latest stay open, as many as leave the process most of what it may open."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    size = 4096 if allowed == resource.RLIM_INFINITY else max(8, allowed // 4)
    return functools.lru_cache(maxsize=size)(lambda shard: opened(paths[shard]))


def _sound(block: bytes) -> bytes:
    """The data of a block that is data and checksum. Raises ValueError where they do not match."""
    data = block[:-_FOOTER]
    if masked_crc32c(data) != int.from_bytes(block[-_FOOTER:], "little"):
        raise ValueError("its bytes do not match their checksum")
    return data


def _within(ends: np.ndarray, shard: int, number: Any) -> Any:
    """Numbers of records in their shard."""
    return number - (ends[shard - 1] if shard else 0)


def _map(path: str) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _each(function: Callable[[str, int], Any], paths: Sequence[str], lengths: Sequence[int]) -> list[Any]:
    """`function(path, length)` of every shard, several at a time; raises what the first of them raised."""
    with ThreadPoolExecutor(min(_THREADS, len(paths)), thread_name_prefix="jaxtrain-index") as pool:
        return list(pool.map(function, paths, lengths))


def _index(paths: Sequence[str], lengths: Sequence[int]) -> np.ndarray:
    return np.concatenate(_each(_walk, paths, lengths))


def _walk(path: str, expected: int) -> np.ndarray:
    """Where the records of one file start, and its end: int64 [n + 1], from length to length."""
    unpack, position, bounds = struct.Struct("<QI").unpack, 0, array.array("q", [0])
    file = _File(path)
    if kind := compression(file.read(0, _HEADER)):
        raise Compressed(f"{path} is a {kind}-compressed TFRecord file, in which no record can be found by number")
    while position + _HEADER + _FOOTER <= file.size:
        header = file.read(position, position + _HEADER)
        length, check = unpack(header)
        if masked_crc32c(header[:8]) != check:
            _refuse_header(path, position, len(bounds) - 1)
        position += _HEADER + length + _FOOTER
        bounds.append(position)
    if position != file.size:
        raise UserError(
            f"{path}: record {len(bounds) - 1 - (position > file.size)} of {expected} does not end within the file's "
            f"{file.size} bytes; it is cut short: prepare the data set again or copy the file"
        )
    if len(bounds) != expected + 1:
        raise UserError(_miscounted(path, len(bounds) - 1, expected))
    return np.frombuffer(bounds, np.int64)


def _refuse_header(path: str, position: int, number: int) -> NoReturn:
    found = f"record {number} at byte {position} is damaged" if number else "is not a TFRecord file"
    raise UserError(f"{path} {found}: the checksum of a length is wrong; prepare the data set again or copy the file")


def compression(header: bytes) -> str:
    """How a TFRecord file is compressed that starts with these 12 bytes: "gzip", "zlib", or "" for anything else."""
    if len(header) < 2 or masked_crc32c(header[:8]) == int.from_bytes(header[8:], "little"):
        return ""  # nothing, or the length of a record
    if header[:2] == b"\x1f\x8b":
        return "gzip"
    # RFC 1950: deflate with a window of up to 32 KiB, and a multiple of 31.
    return "zlib" if header[0] & 0x8F == 0x08 and int.from_bytes(header[:2], "big") % 31 == 0 else ""


def _reader(path: str) -> Any:
    """array_record's reader, which several threads may use; set for reading here and there.

    Raises UserError for a file that is none of its kind.
    """
    library = array_record(path)
    with _told(path):
        return library.ArrayRecordReader(path, "readahead_buffer_size:0", file_reader_buffer_size=1 << 15)


def array_record(path: str) -> Any:
    """The library, to read or write that file. Raises UserError where there is none, as on macOS."""
    try:
        from array_record.python import array_record_module
    except ImportError as error:
        raise UserError(
            f"{path} needs the package array_record ({error}): pip install array_record, or use TFRecord"
        ) from error
    return array_record_module


@contextlib.contextmanager
def _told(path: str) -> Iterator[None]:
    """What array_record says of a file, in one line."""
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(
            f"{path} is not a sound ArrayRecord file ({error}): prepare the data set again or copy the file"
        ) from error


def _counted(paths: Sequence[str], lengths: Sequence[int]) -> np.ndarray:
    """The number of records in each shard, int64 [shards], which is what it should be."""
    return np.array(_each(_count, paths, lengths), np.int64)


def _count(path: str, expected: int) -> int:
    reader = _reader(path)
    with _told(path):
        found = int(reader.num_records())
        reader.close()
    if found != expected:
        raise UserError(_miscounted(path, found, expected))
    return found


def _miscounted(path: str, found: int, expected: int) -> str:
    return f"{path} holds {found} records, dataset_info.json says {expected}: prepare the set again or copy the file"
