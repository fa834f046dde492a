"""The faults themselves: what befalls a process, each a function of its plan, and what befalls a folder."""

import builtins
import errno
import io
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol


class Plan(Protocol):
    """What a fault may know of the process that it befalls."""

    @property
    def workdir(self) -> str: ...

    @property
    def arguments(self) -> tuple[str, ...]: ...  # of `jaxtrain.main`


def send(number: signal.Signals, plan: Plan) -> None:
    os.kill(os.getpid(), number)


def kill(plan: Plan) -> None:
    send(signal.SIGKILL, plan)


def sigterm(plan: Plan) -> None:
    send(signal.SIGTERM, plan)


def sigint(plan: Plan) -> None:
    send(signal.SIGINT, plan)


def usr1(plan: Plan) -> None:
    send(signal.SIGUSR1, plan)


def diskfull(plan: Plan) -> None:
    """No file of this process grows any more: a limit on the size of files answers as a full disk does."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def readonly(plan: Plan) -> None:
    """Python's calls that write below the workdir fail, also on files that are open.

    Permissions would not do: they do not bind an administrator.
    """
    folder = os.path.abspath(plan.workdir)
    opened = {_identity(os.stat(path)) for path in pathlib.Path(folder).rglob("*") if path.is_file()}

    def inside(path: Any) -> bool:
        return not isinstance(path, int) and os.path.abspath(os.fsdecode(path)).startswith(folder + os.sep)

    def refuse(owner: Any, name: str, applies: Callable[..., bool]) -> None:
        original = getattr(owner, name)

        def refusing(path: Any, *args: Any, **options: Any) -> Any:
            if applies(path, *args, **options):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), *([path] if inside(path) else []))
            return original(path, *args, **options)

        setattr(owner, name, refusing)

    for name in ("mkdir", "rename", "replace", "unlink", "rmdir"):
        refuse(os, name, lambda path, *args, **options: inside(path))
    for owner in (builtins, io):
        refuse(owner, "open", lambda path, mode="r", *args, **options: inside(path) and mode.strip("rbt") != "")
    refuse(os, "open", lambda path, flags=0, *args, **options: inside(path) and flags & (os.O_WRONLY | os.O_RDWR))
    refuse(os, "write", lambda number, *args: _identity(os.fstat(number)) in opened)


def vanish(plan: Plan) -> None:
    os.rename(plan.workdir, _away(plan.workdir))


def bring_back(workdir: pathlib.Path) -> None:
    """Undoes `vanish`, where it happened; what lies in the workdir's place goes."""
    away = pathlib.Path(_away(str(workdir)))
    if away.exists():
        shutil.rmtree(workdir, ignore_errors=True)
        away.rename(workdir)


def _away(workdir: str) -> str:
    return f"{workdir}.away"


def hang(plan: Plan) -> None:
    """Waits for ever, in the thread that asked for a batch."""
    threading.Event().wait()


def second(plan: Plan) -> dict[str, Any]:
    """The same command once more, to its end. Returns its exit code and what it said on stderr."""
    command = [sys.executable, "-m", "jaxtrain.main", *plan.arguments]
    found = subprocess.run(command, capture_output=True, text=True)
    return {"second": found.returncode, "said": found.stderr.strip()}


ACTS: dict[str, Callable[[Any], dict[str, Any] | None]] = {
    "kill": kill,
    "sigterm": sigterm,
    "sigint": sigint,
    "usr1": usr1,
    "diskfull": diskfull,
    "readonly": readonly,
    "vanish": vanish,
    "hang": hang,
    "second": second,
}


def corrupt(checkpoint: pathlib.Path) -> None:
    """Flips one bit in the middle of the largest file."""
    path = _largest(checkpoint)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def halve(checkpoint: pathlib.Path) -> None:
    """Cuts the second half off the largest file."""
    path = _largest(checkpoint)
    os.truncate(path, path.stat().st_size // 2)


def empty(checkpoint: pathlib.Path) -> None:
    """Leaves the folder alone."""
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()


DAMAGES = {"corrupt": corrupt, "halve": halve, "empty": empty}


def _largest(folder: pathlib.Path) -> pathlib.Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
