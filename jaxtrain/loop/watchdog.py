"""A run that hangs ends by itself: the stacks of all threads are written, and the exit code is 4."""

import faulthandler
import functools
import itertools
import math
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from jaxtrain import exits
from jaxtrain.errors import HangError
from jaxtrain.reporting.curves import in_notebook

LOOK = 5.0  # seconds between two looks, at most
PAUSED = math.inf


class Watchdog:
    """While active, ends the process where no `beat` came for `minutes` (0: never). Paused until the first.

    A beat says that the device, the disk or the data brought something to an end: handing out work is no progress.
    Time in which the process itself was stopped does not count. The stacks of all threads go to stderr and are added to
    `file`. In a notebook they do too, and the rest is left to the person.
    """

    def __init__(self, minutes: float, file: Path | None = None):
        self._limit = 60 * minutes
        self._at = PAUSED
        self._closed = threading.Event()
        self.file = file
        self.where: Callable[[], str] = lambda: "before the first step"
        self.last: list[Callable[[], object]] = []  # called before the process ends, if that does not hang too

    def beat(self) -> None:
        """Something came to an end."""
        self._at = time.monotonic()

    def pause(self) -> None:
        """What comes now may take any time (a compilation, a user's own function), up to the next beat."""
        self._at = PAUSED

    def each_batch(self, check: Callable[[], None]) -> Callable[[], None]:
        """What an evaluation calls before each batch, instead of `check` alone. The first batch may compile."""
        turns = itertools.chain([self.pause], itertools.repeat(self.beat))

        def called() -> None:
            check()
            next(turns)()

        return called

    def __enter__(self) -> "Watchdog":
        if self._limit:
            threading.Thread(target=self._watch, name="jaxtrain-watchdog", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()

    def _watch(self) -> None:
        every = min(LOOK, self._limit / 4)
        seen, idle, before = self._at, 0.0, time.monotonic()
        while not self._closed.wait(every):
            now = time.monotonic()
            # A look that comes late was itself held up (a laptop asleep, SIGSTOP): so was the run.
            idle = idle + min(now - before, 2 * every) if self._at == seen != PAUSED else 0.0
            seen, before = self._at, now
            if idle >= self._limit:
                self._end()
                idle = 0.0

    def _end(self) -> None:
        text = f"nothing progressed for {self._limit / 60:.4g} minutes (config.hang_minutes), {self.where()}"
        if in_notebook():
            exits.attempt(functools.partial(self._write_stacks, text))
            exits.say(f"{text}; the stacks of all threads are above; interrupt the cell or restart the kernel")
            return
        place = f" and in {self.file}" if self.file else ""
        said = f"{text}: the run hangs and ends here; the stacks of all threads are above{place}"
        stacks, line = functools.partial(self._write_stacks, text), functools.partial(exits.say, said)
        exits.leave(HangError.exit_code, stacks, line, *self.last)

    def _write_stacks(self, text: str) -> None:
        """To stderr first: the disk may be what hangs."""
        faulthandler.dump_traceback(sys.__stderr__ or 2)
        if self.file:
            with open(self.file, "a") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n")
                file.flush()
                faulthandler.dump_traceback(file)
                file.write("\n")
