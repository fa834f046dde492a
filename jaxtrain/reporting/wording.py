"""How a run reads: its numbers, and its lines as plain text. No colour, no layout, no state."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

SYNTHETIC = "SYNTHETIC DATA"
MEMBERS = 24  # of a table, at most
_BARS = "▁▂▃▄▅▆▇█"
_ASCII = str.maketrans({"▲": "^", "×": "x", "·": "|", "…": "~", "–": "-", "—": "-", "→": ">", "═": "="})


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the parameter table: a tensor, or a group of them. `count` is in parameters."""

    path: str
    shape: str
    count: int


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a run says of itself before its first step. An empty text is left out."""

    run: str
    workdir: Path | None
    devices: str
    precision: str
    data: str
    model: str
    steps: str
    optimizer: str = ""
    replicas: str = ""
    synthetic: bool = False
    parameters: tuple[Row, ...] = ()
    total: int = 0  # parameters in all
    notes: tuple[str, ...] = ()

    def rows(self) -> Iterator[tuple[str, str]]:
        """(label, text) of what is to be said, in the order in which one wants to know."""
        for label in ("devices", "precision", "data", "model", "optimizer", "replicas", "steps"):
            if text := getattr(self, label):
                yield label, text


@dataclasses.dataclass(frozen=True)
class Line:
    """One report: what `write(step, scalars)` was given, and what is shown beside it."""

    step: int
    scalars: Mapping[str, float]
    total: int  # steps of the whole run
    steps_per_epoch: float
    eta: float | None = None  # seconds that are left at the recent speed
    best: bool = False  # the validation value here is better than all before
    synthetic: bool = False

    @property
    def fraction(self) -> float:
        """Share of the run that is done, in [0, 1]."""
        return min(self.step / self.total, 1.0) if self.total else 1.0

    def group(self, name: str) -> dict[str, float]:
        """The scalars "name/…", without that prefix."""
        start = name + "/"
        return {key[len(start) :]: value for key, value in self.scalars.items() if key.startswith(start)}

    def evaluations(self) -> list[str]:
        """The evaluations in this report: "eval" on validation, "test", "eval_<name>"."""
        groups = dict.fromkeys(key.partition("/")[0] for key in self.scalars)
        return [group for group in groups if is_evaluation(group)]


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a run says when it ends. `results` maps an evaluation to its values; times in seconds."""

    outcome: str
    results: Mapping[str, Mapping[str, float]]
    best: tuple[str, int, float] | None  # metric, step, value
    seconds: float
    examples_per_second: float | None
    losses: tuple[float, ...] = ()  # of training, one a report
    places: tuple[tuple[str, str], ...] = ()  # (label, path)
    synthetic: bool = False
    members: tuple[str, ...] = ()  # their names; `results` has the values of number r under "<metric>/<r>"

    def table(self) -> list[tuple[str, ...]]:
        """A row for each member, below the names of the columns; nothing where there are none."""
        columns = [(name, metric) for name in self.results for metric in ordered(self.results[name])[:2]]
        if not self.members or not columns:
            return []
        found = [("member", *(f"{evaluation(name)} {label(metric)}" for name, metric in columns))]
        for r, member in enumerate(self.members[:MEMBERS]):
            cells = [self.results[name].get(f"{metric}/{r}") for name, metric in columns]
            texts = (
                "" if cell is None else value(column[1], cell) for cell, column in zip(cells, columns, strict=True)
            )
            found.append((member, *texts))
        if len(self.members) > MEMBERS:
            found.append((f"… {len(self.members) - MEMBERS} more in metrics.jsonl", *("" for _ in columns)))
        return found

    def rows(self) -> Iterator[tuple[str, str]]:
        """(label, text), the result first."""
        if self.best is not None:
            metric, step, found = self.best
            yield "best", f"validation {label(metric)} {value(metric, found)} at step {step:,}"
        for name, values in self.results.items():
            yield evaluation(name), pairs(values)
        speed = f"  ·  {quantity(self.examples_per_second)} examples/s" if self.examples_per_second else ""
        yield "time", clock(self.seconds) + speed


