"""SIGTERM and Ctrl-C: finish the step, save, leave. A second one stops at once.

A notebook's Stop is a Ctrl-C. There, the second one ends the cell and not the kernel, and two clicks in a row are one.
"""

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from jaxtrain.curves import in_notebook

DOUBLE_CLICK = 1.0  # seconds


class Stopped(Exception):
    """Work that can be left half done (an evaluation) was left because the run is to stop."""


class Stopper:
    """While active, SIGTERM and SIGINT set `.signal` in place of ending the process.

    Handlers belong to the main thread: elsewhere (a thread of a notebook server) this does nothing.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._at = 0.0  # when it came
        self._previous: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as shells count: 130 for Ctrl-C, 143 for SIGTERM; 0 without a signal."""
        return 0 if self.signal is None else 128 + self.signal

    def check(self) -> None:
        """Raises Stopped when a signal came."""
        if self:
            raise Stopped

    def __enter__(self) -> "Stopper":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now, before = time.monotonic(), self._at
        if self.signal is None:
            self.signal, self._at = number, now
        elif not in_notebook():  # the second one: whoever sends it does not want to wait
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif now - before > DOUBLE_CLICK:
            raise KeyboardInterrupt
