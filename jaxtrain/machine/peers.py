"""What fails in one process of a run ends all of them, by three ways.

An exception is told in JAX's key-value store; a thread of every other process repeats it and leaves with the same
exit code. A process that dies is missed by JAX, which aborts the others from C++ (after SILENCE seconds, at once
where it was process 0): that is caught, to leave with exit code 4. A collective that breaks raises in those that
wait for it.
"""

import atexit
import contextlib
import functools
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from jaxtrain import exits
from jaxtrain.errors import HangError, JaxtrainError

SILENCE = 60  # seconds without a heartbeat after which JAX takes a process for dead
AGAIN = "start all processes again with the same command: the run goes on from its last checkpoint"
LISTENING = 1.0  # seconds between two looks at the store
PATIENCE = 2.5  # seconds, at most, that a failing process waits until the others have heard: as `exits` bears
FAREWELL = 0.5  # seconds that process 0, where the store lives, stays longer than the others
# What an error of JAX says when a collective is broken, or the store without its server.
BROKEN = ("gloo", "connection", "socket", "unavailable", "nccl", "coordination", "heartbeat", "megascale")

_handlers: list[Any] = []  # C functions, which must outlive whoever set them


class Ending:
    """A context manager around a run, one in each process. `client` None: the only process, and nothing happens.

    An exception that leaves it in one process ends all of them; without one, it is left when all have come to its end.
    Where another process ends this one, `last` is called before, as `exits.leave` does.
    """

    def __init__(self, client: Any, key: str, number: int, processes: int, meet: Callable[[], None]):
        self._client, self._key, self._number, self._processes, self._meet = client, key, number, processes, meet
        self.last: list[Callable[[], object]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="jaxtrain-peers", daemon=True)

    def __enter__(self) -> "Ending":
        if self._client is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client is None:
            return
        try:
            if error is None:
                self._meet()
        except BaseException as broken:
            error = broken
        if error is not None:
            told = self._lost(error) if _means_lost_peer(error) else error
            self._tell(told)
            if told is not error or kind is None:
                raise told from error
        self._stop()

    def _listen(self) -> None:
        while not self._over.wait(LISTENING):
            try:
                who, code, line = json.loads(self._client.key_value_try_get(self._key))
            except Exception:  # nothing is told; where the store itself is gone, JAX ends this process
                continue
            if not self._over.is_set():
                text = f"process {who} failed, and with it the run: {line}"
                heard = functools.partial(self._heard, self._processes if self._number == 0 else 0)
                exits.leave(code, functools.partial(exits.say, text), *self.last, heard)

    def _lost(self, error: BaseException) -> HangError:
        """What to raise for a collective that broke; a peer that says itself why ends this process instead."""
        time.sleep(3 * LISTENING)
        return HangError(f"another process of the run is gone ({' '.join(str(error).split())[:120]}); {AGAIN}")

    def _tell(self, error: BaseException) -> None:
        """Ends the others with this error, and sees to it that this process leaves without waiting for them."""
        self._stop()
        self.end_others(_exit_code(error), _line(error))
        atexit.register(_leave, _exit_code(error))  # in place of JAX's farewell, which waits for all

    def end_others(self, code: int, line: str) -> None:
        """Has every other process leave with this exit code; returns when they know, or cannot be reached."""
        if self._client is None:
            return
        with contextlib.suppress(Exception):  # another one was faster, or the store is gone
            self._client.key_value_set(self._key, json.dumps([self._number, code, line]))
        self._heard(self._processes)

    def _heard(self, wait_for: int) -> None:
        """Says that this process knows, and waits until so many do."""
        until, place = time.monotonic() + PATIENCE, f"{self._key}/heard/"
        with contextlib.suppress(Exception):
            self._client.key_value_set(f"{place}{self._number}", "")
            while len(self._client.key_value_dir_get(place)) < wait_for and time.monotonic() < until:
                time.sleep(0.05)
        if self._number == 0:
            time.sleep(FAREWELL)

    def _stop(self) -> None:
        self._over.set()
        self._thread.join()


def on_abort(line: str) -> None:
    """From now on an abort of this process prints `line` and leaves with exit code 4.

    JAX ends a process that has lost its peers by abort(), in a thread of C++, and offers no other way: a Python
    callback there raises bad_cast.
    """
    import ctypes

    def leave(number: int) -> None:
        os.write(2, f"jaxtrain: {line}\n".encode())
        os._exit(HangError.exit_code)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(leave)
    _handlers.append(handler)
    set_handler = ctypes.CDLL(None).signal
    set_handler.restype = ctypes.c_void_p
    set_handler(int(signal.SIGABRT), handler)


def _leave(code: int) -> None:
    with contextlib.suppress(Exception):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _means_lost_peer(error: BaseException) -> bool:
    text = str(error).lower()
    return type(error).__name__ == "JaxRuntimeError" and any(word in text for word in BROKEN)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    return 130 if isinstance(error, KeyboardInterrupt) else int(getattr(error, "exit_code", 1))


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, JaxtrainError) else f"{type(error).__name__}: {text[:300]}"
