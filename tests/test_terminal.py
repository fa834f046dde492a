"""The display: what it shows at every width, and that it never stops a run or leaves a mark."""

import io
import re
import sys
import threading
import time

import pytest
from rich.console import Console

from jaxtrain.errors import UserError
from jaxtrain.reporting import panels, terminal
from jaxtrain.reporting.report import Report
from jaxtrain.reporting.terminal import Animated, Plain, Sink, Steady, View, open_terminal, record
from jaxtrain.reporting.wording import Facts, Line, Row, Summary

WIDTHS = [60, 70, 80, 100, 120, 200]
ESCAPE = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")
FACTS = Facts(
    run="digits",
    workdir="/tmp/a/rather/long/path/that/should/stay/whole/for/copying/runs/digits-1a2b3c4d",
    devices="8 × cpu",
    precision="float32, because a CPU has no bfloat16 units",
    data="digits: 1,150 train, 288 validation, 359 test",
    model="cnn(width=32)",
    steps="660 steps of 128 examples",
    parameters=tuple(Row(f"stage_{i}/block_{i}/convolution", "kernel 3×3×256×512, bias 512", 10**i) for i in range(9)),
    total=111_111_111,
    notes=("a note",),
)
SCALARS = {
    "train/loss": 0.4213,
    "train/accuracy": 0.8765,
    "train/learning_rate": 9.3e-4,
    "train/grad_norm": 1.25,
    "time/examples_per_second": 12_345.0,
    "memory/host_bytes": 512 * 2**20,
}
SHOWN = [
    "step 250/660",
    "loss 0.4213",
    "accuracy 87.65%",
    "lr 9.30e-04",
    "12.3k ex/s",
    "512 MiB",
    "0:42 left",
]


def a_line(step: int = 250, scalars: dict[str, float] = SCALARS, **options: object) -> Line:
    return Line(**{"step": step, "scalars": scalars, "total": 660, "steps_per_epoch": 11.25, "eta": 42.0} | options)


def a_summary(**options: object) -> Summary:
    results = {"eval": {"accuracy": 0.99, "loss": 0.04}, "test": {"accuracy": 0.98}}
    given = {"outcome": "finished", "results": results, "best": ("accuracy", 600, 0.99), "seconds": 83.0}
    return Summary(**given | {"examples_per_second": 1e4, "losses": (3.0, 2.0, 1.0)} | options)


def drawn(renderable: object, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=False, highlight=False)
    console.print(renderable, crop=False)
    return console.file.getvalue().splitlines()


