"""Curves of a run, drawn from its history: live below a notebook's cell, or as a figure. Needs matplotlib."""

import importlib
import importlib.util
import io
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.reporting import wording
from jaxtrain.reporting.terminal import Sink
from jaxtrain.reporting.wording import Facts, Line, Summary

History = Sequence[dict[str, float]]
_COLOURS = {"train": "#8b949e", "eval": "#1f77b4", "test": "#2ca02c"}
_POINTS = 78  # screen pixels for an inch of a figure: a 4.6 inch panel beside another fills 720
_SHARE = 0.05  # of the run's time at most goes into drawing
_INSTALL = "curves need matplotlib: pip install matplotlib"


def plot(history: History, *, metrics: Sequence[str] = ("loss", "accuracy")) -> Any:
    """A matplotlib Figure of a history (`result.history`, `report.history`), a panel for each metric.

    Training is grey, evaluations are coloured, a single value is a point; of several members the mean, in a band of one
    standard deviation. Raises UserError without
    matplotlib.
    """
    if not _installed():
        raise UserError(_INSTALL)
    from matplotlib.figure import Figure

    if in_notebook():
        _let_notebook_show(Figure)
    shown = [metric for metric in metrics if _groups(history, metric)] or list(metrics[:1])
    figure = Figure(figsize=(4.6 * len(shown), 3.0), layout="constrained")
    for axes, metric in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        _draw(axes, history, metric)
    return figure


class Curves(Sink):
    """Redraws the curves in place while the run goes on; at most a twentieth of its time is spent on it."""

    def __init__(self, history: History, warn: Callable[[str], None]):
        self._history = history
        self._warn = warn
        self._handle: Any = None
        self._next = 0.0
        self._able: bool | None = None

    def header(self, facts: Facts) -> None:
        self._able = self._check()  # and imports what takes its time, before there is anything to wait for
        if self._able and self._handle is None:
            self._show(_Nothing())  # holds the place: all that is printed from now on comes below

    def write(self, line: Line) -> None:
        if time.monotonic() >= self._next:
            self._redraw()

    def summary(self, summary: Summary) -> None:
        self._redraw()

    def _redraw(self) -> None:
        if self._able is None:
            self._able = self._check()
        if not self._able:
            return
        from IPython.display import Image

        begun = time.monotonic()
        figure = plot(self._history)
        image = Image(data=_png(figure), format="png", width=_width(figure))
        self._show(image)
        now = time.monotonic()
        self._next = now + max((now - begun) / _SHARE, 1.0)

    def _show(self, picture: Any) -> None:
        from IPython.display import display

        if self._handle is None:
            self._handle = display(picture, display_id=True)
        else:
            self._handle.update(picture)

    def _check(self) -> bool:
        if not in_notebook():
            self._warn("live curves need a notebook; `jaxtrain.reporting.curves.plot(history)` draws them afterwards")
        elif not _installed():
            self._warn(_INSTALL)
        else:
            importlib.import_module("matplotlib.figure")
            return True
        return False


class _Nothing:
    """Shown as nothing."""

    def __repr__(self) -> str:
        return ""


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def _let_notebook_show(figure_type: type) -> None:
    """IPython shows figures as pictures only after pyplot was imported; these need no pyplot."""
    pictures = sys.modules["IPython"].get_ipython().display_formatter.formatters["image/png"]
    if figure_type not in pictures:
        pictures.for_type(figure_type, lambda figure: (_png(figure), {"width": _width(figure)}))


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160)
    return buffer.getvalue()


def _width(figure: Any) -> int:
    """In screen pixels: half of the picture's own or less, so that it is sharp."""
    return round(_POINTS * figure.get_figwidth())


def _installed() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def _groups(history: History, metric: str) -> list[str]:
    """The groups ("train", "eval", …) that report this metric, in the order of their appearance."""
    end = f"/{metric}"
    found = dict.fromkeys(name.removesuffix(end) for row in history for name in row if name.endswith(end))
    return [group for group in found if group == "train" or wording.is_evaluation(group)]


def _points(history: History, name: str) -> tuple[list[float], list[float]]:
    """Steps and values of one scalar, where finite."""
    rows = [row for row in history if name in row and math.isfinite(row[name])]
    return [row["step"] for row in rows], [row[name] for row in rows]


def _draw(axes: Any, history: History, metric: str) -> None:
    lowest = math.inf
    for group in _groups(history, metric):
        steps, values = _points(history, f"{group}/{metric}")
        lowest = min([lowest, *values])
        mark = "o" if len(steps) == 1 else "" if group == "train" else "."
        label = "train" if group == "train" else wording.evaluation(group)
        line = "none" if len(steps) == 1 else "-"
        if deviations := _points(history, f"{group}/{metric}/std")[1]:  # of several members
            low, high = zip(*((v - d, v + d) for v, d in zip(values, deviations, strict=False)), strict=True)
            axes.fill_between(steps[: len(low)], low, high, color=_COLOURS.get(group), alpha=0.2, linewidth=0)
        axes.plot(steps, values, ls=line, marker=mark, color=_COLOURS.get(group), label=label, linewidth=1.4)
    axes.set(xlabel="step", title=wording.label(metric))
    if metric == "loss" and 0 < lowest < math.inf:
        axes.set_yscale("log")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.lines:
        axes.legend(frameon=False)
