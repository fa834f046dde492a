"""What a verification came to: a table, a line, an exit code."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from jaxtrain.rehearsal.compare import Row
from jaxtrain.rehearsal.faults import Fault


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What came out. `folder` holds both workdirs and what the processes said, where it was kept; else None."""

    rows: tuple[Row, ...]
    problems: tuple[str, ...]  # answers to faults that are not the documented ones
    steps: int
    faults: tuple[Fault, ...]  # what befell the second run, in order
    folder: Path | None
    cost: float | None = None  # time of a step with config.deterministic over that without, where it was measured

    @property
    def equal(self) -> bool:
        return not any(row.difference for row in self.rows)

    @property
    def good(self) -> bool:
        """Equal, and every fault was answered as documented."""
        return self.equal and not self.problems

    @property
    def exit_code(self) -> int:
        return 0 if self.good else 1

    def __str__(self) -> str:
        if self.good:
            return f"EQUAL: {self.steps} steps with {self._befallen()} end as {self.steps} without do, bit for bit"
        found = [f"{row.name}: {row.difference}" for row in self.rows if row.difference][:1]
        name = "NOT AS DOCUMENTED" if self.equal else "NOT EQUAL"
        return f"{name}: {'; '.join([*found, *self.problems])}; both runs are in {self.folder}"

    def _befallen(self) -> str:
        kills = sum(fault.kind == "kill" for fault in self.faults)
        others = [str(fault) for fault in self.faults if fault.kind != "kill"]
        return ", ".join([*others, *([f"{kills} kill{'s' * (kills > 1)}"] if kills else [])]) or "nothing between"


def table(rows: Sequence[Row]) -> str:
    """What was compared, a line each."""
    names, amounts = (max(len(getattr(row, column)) for row in rows) for column in ("name", "amount"))
    return "\n".join(
        f"  {row.name:<{names}}  {row.amount:<{amounts}}  "
        + (f"DIFFERS  {row.difference}" if row.difference else f"sha256 {row.digest[:16]}  equal")
        for row in rows
    )
