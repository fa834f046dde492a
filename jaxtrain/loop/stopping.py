"""SIGTERM, Ctrl-C, SIGUSR1: finish the step, save, leave. A second one stops at once.

Python's handlers run in the main thread only, between two of its instructions: not while XLA compiles, not while a
data set hangs. So a thread of its own learns of each signal at once, and ends the process where the main thread does
not come back in time; before the first step there is nothing to lose, later it saves.

A notebook's Stop is a Ctrl-C. There, the second one ends the cell and not the kernel, and two clicks in a row are one;
and nothing but the person ends the process.
"""

import contextlib
import functools
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn

from jaxtrain import exits
from jaxtrain.errors import JaxtrainError
from jaxtrain.reporting.curves import in_notebook

DOUBLE_CLICK = 1.0  # seconds
ECHO = 0.25  # seconds: launchers pass a signal on that the whole group got already
PATIENCE = 5.0  # seconds for the main thread to come back by itself
LOOK = 0.1  # seconds between two looks whether it can be left behind by now
NOTICE = getattr(signal, "SIGUSR1", None)
END = b"\0"  # no signal has this number


class Stopped(Exception):
    """Work that can be left half done (an evaluation) was left because the run is to stop."""


def nothing() -> str:
    """What there is to save before the first step."""
    return ""


class Away:
    """See `Stopper.away`. The loop enters it for each batch: it costs less than a microsecond."""

    def __init__(self, stopper: "Stopper", save: Callable[[], str] | None):
        self._stopper, self._save = stopper, save
        self._before: Callable[[], str] | None = None

    def __enter__(self) -> None:
        self._before = self._stopper.exchange(self._save)

    def __exit__(self, *exception: object) -> None:
        self._stopper.exchange(self._before)


class Stopper:
    """While active, SIGTERM, SIGINT and SIGUSR1 set `.signal` in place of ending the process.

    Handlers belong to the main thread: elsewhere (a thread of a notebook server) this does nothing. Where somebody
    else has a wakeup descriptor (asyncio), it stays theirs, and a signal waits for the main thread.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.say: Callable[[str], None] = exits.say  # how a run tells that it was ended from here
        self.last: list[Callable[[], object]] = []  # called when it is
        self._at = 0.0  # when the signal came
        self._previous: dict[int, Any] = {}
        self._wakeup: socket.socket | None = None
        self._running_out = False
        self._lock = threading.Lock()  # held while the process is ended: the main thread must not go on then
        self._save: Callable[[], str] | None = nothing  # None: the main thread looks for signals itself
        self._closed = threading.Event()

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """130 for Ctrl-C, 143 for SIGTERM and SIGUSR1; 0 without a signal."""
        return 0 if self.signal is None else exits.CODES[self.signal]

    def why(self) -> str:
        """What came, to end a sentence with."""
        return "" if self.signal is None else f": {exits.name(self.signal)}"

    def check(self) -> None:
        """Raises Stopped when a signal came."""
        if self:
            raise Stopped

    def working(self) -> None:
        """From here on there is something to lose: the main thread is never left behind, but `away`."""
        self.exchange(None)

    def away(self, save: Callable[[], str] | None) -> "Away":
        """`with stop.away(save)`: while the main thread is in code that may not come back in time.

        Then `save` is called in another thread, so the main thread must touch nothing that it saves; it returns what to
        say of it. And the process ends. None: the main thread is waited for all the same.
        """
        return Away(self, save)

    def exchange(self, save: Callable[[], str] | None) -> Callable[[], str] | None:
        """Sets what is called before the main thread is left behind; returns what was. Blocks while that happens."""
        with self._lock:
            before, self._save = self._save, save
        return before

    def __enter__(self) -> "Stopper":
        if threading.current_thread() is threading.main_thread():
            for number in exits.CODES:
                self._previous[number] = signal.signal(number, self._handle)
            if not in_notebook():
                self._open_wakeup()
            if hasattr(os, "register_at_fork"):
                os.register_at_fork(after_in_child=functools.partial(_forget, weakref.ref(self)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._closed.set()
        self._restore()

    def _open_wakeup(self) -> None:
        """Has Python write the number of each signal into a socket, and a thread read it there."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        others = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        if others != -1:
            signal.set_wakeup_fd(others)
            reader.close()
            writer.close()
        else:
            self._wakeup = writer
            threading.Thread(target=self._watch, args=(reader,), name="jaxtrain-signals", daemon=True).start()

    def _restore(self) -> None:
        wakeup, self._wakeup = self._wakeup, None
        if wakeup is not None:
            now = signal.set_wakeup_fd(-1)
            if now != wakeup.fileno():  # somebody else's by now
                signal.set_wakeup_fd(now)
            with contextlib.suppress(OSError):
                wakeup.send(END)
            wakeup.close()
        previous, self._previous = self._previous, {}
        for number, handler in previous.items():
            if handler is not None:  # None: not Python's, and not to be had back
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Runs in the main thread, when it gets to it."""
        if self.signal is None:
            self._came(number)
        elif in_notebook():
            if time.monotonic() - self._at > DOUBLE_CLICK:
                raise KeyboardInterrupt
        elif self._wakeup is None and self._is_second(number):
            exits.leave(exits.CODES[number])

    def _watch(self, reader: socket.socket) -> None:
        """Runs in a thread of its own, at once."""
        with reader:
            while (byte := reader.recv(1)) not in (END, b""):
                number = byte[0]
                if number not in exits.CODES:
                    continue
                if not self._running_out:
                    self._came(number)
                    self._running_out = True
                    threading.Thread(target=self._run_out, name="jaxtrain-stop", daemon=True).start()
                elif self._is_second(number):
                    exits.leave(exits.CODES[number])

    def _came(self, number: int) -> None:
        if self.signal is None:
            self.signal, self._at = number, time.monotonic()

    def _is_second(self, number: int) -> bool:
        """Whether whoever sends it does not want to wait. What a scheduler sends after its notice is no hurry."""
        announced = self.signal == NOTICE and number != signal.SIGINT
        return not announced and time.monotonic() - self._at > ECHO

    def _run_out(self) -> None:
        """Waits for the main thread, and ends the process where it does not come back and can be left behind."""
        ended = self._closed.wait(PATIENCE)
        while not ended:
            with self._lock:
                if self._save is not None and not self._closed.is_set():
                    self._end(self._save)
            ended = self._closed.wait(LOOK)

    def _end(self, save: Callable[[], str]) -> NoReturn:
        assert self.signal is not None
        code, text = self.exit_code, f"{exits.name(self.signal)}: what did not end within {PATIENCE:.0f} s was left"
        try:
            text += save()
        except Exception as error:
            code = error.exit_code if isinstance(error, JaxtrainError) else 1
            text += f", and the last step is not saved: {type(error).__name__}: {error}"
        exits.leave(code, functools.partial(self.say, text), *self.last)


def _forget(stopper: weakref.ref[Stopper]) -> None:
    """In a forked child: signals there are no signals for the run, and end the child as they would have before."""
    found = stopper()
    if found is not None:
        found._wakeup, wakeup = None, found._wakeup
        if wakeup is not None:
            signal.set_wakeup_fd(-1)
            wakeup.close()
        found._restore()
