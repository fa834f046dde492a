"""What a checkpoint must hold: `manifest.json`, written last, and the checksums that make it trustworthy.

A folder without a sound manifest is no checkpoint. The checksum is CRC-32C, which processors compute about as fast
as they read memory, one per 16 MiB of a file: several threads check one large file. Format 1 had zlib's CRC-32.
"""

import dataclasses
import json
import os
import pathlib
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import crc32c

from jaxtrain.errors import StorageError, UserError

FORMAT = 2
NAME = "manifest.json"
CHUNK = 16 * 2**20  # bytes under one checksum; part of the format
_SUMS: dict[int, tuple[str, Callable[[Any, int], int]]] = {  # format → its checksum, by name in the manifest
    1: ("crc32", zlib.crc32),
    2: ("crc32c", crc32c.crc32c),
}
DATABASE = "manifest.ocdbt"  # of orbax's files the one by which it looks up arrays: without it, by folder names
_BLOCK = 2**20  # bytes read at a time. Not mapped: a disk error would be a signal then, and end the process
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
    sums: tuple[int, ...]  # one checksum per CHUNK bytes


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The contents of `manifest.json`.

    step: the step of the state. best: when it was saved, it was the best so far. meta: the caller's own JSON
    object. leaves: path ("params/conv1/kernel") to shape and dtype. arrays: the folder beside the manifest
    that holds orbax's files. files: path below that folder to size and checksums. format: the number it was
    read with; what is written has the newest.
    """

    step: int
    best: bool
    meta: dict[str, Any]
    leaves: dict[str, Leaf]
    arrays: str
    files: dict[str, File]
    format: int = FORMAT

    def write(self, folder: pathlib.Path) -> None:
        """Writes `folder/manifest.json` in one move: after a crash there is the old one or the new one."""
        name, _ = _SUMS[FORMAT]
        body = dataclasses.asdict(self) | {
            "files": {path: {"size": file.size, name: file.sums} for path, file in self.files.items()}
        }
        del body["format"]
        body = json.loads(json.dumps(body))  # as it will be read: string keys, lists for tuples
        text = json.dumps({"format": FORMAT, name: _sum_of_body(FORMAT, body), **body}, indent=1)
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

        Raises: Damaged, if it is missing, cut or altered, or names a file outside of its folder; UserError, if
        a later version wrote it.
        """
        number, content = _content(folder)
        sums = {name: content.pop(name) for name, _ in _SUMS.values() if name in content}
        sound = [known for known in _SUMS if sums.get(_SUMS[known][0]) == _sum_of_body(known, content)]
        if isinstance(number, int) and number > FORMAT and not sound:  # else it is the number that was altered
            raise UserError(
                f"{folder} has checkpoint format {number}, and this jaxtrain reads up to {FORMAT}: "
                "update jaxtrain to use it"
            )
        if number not in sound:
            raise Damaged(f"{folder / NAME} was altered: its own checksum does not fit")
        try:
            manifest = cls(**content | _parsed(number, content))
            outside = [name for name in (manifest.arrays, *manifest.files) if not _stays_inside(name)]
        except (ValueError, AttributeError, KeyError, TypeError):
            raise _cut(folder) from None
        if str(manifest.step) != folder.name:
            raise Damaged(f"{folder} holds step {manifest.step}")
        if outside:
            raise Damaged(f"{folder / NAME} names {outside[0]!r}, which is not inside the checkpoint")
        if DATABASE not in manifest.files:
            raise Damaged(f"{folder / manifest.arrays / DATABASE} is missing")
        return manifest

    def check_files(self, folder: pathlib.Path) -> None:
        """Looks at names and sizes only. Raises: Damaged, naming the first file that is missing, cut or foreign.

        Hidden files are no fault: file managers and network file systems leave them anywhere.
        """
        arrays = folder / self.arrays
        try:
            for name, file in self.files.items():
                path = arrays / name
                if not path.is_file():
                    raise Damaged(f"{path} is missing")
                if (size := path.stat().st_size) != file.size:
                    raise Damaged(f"{path} has {size:,} bytes, expected {file.size:,}")
            for path in (arrays, *arrays.rglob("*")):
                if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
                    raise Damaged(f"{path} is a link that leads out of the checkpoint")
                hidden = path.name.startswith(".")
                if path.is_file() and not hidden and path.relative_to(arrays).as_posix() not in self.files:
                    raise Damaged(f"{path} was not there when the checkpoint was written")
        except (OSError, RuntimeError) as error:  # RuntimeError: links that go round in a circle
            raise _unreadable(folder, error) from error

    def verify(self, folder: pathlib.Path) -> None:
        """Reads every byte. Raises: Damaged, naming the first file that differs from what was written."""
        self.check_files(folder)
        self.check_sums(folder, list(self.files))

    def check_sums(self, folder: pathlib.Path, names: list[str]) -> None:
        """The second half of `verify`, for some of the `files`."""
        try:
            found = checksums(folder / self.arrays, names, self.format)
        except OSError as error:
            raise _unreadable(folder, error) from error
        for name in names:
            if found[name] != self.files[name]:
                raise Damaged(f"{folder / self.arrays / name} was altered: its checksum does not fit")


