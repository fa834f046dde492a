"""Curves: of any history, live only where there is a notebook, and one clear line where they cannot be."""

import math
from types import SimpleNamespace

import pytest

from jaxtrain.errors import UserError
from jaxtrain.reporting import curves
from jaxtrain.reporting.report import Report

HISTORY = [
    {"step": 10, "train/loss": 2.0, "train/accuracy": 0.5, "train/learning_rate": 0.1},
    {"step": 20, "train/loss": math.nan, "train/accuracy": 0.75},
    {"step": 20, "eval/loss": 1.0, "eval/accuracy": 0.5, "eval_hard/loss": 3.0},
    {"step": 20, "test/accuracy": 0.5},
]


def test_a_panel_for_each_metric_and_a_line_for_each_group():
    loss, accuracy = curves.plot(HISTORY).axes
    assert {line.get_label() for line in loss.lines} == {"train", "validation", "hard"}
    assert {line.get_label() for line in accuracy.lines} == {"train", "validation", "test"}
    assert loss.lines[0].get_xydata().tolist() == [[10, 2]]  # NaN is no point
    assert loss.get_yscale() == "log"


@pytest.mark.parametrize("history", [[], [{"step": 1}], [{"step": 1, "train/loss": math.nan}], HISTORY[:1]])
def test_any_history_can_be_drawn(history, tmp_path):
    curves.plot(history).savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_losses_below_zero_are_drawn_on_a_linear_scale():
    assert curves.plot([{"step": 1, "train/loss": -1.0}]).axes[0].get_yscale() == "linear"


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(curves.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install matplotlib"):
        curves.plot(HISTORY)


@pytest.mark.parametrize(
    "notebook, text", [(False, "live curves need a notebook"), (True, "curves need matplotlib: pip install")]
)
def test_live_curves_that_cannot_be_say_so_once(notebook, text, monkeypatch, capsys):
    monkeypatch.setattr(curves, "in_notebook", lambda: notebook)
    monkeypatch.setattr(curves.importlib.util, "find_spec", lambda name: None)
    run(steps=5)
    assert capsys.readouterr().out.count(text) == 1


def test_live_curves_are_drawn_in_place(monkeypatch):
    drawn, shown = [], []
    handle = SimpleNamespace(update=drawn.append)
    display = pytest.importorskip("IPython.display", reason="IPython comes with the test extra")
    monkeypatch.setattr(display, "display", lambda image, display_id: shown.append(image) or handle)
    monkeypatch.setattr(curves, "in_notebook", lambda: True)
    monkeypatch.setattr(curves, "_let_notebook_show", lambda figure: None)
    run(steps=50)
    assert len(shown) == 1 and 1 <= len(drawn) < 25  # the first report, the end, and little between
    assert drawn[0].data.startswith(b"\x89PNG")


def run(steps: int) -> None:
    with Report(None, total_steps=steps, steps_per_epoch=1, batch_size=1, live_curves=True) as report:
        for step in range(1, steps + 1):
            report.write(step, {"train/loss": 1 / step})
        report.summary()
