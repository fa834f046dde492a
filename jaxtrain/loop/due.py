"""When things happen: report, evaluation, checkpoint, end. All of it is a function of the step."""

import math
from collections.abc import Mapping
from fractions import Fraction


class Due:
    """The steps at which something is due.

    `every` maps a name to an interval in steps, whole or not: with 11.25 steps an epoch, "1ep" is due at 12, 23, 34,
    45, the first steps by which each epoch is complete. `points` are single steps. Everything is due at `total`.
    """

    def __init__(self, every: Mapping[str, Fraction], total: int, points: tuple[int, ...] = ()):
        for name, interval in every.items():
            if interval <= 0:
                raise ValueError(f"interval of {name} is {interval}; it must be positive")
        self._every = dict(every)
        self._points = points
        self.total = total

    def next(self, step: int) -> int:
        """The first step after `step` at which something is due; at most `total`."""
        later = [point for point in self._points if point > step]
        return min([self.total, *later, *(_next(step, interval) for interval in self._every.values())])

    def at(self, step: int) -> set[str]:
        """The names of what is due at `step`."""
        if step == self.total:
            return set(self._every)
        return {name for name, interval in self._every.items() if _next(step - 1, interval) == step}


def _next(step: int, interval: Fraction) -> int:
    return math.ceil((math.floor(step / interval) + 1) * interval)