def checksums(folder: pathlib.Path, names: list[str] | None = None, number: int = FORMAT) -> dict[str, File]:
    """Size and checksums of files below `folder`, by their path below it.

    names: which (default: all). number: of the manifest's format.
    """
    names = sorted(p.relative_to(folder).as_posix() for p in _files(folder)) if names is None else names
    sizes = {name: (folder / name).stat().st_size for name in names}
    chunks = [(name, start) for name in names for start in range(0, sizes[name], CHUNK)]
    found: dict[str, list[int]] = {name: [] for name in names}
    _, function = _SUMS[number]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="checksum") as pool:
        values = pool.map(lambda chunk: _sum_of_chunk(function, folder / chunk[0], chunk[1]), chunks)
        for (name, _), value in zip(chunks, values, strict=True):
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


def _sum_of_chunk(function: Callable[[Any, int], int], path: pathlib.Path, start: int) -> int:
    buffer = memoryview(bytearray(_BLOCK))
    value, left = 0, CHUNK
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while left and (count := file.readinto(buffer[: min(left, _BLOCK)])):
            value = function(buffer[:count], value)
            left -= count
    return value


def _sum_of_body(number: int, body: dict[str, Any]) -> int:
    _, function = _SUMS[number]
    covered = body if number == 1 else {"format": number, **body}
    return function(json.dumps(covered, sort_keys=True).encode(), 0)


def _content(folder: pathlib.Path) -> tuple[Any, dict[str, Any]]:
    """The format number in `folder/manifest.json`, and the rest of it."""
    try:
        content = json.loads((folder / NAME).read_bytes())
        return content.pop("format"), content
    except (FileNotFoundError, NotADirectoryError):
        raise Damaged(f"{folder} has no {NAME}: its save did not finish") from None
    except OSError as error:
        raise _unreadable(folder / NAME, error) from error
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        raise _cut(folder) from None


def _parsed(number: int, content: dict[str, Any]) -> dict[str, Any]:
    """The parts of a manifest that are more than plain JSON."""
    name, _ = _SUMS[number]
    return {
        "leaves": {path: Leaf(**leaf | {"shape": tuple(leaf["shape"])}) for path, leaf in content["leaves"].items()},
        "files": {path: File(file["size"], tuple(file[name])) for path, file in content["files"].items()},
        "format": number,
    }


def _stays_inside(name: str) -> bool:
    """Whether a name from a manifest leads to below the folder that it is put behind."""
    path = pathlib.PurePath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _unreadable(folder: pathlib.Path, error: Exception) -> Damaged:
    return Damaged(f"{getattr(error, 'filename', None) or folder} cannot be read: {getattr(error, 'strerror', error)}")


def _cut(folder: pathlib.Path) -> Damaged:
    return Damaged(f"{folder / NAME} is not a whole manifest")
