"""What a checkpoint must hold: `manifest.json`, written last, and the checksums that make it trustworthy.

A folder without a sound manifest is no checkpoint. The checksum is zlib's CRC-32, one per 16 MiB of a file:
several threads check one large file.
"""

import dataclasses
import json
import os
import pathlib
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from jaxtrain.errors import StorageError, UserError

FORMAT = 1
NAME = "manifest.json"
CHUNK = 16 * 2**20  # bytes under one CRC-32; part of the format
_BLOCK = 2**20  # bytes read at a time
_THREADS = min(4, os.cpu_count() or 1)


class Damaged(StorageError):
    """A folder that should be a checkpoint and is not what its manifest says, or has none."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of the tree. `impl` is set for typed PRNG keys, whose uint32 key data is what is stored."""

    shape: tuple[int, ...]
    dtype: str
    impl: str = dataclasses.field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class File:
    size: int  # bytes
    crc32: tuple[int, ...]  # one per CHUNK bytes


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The contents of `manifest.json`.

    step: the step of the state. best: when it was saved, it was the best so far. meta: the caller's own JSON
    object. leaves: path ("params/conv1/kernel") to shape and dtype. arrays: the folder beside the manifest
    that holds orbax's files. files: path below that folder to size and checksums.
    """

    step: int
    best: bool
    meta: dict[str, Any]
    leaves: dict[str, Leaf]
    arrays: str
    files: dict[str, File]

    def write(self, folder: pathlib.Path) -> None:
        """Writes `folder/manifest.json` in one move: after a crash there is the old one or the new one."""
        body = _plain(dataclasses.asdict(self))
        text = json.dumps({"format": FORMAT, "crc32": _crc_of_body(body), **body}, indent=1)
        temporary = folder / (NAME + ".writing")
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / NAME)
        sync(folder)

    @classmethod
    def read(cls, folder: pathlib.Path) -> Self:
        """Reads `folder/manifest.json`; the name of `folder` must be the step.

        Raises: Damaged, if it is missing, cut or altered; UserError, if a later version wrote it.
        """
        try:
            content = json.loads((folder / NAME).read_bytes())
            number = content.pop("format")
            expected = content.pop("crc32")
        except (FileNotFoundError, NotADirectoryError):
            raise Damaged(f"{folder} has no {NAME}: its save did not finish") from None
        except OSError as error:
            raise Damaged(f"{folder / NAME} cannot be read: {error.strerror}") from error
        except (ValueError, AttributeError, KeyError, TypeError):
            raise Damaged(f"{folder / NAME} is not a whole manifest") from None
        if isinstance(number, int) and number > FORMAT:
            raise UserError(
                f"{folder} has checkpoint format {number}, and this jaxtrain reads up to {FORMAT}: "
                "update jaxtrain to use it"
            )
        if number != FORMAT or expected != _crc_of_body(content):
            raise Damaged(f"{folder / NAME} was altered: its own checksum does not fit")
        if str(content["step"]) != folder.name:
            raise Damaged(f"{folder} holds step {content['step']}")
        content["leaves"] = {k: Leaf(tuple(v.pop("shape")), **v) for k, v in content["leaves"].items()}
        content["files"] = {k: File(v["size"], tuple(v["crc32"])) for k, v in content["files"].items()}
        return cls(**content)

    def check_sizes(self, folder: pathlib.Path) -> None:
        """Looks at names and sizes only. Raises: Damaged, naming the first file that is missing or cut."""
        for name, file in self.files.items():
            path = folder / self.arrays / name
            if not path.is_file():
                raise Damaged(f"{path} is missing")
            if (size := path.stat().st_size) != file.size:
                raise Damaged(f"{path} has {size:,} bytes, expected {file.size:,}")

    def verify(self, folder: pathlib.Path) -> None:
        """Reads every byte. Raises: Damaged, naming the first file that differs from what was written."""
        self.check_sizes(folder)
        try:
            found = checksums(folder / self.arrays, list(self.files))
        except OSError as error:
            raise Damaged(f"{error.filename or folder} cannot be read: {error.strerror}") from error
        for name, file in self.files.items():
            if found[name] != file:
                raise Damaged(f"{folder / self.arrays / name} was altered: its checksum does not fit")


def checksums(folder: pathlib.Path, names: list[str] | None = None) -> dict[str, File]:
    """Size and CRC-32 of files below `folder`, by their path below it. names: which (default: all)."""
    names = sorted(str(p.relative_to(folder)) for p in _files(folder)) if names is None else names
    sizes = {name: (folder / name).stat().st_size for name in names}
    chunks = [(name, start) for name in names for start in range(0, sizes[name], CHUNK)]
    found: dict[str, list[int]] = {name: [] for name in names}
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="crc32") as pool:
        for (name, _), value in zip(
            chunks, pool.map(lambda c: _crc_of_chunk(folder / c[0], c[1]), chunks), strict=True
        ):
            found[name].append(value)
    return {name: File(sizes[name], tuple(found[name])) for name in names}


def sync(folder: pathlib.Path) -> None:
    """Has the operating system put the entries of `folder` on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(folder: pathlib.Path) -> None:
    """The same for `folder` and everything below it."""
    for path in [*_files(folder), *(p for p in folder.rglob("*") if p.is_dir()), folder]:
        sync(path)


def _files(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _crc_of_chunk(path: pathlib.Path, start: int) -> int:
    buffer = memoryview(bytearray(_BLOCK))
    value, left = 0, CHUNK
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while left and (count := file.readinto(buffer[: min(left, _BLOCK)])):
            value = zlib.crc32(buffer[:count], value)
            left -= count
    return value


def _plain(value: Any) -> Any:
    """The value as JSON gives it back: string keys, lists for tuples."""
    return json.loads(json.dumps(value))


def _crc_of_body(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
