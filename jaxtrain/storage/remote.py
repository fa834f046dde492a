"""A folder that can only put, get, list and delete whole files: an object store, or a mount that refuses the rest."""

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from jaxtrain.errors import JaxtrainError, StorageError, UserError

T = TypeVar("T")
PROBE = ".jaxtrain-probe"


class Remote:
    """Files below a URL such as "gs://bucket/run" or "s3://bucket/run", or below a local path; through fsspec.

    Paths are relative to it, with "/". Raises UserError for a URL that fsspec does not know or lacks a package for;
    every method StorageError, naming the file, where the store refuses.
    """

    def __init__(self, url: str):
        import fsspec

        self.url = url.rstrip("/")
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.url)
        except ImportError as error:
            raise UserError(f"{self.url}: {error}") from error
        except ValueError as error:
            known = "gs://, s3://, az://, hdfs://, …"
            raise UserError(f"{self.url}: {error}; a workdir is a local folder, or a URL such as {known}") from error
        self._files.auto_mkdir = True  # of local files only; elsewhere folders are part of the name

    def list(self) -> dict[str, int]:
        """Path → bytes of every file."""

        def find() -> dict[str, int]:
            self._files.invalidate_cache()
            found = self._files.find(self._root, detail=True)
            start = len(self._root.rstrip("/")) + 1
            return {name[start:]: about["size"] for name, about in found.items()}

        return self._tried("", find)

    def read(self, path: str) -> bytes:
        return bytes(self._tried(path, lambda: self._files.cat_file(self._path(path))))

    def write(self, path: str, data: bytes) -> None:
        """The whole file at once; what was there before is replaced."""
        self._tried(path, lambda: self._files.pipe_file(self._path(path), data))

    def create(self, path: str, data: bytes) -> bool | None:
        """Writes a file only if there is none: True if it did, False if there is one, None if the store cannot tell."""
        try:
            self._tried(path, lambda: self._files.pipe_file(self._path(path), data, mode="create"))
        except StorageError as error:
            if isinstance(error.__cause__, FileExistsError):
                return False
            if _is_refusal(error.__cause__):
                return None
            raise  # a store that does not answer is no store without conditional writes
        return True

    def upload(self, source: Path, path: str) -> None:
        self._tried(path, lambda: self._files.put_file(str(source), self._path(path)))

    def download(self, path: str, target: Path) -> None:
        """In one stroke: after a kill there is the whole file or none."""
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + ".partial")
        self._tried(path, lambda: self._files.get_file(self._path(path), str(partial)))
        os.replace(partial, target)

    def delete(self, path: str) -> None:
        self._tried(path, lambda: self._files.rm_file(self._path(path)))

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _tried(self, path: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except JaxtrainError:
            raise
        except Exception as error:  # every backend of fsspec has errors of its own
            said: Any = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            raise StorageError(f"{self.url}/{path}: {str(said).splitlines()[0][:200]}") from error


def _is_refusal(error: BaseException | None) -> bool:
    """Whether a backend says that it has no conditional writes, by Python's word for that or the system's."""
    unable = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
    return isinstance(error, (NotImplementedError, TypeError, ValueError)) or getattr(error, "errno", None) in unable


def is_url(path: str | os.PathLike[str]) -> bool:
    return "://" in os.fspath(path)


def refused(folder: Path) -> str:
    """What a run needs and the file system of `folder` refuses, in words; "" where it does all.

    Tried in a folder that is removed again, in the nearest that there is. What cannot be written at all refuses nothing
    here: that is told when it is to be written.
    """
    folder = next(each for each in (folder, *folder.parents) if each.is_dir())
    try:
        probe = Path(tempfile.mkdtemp(prefix=PROBE, dir=folder))
        (probe / "plain").write_bytes(b"")
    except OSError:
        return ""
    try:
        return ", ".join(name for name, trial in TRIALS.items() if not _works(trial, probe))
    finally:
        _remove(probe)


def _append(folder: Path) -> None:
    descriptor = os.open(folder / "plain", os.O_WRONLY | os.O_APPEND)
    try:
        os.write(descriptor, b"x")
    finally:
        os.close(descriptor)


def _rename_file(folder: Path) -> None:
    (folder / "old").write_bytes(b"")
    os.replace(folder / "old", folder / "plain")


def _rename_folder(folder: Path) -> None:
    (folder / "sub").mkdir()
    os.rename(folder / "sub", folder / "moved")


TRIALS = {"appending": _append, "renaming files": _rename_file, "renaming folders": _rename_folder}


def _works(trial: Callable[[Path], None], folder: Path) -> bool:
    try:
        trial(folder)
    except OSError:
        return False
    return True


def _remove(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()
