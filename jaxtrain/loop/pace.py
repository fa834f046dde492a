"""How fast the device really goes, found without waiting for it, and a bound on what is handed to it ahead."""

import collections
import time
from collections.abc import Callable
from typing import Any

import jax

IN_FLIGHT = 16  # dispatches handed to the device and not yet finished, at most: more would only hold memory
AHEAD = 0.2  # seconds of work in flight, at most: a signal waits for it (but for two dispatches, so that none idles)


class Pace:
    """Follows the steps in flight. A dispatch returns at once, so the time between two of them says nothing.

    A step, or a loop of them, counts as done when the array that it made is ready. Time in which nothing is in flight
    (evaluations, checkpoints, the first compilation) is not counted. `beat` is called for each that is done.
    """

    def __init__(self, beat: Callable[[], None] = lambda: None) -> None:
        self._beat = beat
        self._waiting: collections.deque[tuple[int, Any]] = collections.deque()
        self._since = self._done = (0, 0.0)  # (step, time)
        self._limit = 2

    def begin(self, step: int) -> None:
        """Steps after `step` come now."""
        if not self._waiting:
            self._pause((step, time.monotonic()))

    def dispatched(self, step: int, result: Any) -> None:
        """`result` (a tree of arrays) is being made by `step`. Waits where too much is in flight."""
        self._waiting.append((step, jax.tree.leaves(result)[0]))
        while len(self._waiting) > self._limit:
            self._waiting[0][1].block_until_ready()
            self._finished()
        while self._waiting and self._waiting[0][1].is_ready():
            self._finished()

    def _finished(self) -> None:
        step, now = self._waiting.popleft()[0], time.monotonic()
        seconds = now - self._done[1]
        self._limit = int(min(IN_FLIGHT, max(2, AHEAD / max(seconds, 1e-6))))
        self._done = (step, now)
        self._beat()

    def settle(self) -> None:
        """Waits for all that is in flight: before something that would be taken for slow steps."""
        for step, result in self._waiting:
            result.block_until_ready()
            self._done = (step, time.monotonic())
            self._beat()
        self._waiting.clear()

    def take(self) -> tuple[int, float]:
        """(steps done, seconds they took) since the last call."""
        steps, seconds = self._done[0] - self._since[0], self._done[1] - self._since[1]
        self._since = self._done
        return steps, seconds

    def _pause(self, now: tuple[int, float]) -> None:
        gap = now[1] - self._done[1]
        self._since = (self._since[0] + now[0] - self._done[0], self._since[1] + gap)
        self._done = now
