"""A prepared TFDS set of TFRecord files, compressed or not, made into one of ArrayRecord files.

The serialized records are copied as they are, shard by shard: no picture is decoded and encoded again, order and
shards stay. (tfds' own SequentialWriter takes decoded examples, and its folder looks complete from the start.)
All is written into a folder beside the target, read back, and only then given its name.
"""

import concurrent.futures
import json
import os
import pathlib
import shutil
import struct
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import crc32c

from jaxtrain.data import tfds_builder
from jaxtrain.data.indexcache import stamps
from jaxtrain.data.records import array_record, compression, masked_crc32c
from jaxtrain.errors import StorageError, UserError
from jaxtrain.machine.hardware import cpu_count

TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"  # of a shard's name, tfds' default
_BLOCK = 1 << 16  # bytes read at a time: what is compressed may become a thousand times as long
_BATCH = 256  # records read back, or reported, at a time


def convert(builder: Any, folder: str, target: str, told: Callable[[int], None] = lambda records: None) -> pathlib.Path:
    """Writes the set of `folder` below the folder `target`, laid out as tfds does; returns its own folder there.

    `told` gets the number of records done since its last call, from several threads. Raises UserError for damaged
    files, and where the target is taken; StorageError where it cannot be written. Nothing is left then.
    """
    source = pathlib.Path(builder.data_dir)
    place = source.relative_to(folder)
    final = pathlib.Path(target) / place
    if final.exists():
        raise UserError(f"{final} exists already; remove it, or give another folder with --to")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        # As tfds calls what is not done yet, so that it is told from a set wherever one is looked for.
        partial = pathlib.Path(tempfile.mkdtemp(prefix="incomplete.", suffix=f"_{final.name}", dir=final.parent))
        try:
            partial.chmod(0o755)
            _fill(builder, source, partial, told)
            default = pathlib.Path(place.parts[0], ".config")  # which of several configs is meant by the name alone
            if (folder / default).is_dir():
                shutil.copytree(folder / default, target / default, dirs_exist_ok=True)
            os.rename(partial, final)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise StorageError(f"{final} cannot be made: {error}; make room, or choose another folder") from error
    return final


def records(path: str) -> Iterator[bytes]:
    """The records of a TFRecord file in order, from a file that may be compressed by gzip or zlib as a whole.

    Raises UserError naming the file, and the record that is damaged.
    """
    buffer, number, length = bytearray(), 0, -1  # -1: the next length is still to be read
    for block in _plain(path):
        buffer += block
        start = 0
        while len(buffer) - start >= (12 if length < 0 else length + 4):
            if length < 0:
                length, check = struct.unpack_from("<QI", buffer, start)
                _verify(path, number, buffer[start : start + 8], check)
                start += 12
            else:
                end = start + length
                data = bytes(buffer[start:end])
                _verify(path, number, data, int.from_bytes(buffer[end : end + 4], "little"))
                yield data
                start, number, length = end + 4, number + 1, -1
        del buffer[:start]
    if buffer or length >= 0:
        raise UserError(f"{path}: record {number} is cut short: prepare the data set again or copy the file")


def _verify(path: str, number: int, data: bytes | bytearray, check: int) -> None:
    if masked_crc32c(data) != check:
        raise UserError(
            f"{path}: record {number} does not match its checksum: prepare the data set again or copy the file"
        )


def _plain(path: str) -> Iterator[bytes]:
    """What the file holds, decompressed where it is compressed."""
    try:
        with open(path, "rb") as file:
            kind = compression(file.read(12))
            file.seek(0)
            if not kind:
                yield from iter(lambda: file.read(_BLOCK), b"")
                return
            machine = zlib.decompressobj(wbits=47)  # either kind, by its header
            while block := file.read(_BLOCK):
                while block:
                    if machine.eof:  # gzip files may be several, one behind the other
                        machine = zlib.decompressobj(wbits=47)
                    yield machine.decompress(block)
                    block = machine.unused_data
        if not machine.eof:
            raise UserError(f"{path} is cut short: prepare the data set again or copy the file")
    except zlib.error as error:
        raise UserError(f"{path} is damaged ({error}): prepare the data set again or copy the file") from error


def _fill(builder: Any, source: pathlib.Path, folder: pathlib.Path, told: Callable[[int], None]) -> None:
    """Every file of the set, `dataset_info.json` last."""
    info = json.loads((source / "dataset_info.json").read_text())
    shards: list[tuple[str, pathlib.Path, int]] = []
    for split in info["splits"]:
        paths, lengths = tfds_builder.files(builder, split["name"])
        stamps(paths)  # all of them are there
        start, count = f"{builder.name}-{split['name']}.array_record", len(paths)
        if pathlib.Path(start).name != start:
            raise UserError(f"{source}/dataset_info.json names {start!r}, which is no name of a file")
        names = [f"{start}-{number:05d}-of-{count:05d}" for number in range(count)]
        shards += zip(paths, [folder / name for name in names], lengths, strict=True)
        split["filepathTemplate"] = TEMPLATE
    _copied(shards, told)
    old = {path for path, _, _ in shards}
    for file in source.iterdir():
        if file.is_file() and str(file) not in old and file.name != "dataset_info.json":
            shutil.copyfile(file, folder / file.name)
    info["fileFormat"] = "array_record"
    info.pop("alternativeFileFormats", None)
    (folder / "dataset_info.json").write_text(json.dumps(info, indent=2) + "\n")


def _copied(shards: list[tuple[str, pathlib.Path, int]], told: Callable[[int], None]) -> None:
    """All shards, several at a time. The first failure stops the others."""
    stop = threading.Event()
    pool = concurrent.futures.ThreadPoolExecutor(cpu_count(), thread_name_prefix="jaxtrain-convert")
    try:
        for done in concurrent.futures.as_completed([pool.submit(_copy, *shard, told, stop) for shard in shards]):
            done.result()
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _copy(path: str, target: pathlib.Path, length: int, told: Callable[[int], None], stop: threading.Event) -> None:
    library = array_record(str(target))
    try:
        writer = library.ArrayRecordWriter(str(target), "group_size:1")
        count, check = 0, 0
        for record in records(path):
            writer.write(record)
            count, check = count + 1, crc32c.crc32c(record, check)
            if count % _BATCH == 0:
                told(_BATCH)
                if stop.is_set():
                    break
        writer.close()
        told(count % _BATCH)
        reader = library.ArrayRecordReader(str(target))
        found = _checksum(reader.read(first, min(first + _BATCH, count)) for first in range(0, count, _BATCH))
        reader.close()
    except RuntimeError as error:  # of array_record
        raise StorageError(f"{target} cannot be written: {error}; make room or choose another folder") from error
    if stop.is_set():
        return
    if count != length:
        raise UserError(f"{path} holds {count} records, dataset_info.json says {length}: prepare the set again")
    if found != check:
        raise StorageError(f"{target} does not read back as it was written; see to the disk, then start again")


def _checksum(batches: Iterable[list[bytes]]) -> int:
    check = 0
    for batch in batches:
        for record in batch:
            check = crc32c.crc32c(record, check)
    return check
