"""A workdir where files cannot be appended to, renamed or locked: the run works beside it, and copies.

    config.json, log.txt, events…            copied whole when they have changed
    metrics/<generation>-<number>.jsonl      metrics.jsonl in segments; the newest generation counts
    checkpoints/<step>/…                     after the lines up to <step>; manifest.json last, which makes it one

The folder beside it lies in the user's cache, and the remote one is the truth: a start brings the copy into
agreement, from whatever host it is made.
"""

import contextlib
import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxtrain.errors import JaxtrainError, StorageError, UserError
from jaxtrain.storage.lease import BEAT
from jaxtrain.storage.remote import Remote, is_url, refused
from jaxtrain.storage.remote_lease import NAME as LEASE
from jaxtrain.storage.remote_lease import RemoteLease

LINES = 3  # beats of the lease between two copies of the lines that a run reports
METRICS = "metrics.jsonl"
SEGMENT = re.compile(r"metrics/(\d{6})-(\d{6})\.jsonl")
MANIFEST = re.compile(r"checkpoints/\d+/manifest\.json")

Say = Callable[[str], None]


class Mirror:
    """Keeps `local` and `remote` in agreement. Nothing is copied before `pull` has been called."""

    def __init__(self, remote: Remote, local: Path, lease: RemoteLease | None = None):
        self.remote, self.local, self._lease = remote, local, lease
        self._known: dict[str, tuple[int, int]] = {}  # path → size and time of the local file that the remote one is
        self._generation, self._segments, self._sent = 0, 0, b""
        self._busy = threading.Lock()
        self._failure: JaxtrainError | None = None

    def pull(self) -> None:
        """Makes the local folder what the remote one is. Raises StorageError."""
        there = {path: size for path, size in self.remote.list().items() if path != LEASE}
        segments = sorted(path for path in there if SEGMENT.fullmatch(path))
        wanted = {path: size for path, size in there.items() if path not in segments}
        for path in _files(self.local):
            if path not in wanted:
                (self.local / path).unlink()
        unchanged = self._unchanged_checkpoints(wanted)
        for path, size in wanted.items():
            target = self._inside(path)
            kept = path.rpartition("/arrays-")[0] in unchanged and target.is_file() and target.stat().st_size == size
            if not kept:
                self.remote.download(path, target)
            self._known[path] = _stamp(target)
        self._pull_metrics(segments)

    def push(self) -> None:
        """Makes the remote folder what the local one is, in an order that a kill cannot spoil. Raises StorageError."""
        with self._busy:
            self._push_metrics()
            changed = [path for path in _files(self.local) if self._known.get(path) != _stamp(self.local / path)]
            for path in sorted(changed, key=_rank):
                if path != METRICS:
                    self._upload(path)
            for path in self._gone():
                self.remote.delete(path)
                del self._known[path]

    def committed(self) -> None:
        """Copies all that there is, a new checkpoint included. Raises what went wrong, here or between two calls."""
        if self._failure is not None:
            raise self._failure
        self.push()

    def watch(self, over: threading.Event) -> None:
        """Beats, and copies reports now and then, until `over`: what a thread does."""
        beats = 0
        while not over.wait(BEAT):
            beats += 1
            try:
                if self._lease is not None:
                    self._lease.beat()
                if beats % LINES == 0:
                    with self._busy:
                        self._push_metrics()
            except JaxtrainError as error:
                self._failure = error
                return

    def _gone(self) -> list[str]:
        """What was deleted here: none of it where the copy itself was, which must cost the remote folder nothing."""
        here = set(_files(self.local))
        if "config.json" not in here:
            return []
        kept = any(MANIFEST.fullmatch(path) for path in here)
        gone = [path for path in set(self._known) - here if kept or not path.startswith("checkpoints/")]
        return sorted(gone, key=_rank, reverse=True)  # a manifest goes before its arrays

    def _upload(self, path: str) -> None:
        stamp = _stamp(self.local / path)
        self.remote.upload(self.local / path, path)
        self._known[path] = stamp

    def _pull_metrics(self, segments: list[str]) -> None:
        newest = max((_numbers(path)[0] for path in segments), default=0)
        chosen = [path for path in segments if _numbers(path)[0] == newest]
        self._sent = b"".join(map(self.remote.read, chosen))
        self._generation, self._segments = newest, len(chosen)
        if self._sent:
            (self.local / METRICS).write_bytes(self._sent)

    def _push_metrics(self) -> None:
        """New lines as a segment; a file that was cut as a new generation, which replaces those before it."""
        path = self.local / METRICS
        content = path.read_bytes() if path.exists() else b""
        content = content[: content.rfind(b"\n") + 1]
        if content == self._sent:
            return
        if content.startswith(self._sent):
            name = f"metrics/{self._generation:06}-{self._segments:06}.jsonl"
            self.remote.write(name, content[len(self._sent) :])
            self._segments += 1
        else:
            old = [path for path in self.remote.list() if SEGMENT.fullmatch(path)]
            self._generation, self._segments = self._generation + 1, 1
            self.remote.write(f"metrics/{self._generation:06}-000000.jsonl", content)
            for path_of_old in old:
                self.remote.delete(path_of_old)
        self._sent = content

    def _unchanged_checkpoints(self, wanted: dict[str, int]) -> set[str]:
        """The checkpoint folders whose manifest is, byte by byte, the one that was copied here before."""
        found = set()
        for path in filter(MANIFEST.fullmatch, wanted):
            local = self.local / path
            if local.is_file() and local.read_bytes() == self.remote.read(path):
                found.add(path.removesuffix("/manifest.json"))
        return found

    def _inside(self, path: str) -> Path:
        target = self.local / path
        if ".." in Path(path).parts or not target.is_relative_to(self.local):
            raise UserError(f"{self.remote.url} holds a file {path!r}, which leads out of the workdir")
        return target