def is_evaluation(group: str) -> bool:
    """Whether scalars of this prefix come from an evaluation."""
    return group in ("eval", "test") or group.startswith("eval_")


def evaluation(group: str) -> str:
    """What an evaluation is called to a reader: "eval" is the one on validation."""
    return {"eval": "validation"}.get(group, group.removeprefix("eval_"))


def label(metric: str) -> str:
    """What a metric is called to a reader."""
    return {"learning_rate": "lr", "grad_norm": "grad"}.get(metric, metric.replace("_", " "))


def value(metric: str, number: float) -> str:
    """A metric's value: accuracies in percent, all else in four digits."""
    if not math.isfinite(number):
        return {math.inf: "inf", -math.inf: "-inf"}.get(number, "nan")
    if "accuracy" in metric:
        return f"{100 * number:.2f}%"
    if metric == "learning_rate":
        return f"{number:.2e}"
    if metric not in ("loss", "grad_norm") and float(number).is_integer() and abs(number) < 1e6:
        return f"{int(number):,}"  # a count
    return f"{number:#.4g}"


def spread(metric: str, values: Mapping[str, float]) -> str:
    """A metric's value among others: of several members "98.51 ± 0.31%", mean and standard deviation."""
    text, deviation = value(metric, values[metric]), values.get(f"{metric}/std")
    if deviation is None:
        return text
    if text.endswith("%"):
        return f"{text[:-1]} ± {100 * deviation:.2f}%"
    return f"{text} ± {deviation:.2g}"


def pairs(values: Mapping[str, float]) -> str:
    """ "accuracy 97.22%  loss 0.09120", what a reader looks for first in front."""
    return "  ".join(f"{label(name)} {spread(name, values)}" for name in ordered(values))


def ordered(names: Iterable[str], first: tuple[str, ...] = ("accuracy", "loss")) -> list[str]:
    """Names of metrics, the usual ones first, the others as they came.

    Parts of one ("class_accuracy/7") are for the files: a thousand classes would fill the screen.
    """
    names = [name for name in names if "/" not in name]
    return [name for name in first if name in names] + [name for name in names if name not in first]


def quantity(number: float) -> str:
    """A rate for reading: 87.3, 9,412, 12.4k, 1.35M."""
    if not math.isfinite(number):
        return "–"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(number) >= size:
            scaled = number / (1e3 if unit == "k" else size)
            return f"{scaled:.{0 if scaled >= 100 else 1 if scaled >= 10 else 2}f}{unit}"
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def memory(size: float) -> str:
    """Bytes for reading, in the binary units that tools show: 512 MiB, 3.2 GiB."""
    return f"{size / 2**20:.0f} MiB" if size < 2**30 else f"{size / 2**30:.1f} GiB"


