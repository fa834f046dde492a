"""One workdir, one writer: a lease that a living run keeps, and that a dead one leaves to the next.

    lease.json      who writes here: host, boot, namespace, pid, started, token; and `beat`, which grows
    lease.taking    for an instant, while a stale lease is replaced

A process on the same host is asked for by its pid. Of another host only the beats tell, and how old the last one is
says the file server: clocks of two hosts are never compared.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from jaxtrain import exits
from jaxtrain.errors import StorageError, UserError

FORMAT = 1
BEAT = 10.0  # seconds between two beats
STALE = 60.0  # seconds without a beat after which another host's run counts as dead
TAKING = 5.0  # seconds after which a takeover, which takes milliseconds, was itself killed
SIZE = 512  # bytes of a lease, whatever its beat: one write replaces all of it

_HELD: set[str] = set()  # tokens of the leases that this process holds


class _Unguarded(Exception):
    """The file system cannot do what a lease needs."""


@dataclasses.dataclass(frozen=True)
class Holder:
    """Who holds a workdir. A pid means something on the same host, since the same boot, in the same namespace."""

    host: str
    boot: str
    namespace: int
    pid: int
    started: str  # as the system says it: a pid that is used again is another process
    token: str
    beat: int = 0

    @classmethod
    def here(cls) -> "Holder":
        pid = os.getpid()
        return cls(socket.gethostname(), _boot(), _namespace(), pid, _started(pid), secrets.token_hex(8))

    def encoded(self) -> bytes:
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}).encode().ljust(SIZE - 1) + b"\n"

    @classmethod
    def decoded(cls, content: bytes) -> "Holder":
        """Raises ValueError for what is no lease."""
        try:
            fields = json.loads(content)
            if fields.pop("format") == FORMAT:
                return cls(**fields)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(str(error)) from error
        raise ValueError("another format")

    def on_host_of(self, other: "Holder") -> bool:
        mine, theirs = [(each.host, each.boot, each.namespace) for each in (self, other)]
        return mine == theirs and os.name == "posix"

    def alive(self) -> bool:
        """Whether the process still runs; to be asked on its own host."""
        if self.pid == os.getpid():
            return self.token in _HELD
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # another user's
        return _started(self.pid) in (self.started, "")

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


UNKNOWN = Holder("an unknown host", "", 0, 0, "", "")  # what a lease that cannot be read is taken for


class Lease:
    """While active, this process is the one that writes to `folder`, which is made if need be.

    `say` is told, in one line, of a lease that was taken over, and of a file system on which nothing can be guarded.
    Raises UserError where another run is alive there; StorageError where the folder cannot be written.
    """

    def __init__(self, folder: Path, say: Callable[[str], None], *, beat: float = BEAT, stale: float = STALE):
        self._folder, self._path = folder, folder / "lease.json"
        self._say = say
        self._every, self._stale = beat, stale
        self._me = Holder.here()
        self._draft = folder / f"lease.{self._me.token}"
        self._held = False
        self._seen = 0.0  # when the lease was last found to be ours
        self._lost = ""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beats, name="jaxtrain-lease", daemon=True)

    def __enter__(self) -> "Lease":
        _HELD.add(self._me.token)
        try:
            self._write_draft()
            self._acquire()
        except _Unguarded as error:
            self._say(f"{self._folder} cannot be guarded against a second run ({error}): start none there")
        finally:
            with contextlib.suppress(OSError):
                self._draft.unlink(missing_ok=True)
            if not self._held:
                _HELD.discard(self._me.token)
        if self._held:
            self._seen = _clock()
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def check(self) -> None:
        """To be called before each write. Raises StorageError where another run took the workdir over.

        That happens to a process that was stopped for long. So the file is looked at where beats are overdue.
        """
        if self._held and _clock() - self._seen > 2 * self._every:
            self._beat()
        if self._lost:
            raise StorageError(self._lost)

    def release(self) -> None:
        """Removes the lease if it is still ours. A second call, or one in a forked child, does nothing."""
        held, self._held = self._held and self._me.pid == os.getpid(), False
        if not held:
            return
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)  # longer only where the disk hangs
        with contextlib.suppress(OSError):  # what is left there, the next run takes over
            if (found := self._read()) and found[0].token == self._me.token:
                self._path.unlink()
        _HELD.discard(self._me.token)

    # Getting it

    def _acquire(self) -> None:
        for _ in range(400):
            if self._created():
                self._held = True
                return
            found = self._read()
            if found is not None and (why := self._why_stale(*found)) and self._taken(found[0]):
                self._held = True
                self._say(f"took the workdir over from {found[0]}, {why}")
                return
            time.sleep(0.05)
        raise StorageError(f"{self._path} can neither be made nor read; remove it if no run writes there")

    def _write_draft(self) -> None:
        """Also asks the file server for the time: that of this write."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._draft.write_bytes(self._me.encoded())
        except OSError as error:
            raise StorageError(f"cannot write to the workdir {self._folder}: {error.strerror}") from error

    def _created(self) -> bool:
        """Whether there was no lease, and now there is ours: whole, or not at all."""
        try:
            os.link(self._draft, self._path)
        except FileExistsError:
            return False
        except OSError:
            return self._created_without_links()
        return True

    def _created_without_links(self) -> bool:
        try:
            with open(self._path, "xb") as file:
                file.write(self._me.encoded())
        except FileExistsError:
            return False
        except OSError as error:
            raise _Unguarded(f"exclusive creation: {error.strerror}") from error
        return True

    def _read(self) -> tuple[Holder, float] | None:
        """Who holds it, and when they last wrote, by the file server's clock; None where nobody does."""
        for _ in range(3):
            try:
                with open(self._path, "rb") as file:
                    content, written = file.read(SIZE), os.fstat(file.fileno()).st_mtime
                return Holder.decoded(content), written
            except FileNotFoundError:
                return None
            except OSError as error:
                raise StorageError(f"cannot read {self._path}: {error.strerror}") from error
            except ValueError:
                time.sleep(0.05)  # it is being written
        return UNKNOWN, written

    def _age(self, written: float) -> float:
        """Seconds since then, by the file server's clock."""
        self._write_draft()
        return max(0.0, os.stat(self._draft).st_mtime - written)

    def _why_stale(self, holder: Holder, written: float) -> str:
        """In words; "" where it has changed meanwhile. Raises UserError where the holder is alive."""
        if not holder.on_host_of(self._me):
            return self._why_silent(holder, written)
        if holder.alive():
            raise self._refusal(holder, written)
        return "which no longer runs"

    def _why_silent(self, holder: Holder, written: float) -> str:
        """Watches another host's lease: for longer than a beat, as mtimes may err, and until it is old."""
        age, began = self._age(written), _clock()
        wait = max(self._stale - age, 1.5 * self._every)
        exits.say(f"{holder} wrote to {self._folder} {age:.0f} s ago; looking for {wait:.0f} s whether that run lives")
        while _clock() - began < wait:
            time.sleep(self._every / 10)
            found = self._read()
            if found is None or found[0].token != holder.token:
                return ""
            if found != (holder, written):
                raise self._refusal(*found)
        return f"silent for {age + wait:.0f} s"

    def _refusal(self, holder: Holder, written: float) -> UserError:
        mine = ", another thread of this process" if holder.token in _HELD else ""
        return UserError(
            f"workdir {self._folder} is in use by {holder}{mine} (last sign of life {self._age(written):.0f} s ago); "
            "stop that run, or take another --workdir"
        )

    def _taken(self, stale: Holder) -> bool:
        """Replaces a stale lease by ours. One at a time, so that nobody replaces the lease of who came first."""
        gate = self._folder / "lease.taking"
        try:
            gate.open("x").close()
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                if self._age(gate.stat().st_mtime) > TAKING:
                    gate.unlink()
            return False
        except OSError as error:
            raise _Unguarded(f"exclusive creation: {error.strerror}") from error
        try:
            found = self._read()
            if found is None or found[0].token != stale.token:
                return False
            os.replace(self._draft, self._path)
            return True
        except OSError as error:
            raise _Unguarded(f"renaming: {error.strerror}") from error
        finally:
            gate.unlink(missing_ok=True)

    # Keeping it

    def _beats(self) -> None:
        while not (self._lost or self._closed.wait(self._every)):
            self._beat()

    def _beat(self) -> None:
        """Writes into the very file that holds our token: another's lease is another file, and is never touched."""
        try:
            with open(self._path, "r+b", buffering=0) as file:
                found = Holder.decoded(file.read(SIZE))
                if found.token == self._me.token:
                    self._me = dataclasses.replace(self._me, beat=self._me.beat + 1)
                    file.seek(0)
                    file.write(self._me.encoded())
                    os.fsync(file.fileno())
                    self._seen = _clock()
                else:
                    self._lost = f"{found} took over {self._folder} while this run was stopped; this one writes no more"
        except FileNotFoundError:
            self._renew()
        except (OSError, ValueError):
            pass  # the disk does not answer: the next beat looks again, and a save would say what is wrong

    def _renew(self) -> None:
        """Somebody removed the file; nobody else holds it, or the next beat finds out."""
        if self._closed.is_set() or not self._folder.is_dir():
            return
        with contextlib.suppress(StorageError, _Unguarded, OSError):
            self._write_draft()
            self._created()
            self._draft.unlink(missing_ok=True)


def _clock() -> float:
    """Seconds, monotonic, also while the machine sleeps where the system can tell."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _namespace() -> int:
    """Which process ids mean what: containers of one machine count from 1 each."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _started(pid: int) -> str:
    """When a process began, as the system says it; "" where it does not say."""
    if Path("/proc/self/stat").exists():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # its name may hold anything
        except OSError:
            return ""
        return "ended" if fields[0] in "ZX" else fields[19]
    try:
        found = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip()
