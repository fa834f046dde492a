"""Several things timed in turn, so that whatever else the machine does hits all of them."""

import statistics
from collections.abc import Callable, Mapping


def interleaved(measured: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each function returned, round by round. Every other round goes backwards; one before them warms up."""
    found: dict[str, list[float]] = {name: [] for name in measured}
    for turn in range(rounds + 1):
        for name in list(measured)[:: 1 if turn % 2 else -1]:
            value = measured[name]()
            if turn:
                found[name].append(value)
    return found


def ratio(over: list[float], under: list[float]) -> float:
    """The median of the ratios of each round."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))