@contextlib.contextmanager
def local_workdir(workdir: str | os.PathLike[str] | None, say: Say) -> Iterator[tuple[Path | None, Callable[[], None]]]:
    """The folder that a run works in, and what to call after each checkpoint.

    That is `workdir` itself, or where that is no full file system a copy of it. At the end everything is copied.
    Raises UserError for a URL that cannot be used or is in use, StorageError.
    """
    url = _remote_url(workdir, say)
    if not url:
        yield None if workdir is None else Path(workdir).expanduser().absolute(), lambda: None
        return
    _refuse_many(url)
    remote = Remote(url)
    lease = RemoteLease(remote, say)
    try:
        mirror = Mirror(remote, _beside(url), lease)
        mirror.pull()
        with _watched(mirror):
            yield mirror.local, mirror.committed
    finally:
        lease.release()


def fetched(workdir: str | os.PathLike[str]) -> Path:
    """A folder to read: `workdir` itself, or a copy of what is behind its URL, made now. Raises as `local_workdir`."""
    if not is_url(workdir):
        return Path(workdir).expanduser().absolute()
    url = os.fspath(workdir)
    mirror = Mirror(Remote(url), _beside(f"to read: {url}"))
    mirror.pull()
    if not any(mirror.local.iterdir()):
        raise UserError(f"{url} holds nothing")
    return mirror.local


def _remote_url(workdir: str | os.PathLike[str] | None, say: Say) -> str:
    """Where a workdir lies that a run cannot work in; "" where it can."""
    if workdir is None or is_url(workdir):
        return "" if workdir is None else os.fspath(workdir)
    folder = Path(workdir).expanduser().absolute()
    if lacking := refused(folder):
        say(f"{folder} refuses {lacking}: the run works in a copy, and files are copied there whole")
    return str(folder) if lacking else ""


@contextlib.contextmanager
def _watched(mirror: Mirror) -> Iterator[None]:
    """While active, a thread beats and copies; at the end everything is copied, also where the run failed."""
    over = threading.Event()
    thread = threading.Thread(target=mirror.watch, args=(over,), name="jaxtrain-mirror", daemon=True)
    thread.start()
    try:
        yield
    except BaseException:
        over.set()
        thread.join()
        with contextlib.suppress(JaxtrainError):  # the error that is on its way says more
            mirror.push()
        raise
    over.set()
    thread.join()
    mirror.committed()


def _refuse_many(url: str) -> None:
    import jax

    if jax.process_count() > 1:
        raise UserError(
            f"{jax.process_count()} processes need a workdir that they share, and {url} is worked on in a copy; "
            "take a shared folder that can append and rename"
        )


def _beside(url: str) -> Path:
    """Where the copy lies."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "jaxtrain" / "workdirs" / hashlib.sha256(url.encode()).hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"cannot make {folder}, for the copy of {url}: {error.strerror}; set XDG_CACHE_HOME"
        ) from error
    return folder


def _files(folder: Path) -> list[str]:
    """Every file of a workdir, less what is being written."""
    found = (path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".partial"))
    names = [path.relative_to(folder).as_posix() for path in found]
    return [name for name in names if not name.startswith(("checkpoints/.", "lease."))]


def _stamp(path: Path) -> tuple[int, int]:
    about = path.stat()
    return about.st_size, about.st_mtime_ns


def _rank(path: str) -> tuple[int, str]:
    """Lines and facts first, then arrays, then the manifests that make them checkpoints."""
    return (2 if MANIFEST.fullmatch(path) else 1 if path.startswith("checkpoints/") else 0, path)


def _numbers(path: str) -> tuple[int, int]:
    found = SEGMENT.fullmatch(path)
    assert found is not None
    return int(found[1]), int(found[2])