def clock(seconds: float) -> str:
    """A length of time: 3.2 s, 0:42, 1:23:45, 2d 03:10."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    return countdown(seconds)


def countdown(seconds: float) -> str:
    """A length of time in whole seconds: 0:07, 1:23:45, 2d 03:10."""
    whole = max(round(seconds), 0)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def position(line: Line) -> str:
    """ "step 50/660"."""
    return f"step {line.step:,}/{line.total:,}"


def epochs(line: Line) -> str:
    """ "epoch 4.55/60", or nothing where the data has no end."""
    if not 0 < line.steps_per_epoch < math.inf:
        return ""
    return f"epoch {line.step / line.steps_per_epoch:.2f}/{line.total / line.steps_per_epoch:.4g}"


def training(line: Line) -> list[tuple[str, str]]:
    """(label, text) of what a training report holds, in order of interest; what needs no label has none."""
    train = line.group("train")
    names = ordered(train, first=("loss", "accuracy"))
    names.sort(key=lambda name: name in ("learning_rate", "grad_norm"))  # stable: these two last
    fields = [(label(name), spread(name, train)) for name in names]
    if (speed := line.scalars.get("time/examples_per_second")) is not None:
        fields.append(("", f"{quantity(speed)} ex/s"))
    used = line.scalars.get("memory/device_bytes", line.scalars.get("memory/host_bytes"))
    return fields if used is None else [*fields, ("", memory(used))]


def training_line(line: Line) -> str:
    """A training report as one plain line."""
    left = [f"{countdown(line.eta)} left"] if line.eta is not None and line.step < line.total else []
    fields = [f"{name} {text}".strip() for name, text in training(line)]
    return _joined(line, [position(line), epochs(line), *fields, *left])


def evaluation_lines(line: Line) -> list[str]:
    """The evaluations in a report, one plain line each."""
    lines = []
    for group in line.evaluations():
        mark = ["▲ best"] if line.best and group == "eval" else []
        place = [position(line), epochs(line)]
        lines.append(_joined(line, [*place, evaluation(group), pairs(line.group(group)), *mark]))
    return lines


def header_lines(facts: Facts) -> list[str]:
    """The head of a run in plain lines: the workdir first, the parameter table last."""
    lines = [f"workdir    {facts.workdir}"] if facts.workdir else []
    lines.append(f"run        {facts.run}")
    if facts.synthetic:
        lines.append(f"*** {SYNTHETIC}: no result of this run says anything about the real data ***")
    lines += [f"{label:<10} {text}" for label, text in facts.rows()]
    if facts.parameters:
        path, shape = (max(len(getattr(row, column)) for row in facts.parameters) for column in ("path", "shape"))
        lines += [f"  {row.path:<{path}}  {row.shape:<{shape}}  {row.count:>13,}" for row in facts.parameters]
        lines.append(f"  {'total':<{path}}  {'':<{shape}}  {facts.total:>13,}")
    return lines + [f"note: {note}" for note in facts.notes]


def summary_lines(summary: Summary) -> list[str]:
    """The end of a run in plain lines."""
    badge = f"[{SYNTHETIC}] " if summary.synthetic else ""
    return [
        badge + summary.outcome,
        *(f"  {label:<11} {text}" for label, text in summary.rows()),
        *_aligned(summary.table()),
        *(f"  {label:<11} {text}" for label, text in summary.places),
    ]


def _aligned(table: list[tuple[str, ...]]) -> Iterator[str]:
    """The rows of a table, its first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for first, *cells in table:
        rest = (f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        yield "  ".join(["", f"{first:<{widths[0]}}", *rest]).rstrip()


def sparkline(numbers: Iterable[float], width: int) -> str:
    """A curve in one row of at most `width` characters; means of neighbours where there are more numbers."""
    finite = [number for number in numbers if math.isfinite(number)]
    if len(finite) < 2 or width < 2:
        return ""
    cells = min(width, len(finite))
    edges = [round(i * len(finite) / cells) for i in range(cells + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def encodable(text: str, encoding: str | None) -> str:
    """The text as a stream of this encoding can carry it: look-alikes first, then question marks."""
    try:
        text.encode(encoding or "ascii")
        return text
    except UnicodeEncodeError:
        return text.translate(_ASCII).encode(encoding or "ascii", "replace").decode(encoding or "ascii")


def render_config(config: Mapping[str, Any], kinds: Mapping[str, str] | None = None) -> str:
    """A resolved config as aligned `key = value` lines, each key as `--config.key=` takes it.

    `kinds` (key to "run", "place" or "view") puts the keys of a kind together, under its name.
    """
    groups: dict[str, list[str]] = {}
    for key in config:
        groups.setdefault((kinds or {}).get(key, ""), []).append(key)
    blocks = []
    for kind, keys in groups.items():
        rows = [row for key in keys for row in _settings(key, config[key])]
        width = max(len(name) for name, _ in rows)
        blocks.append("\n".join([f"# {kind}"] * bool(kind) + [f"{name:<{width}} = {text}" for name, text in rows]))
    return "\n\n".join(blocks)


def _settings(key: str, content: Any) -> Iterator[tuple[str, str]]:
    if isinstance(content, Mapping) or hasattr(content, "items"):
        items = list(content.items())
        if not items:
            yield key, "{}"
        for name, inner in items:
            yield from _settings(f"{key}.{name}", inner)
    else:
        yield key, repr(content)


def _joined(line: Line, fields: Iterable[str]) -> str:
    badge = [f"[{SYNTHETIC}]"] if line.synthetic else []
    return "  ".join(filter(None, [*badge, *fields]))