class Tty(io.StringIO):
    """A terminal that keeps what is written to it."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def in_a_terminal(monkeypatch):
    for name in ("CI", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "40")


def tell(sink: Sink) -> None:
    """A whole short run."""
    sink.header(FACTS)
    sink.status("compiling the step…")
    sink.write(a_line())
    sink.status("evaluating validation…")
    sink.write(a_line(250, {"eval/accuracy": 0.9, "eval/loss": 0.3}, best=True))
    sink.status("")
    sink.say("a note", warning=False)
    sink.say("a warning", warning=True)
    sink.write(a_line(660))
    sink.summary(a_summary())
    sink.close()


@pytest.mark.parametrize(
    "tty, environment, encoding, kind",
    [
        (True, {}, "utf-8", Animated),
        (False, {}, "utf-8", Plain),
        (True, {"TERM": "dumb"}, "utf-8", Plain),
        (True, {"CI": "true"}, "utf-8", Plain),
        (True, {}, "ascii", Plain),
    ],
)
def test_auto_is_live_only_where_that_can_be_read(tty, environment, encoding, kind, in_a_terminal, monkeypatch):
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    stream = type("Stream", (io.StringIO,), {"encoding": encoding, "isatty": lambda self: tty})()
    assert type(open_terminal("auto", stream)) is kind


@pytest.mark.parametrize("mode, kind", [("live", Animated), ("plain", Plain), ("quiet", Sink)])
def test_a_mode_can_be_asked_for(mode, kind):
    assert type(open_terminal(mode, io.StringIO())) is kind


def test_an_unknown_mode_is_refused():
    with pytest.raises(UserError, match="fancy.*auto, live, plain, quiet"):
        open_terminal("fancy")


def test_no_standard_output_is_no_error(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    tell(open_terminal("auto"))
    assert type(open_terminal("live")) is Sink


def test_plain_lines_hold_everything_and_no_control_characters(capsys):
    tell(open_terminal("auto"))
    output = capsys.readouterr().out
    assert not ESCAPE.search(output)
    assert output.startswith(f"workdir    {FACTS.workdir}\n")
    for text in (
        *SHOWN,
        "compiling the step…",
        "▲ best",
        "validation  accuracy 90.00%",
        "warning: a warning",
    ):
        assert text in output
    assert "finished\n  best        validation accuracy 99.00% at step 600\n" in output


def test_plain_lines_fit_any_encoding():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    tell(open_terminal("plain", stream))
    assert b"^ best" in raw.getvalue() and b"8 x cpu" in raw.getvalue()


def test_plain_training_lines_come_seldom_and_evaluations_always(monkeypatch):
    now, lines = [0.0], []
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    plain = Plain(lines.append, pause=5.0, first=3)
    for step in range(1, 661):
        now[0] += 0.125
        plain.write(a_line(step))
    assert [int(re.findall(r"step (\d+)", line)[0]) for line in lines[:5]] == [1, 2, 3, 43, 83]
    assert "step 660/660" in lines[-1] and len(lines) == 3 + 16 + 1
    for step in (1, 2, 3, 4, 5):
        plain.write(a_line(step, {"eval/accuracy": 0.5}))
    assert sum("validation" in line for line in lines) == 5


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("synthetic", [False, True])
def test_the_live_line_holds_everything_at_any_width(width, synthetic):
    view = View()
    for loss in (2.0, 1.0, 0.5):
        view.take(a_line(scalars=SCALARS | {"train/loss": loss}, synthetic=synthetic))
    view.take(a_line(synthetic=synthetic))
    text = view.frame(width, time.monotonic()).plain
    rows = text.split("\n")
    assert all(len(row) < width for row in rows) and 2 <= len(rows) <= 3
    for field in (*SHOWN, "38%", "━━━━", *(["SYNTHETIC DATA"] if synthetic else [])):
        assert field in text
    assert ("epoch 22.22/58.67" in text) or width < 70


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("synthetic", [False, True])
def test_panels_fit_at_any_width(width, synthetic):
    header = drawn(panels.header_panel(Facts(**vars(FACTS) | {"synthetic": synthetic}), width), width)
    summary = drawn(panels.summary_panel(a_summary(synthetic=synthetic), width), width)
    for lines in (header, summary):
        assert all(len(line) <= width for line in lines if not line.startswith("workdir"))
        assert ("SYNTHETIC DATA" in "\n".join(lines)) is synthetic
    text = "\n".join(header)
    assert header[0] == f"workdir  {FACTS.workdir}"  # whole, to be copied
    assert "111,111,111" in text and "stage_8" in text
    assert "…/" not in text  # no name of a layer is cut


def test_before_the_first_report_it_says_what_it_waits_for():
    view = View()
    assert "compiling…" in view.frame(80, time.monotonic()).plain
    view.status = "reading the data…"
    text = view.frame(80, time.monotonic() + 75).plain
    assert "reading the data…  1:15" in text and "\n" not in text


def test_the_time_left_runs_down_between_reports():
    view = View()
    view.take(a_line())
    now = time.monotonic()
    assert "0:42 left" in view.frame(100, now).plain
    assert "0:32 left" in view.frame(100, now + 10).plain
    assert "0:00 left" in view.frame(100, now + 999).plain


def test_a_status_takes_the_place_of_the_time_left():
    view = View()
    view.take(a_line())
    view.status = "evaluating validation…"
    assert "evaluating validation…" in view.frame(100, time.monotonic()).plain


def test_only_the_best_validation_gets_a_triangle():
    best = a_line(10, {"eval/accuracy": 0.5, "test/accuracy": 0.6, "eval_hard/loss": 2.0}, best=True)
    lines = [text.plain for text in panels.evaluation_texts(best)]
    assert ["▲" in line for line in lines] == [True, False, False]
    assert "validation" in lines[0] and "test" in lines[1] and "hard" in lines[2]
    assert "▲" not in panels.evaluation_texts(a_line(10, {"eval/accuracy": 0.5}))[0].plain


def screen(output: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", output)


def test_live_tells_all_and_leaves_a_clean_terminal(in_a_terminal):
    stream, before = Tty(), sys.stdout
    tell(open_terminal("auto", stream))
    output = stream.getvalue()
    for text in ("▲ step 250  validation", "! a warning", "jaxtrain digits", "finished", str(FACTS.workdir)):
        assert text in screen(output)
    assert output.rfind("\x1b[?25h") > output.rfind("\x1b[?25l")
    assert output.index("\x1b[?25h") - output.index("\x1b[?25l") < 8  # never hidden while something is drawn
    assert sys.stdout is before


def test_without_a_summary_the_last_state_stays_to_be_seen(in_a_terminal):
    stream = Tty()
    sink = open_terminal("auto", stream)
    sink.write(a_line())
    deadline = time.monotonic() + 10
    while "loss" not in stream.getvalue() and time.monotonic() < deadline:
        time.sleep(0.02)
    sink.close()
    after = stream.getvalue().rpartition("\x1b[2K")[2]
    assert "0.4213" in screen(after)


def test_no_color_is_respected(in_a_terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Tty()
    tell(open_terminal("auto", stream))
    codes = {code for found in re.findall(r"\x1b\[([0-9;]*)m", stream.getvalue()) for code in found.split(";")}
    assert codes <= {"", "0", "1", "2"}


def test_a_terminal_that_is_held_holds_nobody_up(in_a_terminal):
    held = threading.Event()

    class Held(Tty):
        def write(self, text: str) -> int:
            held.wait(timeout=30)
            return super().write(text)

    stream = Held()
    sink = open_terminal("auto", stream)
    for step in range(1, 200):
        sink.write(a_line(step, {"train/loss": 1.0, "eval/accuracy": 0.5}))
    assert stream.getvalue() == ""  # nothing was written, and still all of it was taken
    held.set()
    sink.close()
    assert "step 199" in screen(stream.getvalue())


@pytest.mark.parametrize("error", [BrokenPipeError, OSError(5, "Input/output error"), ValueError("closed file")])
@pytest.mark.parametrize("mode", ["plain", "live"])
def test_a_terminal_that_goes_away_ends_nothing(mode, error, in_a_terminal):
    class Gone(Tty):
        def write(self, text: str) -> int:
            raise error

    tell(open_terminal(mode, Gone()))
    steady = Steady(Gone())
    assert steady.write("text") == 4 and steady.write("more") == 4


def test_display_and_users_prints_share_the_terminal(in_a_terminal, monkeypatch):
    stream = Tty()
    monkeypatch.setattr(sys, "stdout", stream)
    sink = open_terminal("auto")
    sink.write(a_line())
    deadline = time.monotonic() + 10
    while sys.stdout is stream and time.monotonic() < deadline:
        time.sleep(0.02)
    print("a user's own line")
    sink.close()
    assert "a user's own line" in screen(stream.getvalue()) and sys.stdout is stream


@pytest.mark.parametrize(
    "until, there, absent",
    [(0.5, ["step 400/660", "validation"], ["finished"]), (9.0, ["finished"], ["400/660"])],
)
def test_a_run_can_be_recorded_as_a_picture(until, there, absent, tmp_path, capsys):
    path = tmp_path / "picture.svg"
    with record(path, until=until), Report(None, total_steps=660, steps_per_epoch=11, batch_size=8) as report:
        report.header(FACTS)
        report.write(300, {"eval/accuracy": 0.5})
        report.write(400, SCALARS)
        report.write(660, SCALARS)
        report.summary()
    picture = path.read_text().replace("&#160;", " ")
    assert all(text in picture for text in ["jaxtrain", *there]) and not any(text in picture for text in absent)
    assert "url(http" not in picture and "@font-face" not in picture
    assert capsys.readouterr().out == ""
