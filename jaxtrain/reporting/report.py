"""Reports: one `write(step, scalars)`, behind which stand the terminal, files and TensorBoard.

Scalars are named "<group>/<metric>": "train/loss", "train/learning_rate", …; "eval/accuracy" for validation,
"test/accuracy", "eval_<name>/…" for a named evaluation; "time/examples_per_second", "time/step_ms",
"time/data_wait"; "memory/device_bytes" or "memory/host_bytes". How fast it goes and how long it still takes
are found here too.
"""

import collections
import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from jaxtrain.reporting import wording
from jaxtrain.reporting.parameters import parameter_count, parameter_table
from jaxtrain.reporting.sinks import JsonLines, Record, file_sinks, record_of
from jaxtrain.reporting.terminal import Sink, open_terminal
from jaxtrain.reporting.wording import Facts, Line, Summary, render_config

__all__ = ["Facts", "Report", "parameter_count", "parameter_table", "render_config"]


class Report:
    """What a run tells: to people, to files. Use it as a context manager, or `close` it.

    `workdir` None writes no file. `total_steps`, `steps_per_epoch` and `batch_size` (global) place a step in
    the run. `terminal` is "auto", "live", "plain" or "quiet"; `live_curves` draws in a notebook. `best` names
    the validation metric that chooses: "accuracy" is "eval/accuracy". Where `synthetic`, every report says so; the
    summary has a table of `members`, if they have names.

    What an earlier process wrote to the workdir is in `history` from the start; `cut(step)` brings it and the
    files into agreement with the restored state. Raises StorageError where the workdir cannot be written or
    `metrics.jsonl` is damaged, UserError for an unknown `terminal`.
    """

    def __init__(
        self,
        workdir: Path | None,
        *,
        total_steps: int,
        steps_per_epoch: float,
        batch_size: int,
        terminal: str = "auto",
        tensorboard: bool = True,
        live_curves: bool = False,
        best: str = "accuracy",
        synthetic: bool = False,
        members: Sequence[str] = (),
    ):
        self._workdir = workdir
        self._total = total_steps
        self._steps_per_epoch = float(steps_per_epoch)
        self._batch_size = batch_size
        self._best = best
        self._pace = Pace()
        self._memory = Memory()
        self._speeds: list[float] = []
        self._begun = time.monotonic()
        self._evaluated: set[str] = set()
        self._synthetic, self._members = synthetic, tuple(members)
        self._agreed = False  # whether the files hold what `history` does
        self.may_write: Callable[[], None] = lambda: None  # raises where the workdir is another run's by now
        self.history: list[Record] = []
        files = [] if workdir is None else file_sinks(workdir, tensorboard)
        self._sinks = [*files, open_terminal(terminal)]
        if live_curves:
            from jaxtrain.reporting.curves import Curves

            self._sinks.append(Curves(self.history, self.warn))
        if workdir is not None:
            self.history += JsonLines.read(workdir / "metrics.jsonl")

    def header(self, facts: Facts) -> None:
        """Says what runs, where, on what."""
        self._each(lambda sink: sink.header(facts))

    def write(self, step: int, scalars: Mapping[str, float | str], *, best: bool = False) -> None:
        """Reports scalars (floats, under the names above) of the state that step number `step` made.

        A text among them is said, and not kept. `best` marks a validation that beats all before it.
        """
        self.may_write()
        if not self._agreed:
            self.cut(sys.maxsize)
        texts = {name: text for name, text in scalars.items() if isinstance(text, str)}
        values = {sys.intern(name): float(number) for name, number in scalars.items() if name not in texts}
        if any(name.startswith("train/") for name in values):
            values = self._timed(step, values) | self._memory.read(time.monotonic())
        values["time/unix"] = round(time.time(), 3)
        line = self._line(step, values, best)
        self._pause_for_first(line.evaluations())
        self.history.append(record_of(line))
        self._each(lambda sink: sink.write(line))
        for name, text in texts.items():
            self.say(f"{name} of step {step:,}:\n{text}")

    def say(self, text: str) -> None:
        """A note that stays."""
        self._each(lambda sink: sink.say(text))

    def warn(self, text: str) -> None:
        """A warning that stays."""
        self._each(lambda sink: sink.say(text, warning=True))

    def status(self, text: str = "") -> None:
        """What the run is busy with, such as "evaluating validation…"; "" when it trains again."""
        self._each(lambda sink: sink.status(text))

    def summary(
        self,
        *,
        ended: str = "finished",
        metrics: Mapping[str, float] | None = None,
        step: int | None = None,
        seconds: float | None = None,
        best: Mapping[str, float] | None = None,
        places: Mapping[str, str | Path] | None = None,
    ) -> None:
        """Says how the run `ended`, and what came out.

        By default `metrics` ("eval/accuracy", …) are the last ones in `history`, `seconds` the age of this
        report. `best` is the record in `history` that validation chose. `places` maps a label to where
        something is; by default it names the workdir.
        """
        key = f"eval/{self._best}"
        where = places if places is not None else {"workdir": self._workdir} if self._workdir else {}
        summary = Summary(
            outcome=ended if step is None or "step" in ended else f"{ended} at step {step:,}",
            results=_by_evaluation(metrics if metrics is not None else _last(self.history)),
            best=(self._best, int(best["step"]), best[key]) if best and key in best else None,
            seconds=time.monotonic() - self._begun if seconds is None else seconds,
            examples_per_second=sorted(self._speeds)[len(self._speeds) // 2] if self._speeds else None,
            losses=tuple(row["train/loss"] for row in self.history if "train/loss" in row),
            places=tuple((label, str(path)) for label, path in where.items()),
            synthetic=self._synthetic,
            members=self._members,
        )
        self._each(lambda sink: sink.summary(summary))

    def cut(self, step: int) -> None:
        """Forgets all reports past `step`, the step of the restored state, in `history` and in the files."""
        self.may_write()
        self.history[:] = [row for row in self.history if row["step"] <= step]
        self._agreed = True
        self._pace = Pace()
        self._each(lambda sink: sink.cut(self.history))

    def flush(self) -> None:
        """Returns when everything reported is on disk: to be called before a checkpoint is committed."""
        self._each(lambda sink: sink.flush())

    def close(self) -> None:
        """Ends the display and the files; a second call does nothing."""
        sinks, self._sinks = self._sinks, []
        with contextlib.ExitStack() as stack:  # the display first; every one of them, whatever the others do
            for sink in sinks:
                stack.callback(sink.close)

    def __enter__(self) -> "Report":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _each(self, call: Callable[[Sink], None]) -> None:
        if not self._sinks:
            raise ValueError("the report is closed")
        for sink in self._sinks:
            call(sink)

    def _timed(self, step: int, values: Record) -> Record:
        """Adds the speed where the caller did not measure it."""
        self._pace.mark(step, time.monotonic())
        if (seconds := self._pace.latest) is not None:
            values.setdefault("time/step_ms", 1e3 * seconds)
            values.setdefault("time/examples_per_second", self._batch_size / seconds)
        if (speed := values.get("time/examples_per_second")) is not None:
            self._speeds.append(speed)
        return values

    def _line(self, step: int, values: Record, best: bool) -> Line:
        pace = self._pace.seconds_per_step
        eta = None if pace is None else pace * max(self._total - step, 0)
        return Line(
            step=step,
            scalars=values,
            total=self._total,
            steps_per_epoch=self._steps_per_epoch,
            eta=eta,
            best=best,
            synthetic=self._synthetic,
        )

    def _pause_for_first(self, evaluations: list[str]) -> None:
        """The first evaluation of a kind compiles; the time left must not be reckoned from that."""
        if not self._evaluated.issuperset(evaluations):
            self._pace.pause()
        self._evaluated.update(evaluations)


class Pace:
    """The recent speed: the last twenty reports, without the time before the first."""

    def __init__(self) -> None:
        self._intervals: collections.deque[tuple[int, float]] = collections.deque(maxlen=20)  # steps, seconds
        self._last: tuple[int, float] | None = None

    def mark(self, step: int, now: float) -> None:
        """The report of `step` came at `now` (seconds, monotonic)."""
        if self._last is not None and step > self._last[0] and now > self._last[1]:
            self._intervals.append((step - self._last[0], now - self._last[1]))
        self._last = (step, now)

    def pause(self) -> None:
        """Leaves the interval that is running out."""
        self._last = None

    @property
    def latest(self) -> float | None:
        """Seconds a step in the last interval."""
        return self._intervals[-1][1] / self._intervals[-1][0] if self._intervals else None

    @property
    def seconds_per_step(self) -> float | None:
        """Seconds a step of late, with all that happens between steps."""
        steps = sum(steps for steps, _ in self._intervals)
        return sum(seconds for _, seconds in self._intervals) / steps if steps else None


class Memory:
    """Bytes in use on the fullest local device, where devices say so; else those of this process."""

    def __init__(self) -> None:
        self._found: Record = {}
        self._next = -math.inf

    def read(self, now: float) -> Record:
        """At most a second old: asking costs as much as all the rest of a report."""
        if now >= self._next:
            self._next = now + 1.0
            devices = sys.modules["jax"].local_devices() if "jax" in sys.modules else []
            used = [stats["bytes_in_use"] for device in devices if (stats := device.memory_stats())]
            name, size = ("device", float(max(used))) if used else ("host", _resident())
            self._found = {f"memory/{name}_bytes": size}
        return self._found


def _last(history: Iterable[Record]) -> Record:
    """The last value of every scalar."""
    return {name: number for row in history for name, number in row.items()}


def _by_evaluation(metrics: Mapping[str, float]) -> dict[str, Record]:
    """{"eval": {"accuracy": …}, …}: validation first, test last; what is no evaluation is left out."""
    found: dict[str, Record] = {}
    for name, number in metrics.items():
        group, _, metric = name.partition("/")
        if wording.is_evaluation(group):
            found.setdefault(group, {})[metric] = number
    return {group: found[group] for group in sorted(found, key=lambda group: (group == "test", group))}


def _resident() -> float:
    """Bytes that this process holds in memory; their peak where there is no /proc (macOS)."""
    try:
        return float(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
