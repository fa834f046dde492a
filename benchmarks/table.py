"""A figure, what it is compared with, and the aim."""

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured ratio. `aim` is the most that it should be, or with `at_least` the least."""

    name: str
    ratio: float
    aim: float | None
    detail: str  # both sides, with units
    at_least: bool = False

    @property
    def verdict(self) -> str:
        if self.aim is None:
            return ""
        return "met" if (self.ratio >= self.aim if self.at_least else self.ratio <= self.aim) else "missed"


def render(rows: Iterable[Row]) -> str:
    """Rows as a Markdown table."""
    lines = ["| what ÷ reference | ratio | aim | | measured |", "|---|---|---|---|---|"]
    for row in rows:
        aim = "" if row.aim is None else f"{'≥' if row.at_least else '≤'} {row.aim:g}"
        lines.append(f"| {row.name} | {row.ratio:.3f} | {aim} | {row.verdict} | {row.detail} |")
    return "\n".join(lines)
