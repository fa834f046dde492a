"""Ends of a process that cannot unwind: one thread ends it all, whatever the others are stuck in."""

import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

PATIENCE = 3.0  # seconds for each last call: what the process is stuck in may hold that up too

# What asks a run to end → exit code: 128 + the number, as shells count. Schedulers send SIGUSR1 where they are told to
# give notice (`sbatch --signal=USR1@120`); it means what SIGTERM means. Windows has none.
CODES = {
    getattr(signal, name): code
    for name, code in (("SIGINT", 130), ("SIGTERM", 143), ("SIGUSR1", 143))
    if hasattr(signal, name)
}


def name(number: int) -> str:
    """What to call a signal when speaking of it."""
    known = {"SIGINT": "Ctrl-C", "SIGUSR1": "SIGUSR1 (a scheduler's notice)"}
    found = signal.Signals(number).name
    return known.get(found, found)


def say(text: str) -> None:
    """One line on stderr, where no report is open."""
    print(f"jaxtrain: {' '.join(text.split())}", file=sys.stderr, flush=True)


def leave(code: int, *last: Callable[[], object]) -> NoReturn:
    """Ends the process now. Each of `last` is called before, and left behind where it takes longer than PATIENCE."""
    for call in (*last, functools.partial(print, end="", flush=True)):
        thread = threading.Thread(target=attempt, args=(call,), daemon=True)
        thread.start()
        thread.join(PATIENCE)
    os._exit(code)


def soon(code: int) -> None:
    """Ends the process after PATIENCE, should a thread that nobody can end (a loader on a dead disk) hold it still."""
    timer = threading.Timer(PATIENCE, os._exit, (code,))
    timer.daemon = True
    timer.start()


def on_signal() -> None:
    """For a process that is all ours and has nothing to lose yet: from now on a signal ends it at once.

    Python's own handlers would leave a traceback, or end in the `except` of a library that is being imported.
    """
    for number in CODES:
        signal.signal(number, _at_once)


def _at_once(number: int, frame: FrameType | None) -> None:
    os._exit(CODES[number])


def attempt(call: Callable[[], object]) -> None:
    """What fails is told and borne: there is nobody left to raise it to."""
    try:
        call()
    except Exception as error:
        say(f"{type(error).__name__}: {error}")
