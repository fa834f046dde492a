"""Metrics are fetched one interval behind, when the device has long finished them: the loop never waits."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxtrain.metrics import compute
from jaxtrain.reporting.report import Report


@dataclasses.dataclass
class Interval:
    """What the loop knows of the steps since the last report."""

    step: int  # the last one
    sums: dict[str, Any]  # monoids, on the device
    steps: int  # that the device finished in
    seconds: float  # this time
    waited: float  # seconds of them spent waiting for input


class Behind:
    """Holds the latest interval back until the next one is there, or until somebody needs the log complete."""

    def __init__(self, report: Report, batch_size: int, check: Callable[[int, dict[str, float]], None]):
        self._report = report
        self._check = check  # (step, values); may raise, and sees them after they are written
        self._batch_size = batch_size
        self._held: Interval | None = None

    def push(self, interval: Interval) -> None:
        """Writes the interval held so far, and holds this one."""
        self.flush()
        self._held = interval

    def flush(self) -> None:
        """Writes what is held. Waits for the device if need be."""
        held, self._held = self._held, None
        if held is None:
            return
        values = _named(held.sums)
        if held.seconds > 0 and held.steps > 0:
            values["time/step_ms"] = 1e3 * held.seconds / held.steps
            values["time/examples_per_second"] = held.steps * self._batch_size / held.seconds
            values["time/data_wait"] = held.waited / held.seconds
        # Counters of what was left out are news only when there was something.
        counters = ("train/skipped", "train/corrupt")
        shown = {name: value for name, value in values.items() if value or not name.startswith(counters)}
        shown = {name: value for name, value in shown.items() if not name.startswith("train/skipped_at")}
        self._report.write(held.step, shown)
        self._check(held.step, values)

    def look(self, step: int, sums: dict[str, Any]) -> None:
        """Checks an interval that is not over, up to `step`."""
        self._check(step, _named(sums))

    def drop(self) -> None:
        """Forgets what is held: its steps are undone."""
        self._held = None


def _named(sums: dict[str, Any]) -> dict[str, float]:
    return {f"train/{name}": value for name, value in compute(sums).items()}
