"""Where a run shows itself: live in a terminal, in plain lines elsewhere, or not at all.

The loop pays no more than an assignment: the live display is drawn by a thread of its own, at most four times
a second, where something changed. A terminal that is held (Ctrl-S, a slow connection) holds nobody up.
"""

import atexit
import contextlib
import contextvars
import dataclasses
import io
import math
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from jaxtrain.errors import UserError
from jaxtrain.reporting import panels, wording
from jaxtrain.reporting.wording import Facts, Line, Summary

MODES = ("auto", "live", "plain", "quiet")
_FRAMES_PER_SECOND = 4
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class Sink:
    """Where reports go. A sink overrides what concerns it; nothing else happens to the rest."""

    def header(self, facts: Facts) -> None:
        """The run begins."""

    def write(self, line: Line) -> None:
        """A report: scalars of training, of evaluations, or both."""

    def say(self, text: str, *, warning: bool = False) -> None:
        """A note that stays."""

    def status(self, text: str) -> None:
        """What the run is doing now; "" for training."""

    def summary(self, summary: Summary) -> None:
        """The run has ended."""

    def cut(self, history: list[dict[str, float]]) -> None:
        """The run goes on from an earlier step; `history` is what remains of its reports."""

    def flush(self) -> None:
        """Makes everything said so far durable."""

    def close(self) -> None:
        """The last call."""


def open_terminal(mode: str = "auto", stream: TextIO | None = None) -> Sink:
    """The display for `mode` on `stream` (None: standard output).

    "auto" is live in a terminal, and plain in a pipe, a file, a notebook, CI, or where TERM is "dumb". Raises
    UserError for an unknown mode.
    """
    if mode not in MODES:
        raise UserError(f"terminal is {mode!r}; expected one of {', '.join(MODES)}")
    if (recording := _recording.get()) is not None and mode != "quiet":
        return Recorded(recording)
    stream = stream if stream is not None else sys.stdout
    if mode == "quiet" or stream is None:
        return Sink()
    steady = Steady(stream)
    if mode == "live" or (mode == "auto" and can_animate(stream)):
        force = True if mode == "live" else None
        file = cast(TextIO, steady)
        return Animated(Console(file=file, force_terminal=force, force_jupyter=False, highlight=False))
    return Plain(steady.line)


def can_animate(stream: TextIO) -> bool:
    """Whether lines can be redrawn there: a terminal that has the characters, and a person before it."""
    return (
        stream.isatty()
        and os.environ.get("TERM", "") not in ("", "dumb")
        and not os.environ.get("CI")
        and "utf" in (stream.encoding or "").lower()
    )


class Steady:
    """A stream that may go away (`| head`, a closed connection) without ending the run."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._gone = False

    def write(self, text: str) -> int:
        self._try(self._stream.write, wording.encodable(text, self._stream.encoding))
        return len(text)

    def line(self, text: str) -> None:
        self.write(text + "\n")
        self.flush()

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, call: Callable[..., Any], *arguments: str) -> None:
        if self._gone:
            return
        try:
            call(*arguments)
        except (OSError, ValueError):  # ValueError: closed
            self._gone = True
            with contextlib.suppress(OSError, ValueError):
                # Or Python's own last flush would fail, and turn the exit code into 120.
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Plain(Sink):
    """Plain lines, without control characters, through `emit`.

    The first training reports come one by one, then at most one every `pause` seconds, and the last;
    evaluations and notes always.
    """

    def __init__(self, emit: Callable[[str], None], *, pause: float = 5.0, first: int = 5):
        self._emit = emit
        self._pause = pause
        self._first = first
        self._last = -math.inf
        self._said = ""

    def header(self, facts: Facts) -> None:
        for text in wording.header_lines(facts):
            self._emit(text)

    def write(self, line: Line) -> None:
        if line.group("train") and self._due(line):
            self._emit(wording.training_line(line))
        for text in wording.evaluation_lines(line):
            self._emit(text)

    def say(self, text: str, *, warning: bool = False) -> None:
        self._emit(f"warning: {text}" if warning else text)

    def status(self, text: str) -> None:
        # Compiling is what takes long while nothing else is said.
        if text.startswith("compiling") and text != self._said:
            self._emit(text)
            self._said = text

    def summary(self, summary: Summary) -> None:
        for text in wording.summary_lines(summary):
            self._emit(text)

    def _due(self, line: Line) -> bool:
        now = time.monotonic()
        if self._first <= 0 and now - self._last < self._pause and line.step < line.total:
            return False
        self._first -= 1
        self._last = now
        return True


class Animated(Sink):
    """Panels, permanent lines, and below them a live line. Only its own thread writes to the terminal."""

    def __init__(self, console: Console):
        self._console = console
        self._view = View()
        self._permanent: queue.SimpleQueue[RenderableType | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def header(self, facts: Facts) -> None:
        self._permanent.put(panels.header_panel(facts, self._console.width))
        self._start()

    def write(self, line: Line) -> None:
        self._view.take(line)
        for text in panels.evaluation_texts(line):
            self._permanent.put(text)
        self._start()

    def say(self, text: str, *, warning: bool = False) -> None:
        self._permanent.put(panels.note_text(text, warning))
        self._start()

    def status(self, text: str) -> None:
        self._view.status = text

    def summary(self, summary: Summary) -> None:
        self._view.hidden = True
        self._permanent.put(panels.summary_panel(summary, self._console.width))

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._permanent.put(None)
            thread.join(timeout=5)  # a terminal that is held (Ctrl-S) must not hold the end of the run
            atexit.unregister(self.close)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._draw, name="jaxtrain-terminal", daemon=True)
            self._thread.start()
            atexit.register(self.close)  # whatever ends the process, the terminal is left as it was found

    def _draw(self) -> None:
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            self._console.show_cursor(True)  # never hidden, so that no crash can leave it so
            shown = None
            while self._print_permanent():
                frame = self._view.frame(self._console.width, time.monotonic())
                if frame != shown:
                    live.update(frame, refresh=True)
                    shown = frame
        if not self._view.hidden and shown is not None:
            self._console.print(shown)  # no summary came: where the run stood is what there is to see

    def _print_permanent(self) -> bool:
        """Waits for a frame's time at most. False when it was the last."""
        end = time.monotonic() + 1 / _FRAMES_PER_SECOND
        while (left := end - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                renderable = self._permanent.get(timeout=left)
                if renderable is None:
                    return False
                self._console.print(renderable, crop=False)
        return True


class View:
    """What the live line shows. Written by the loop, read by the thread that draws; no lock is needed."""

    def __init__(self) -> None:
        self.status = ""
        self.hidden = False
        self._line: Line | None = None
        self._taken = 0.0
        self._losses: list[float] = []
        self._begun = time.monotonic()

    def take(self, line: Line) -> None:
        """Shows this report from now on, if it is one of training."""
        if train := line.group("train"):
            if "loss" in train:
                self._losses = [*self._losses[-999:], train["loss"]]
            self._taken = time.monotonic()
            self._line = line

    def frame(self, width: int, now: float) -> Text:
        """Two or three rows of at most `width` columns."""
        width = min(width, panels.WIDTH) - 1  # the last column stays free: terminals wrap there
        if self.hidden:
            return Text()
        if self._line is None:
            spin = _SPINNER[int(8 * now) % len(_SPINNER)]
            waited = wording.countdown(now - self._begun)
            row = Text.assemble((f" {spin} ", panels.ACCENT), self.status or "compiling…", (f"  {waited}", panels.DIM))
            row.truncate(width)
            return row
        rows = [panels.progress_row(self._line, self._line_eta(now), self.status, width)]
        rows += panels.value_rows(self._line, self._losses, width)
        return Text("\n").join(rows)

    def _line_eta(self, now: float) -> float | None:
        line = self._line
        return None if line is None or line.eta is None else max(line.eta - (now - self._taken), 0.0)


@dataclasses.dataclass
class Recording:
    """A picture being taken: what was printed so far, and the share of the run at which it ends."""

    console: Console
    until: float
    done: bool = False


_recording: contextvars.ContextVar[Recording | None] = contextvars.ContextVar("recording", default=None)


class Recorded(Sink):
    """Draws what `Animated` would show, once, into a recording."""

    def __init__(self, recording: Recording):
        self._recording = recording
        self._view = View()

    def header(self, facts: Facts) -> None:
        self._print(panels.header_panel(facts, self._recording.console.width))

    def write(self, line: Line) -> None:
        self._view.take(line)
        for text in panels.evaluation_texts(line):
            self._print(text)
        if line.group("train") and line.fraction >= self._recording.until:
            self._print(self._view.frame(self._recording.console.width, time.monotonic()))
            self._recording.done = True

    def say(self, text: str, *, warning: bool = False) -> None:
        self._print(panels.note_text(text, warning))

    def summary(self, summary: Summary) -> None:
        self._print(panels.summary_panel(summary, self._recording.console.width))

    def _print(self, renderable: RenderableType) -> None:
        if not self._recording.done:
            self._recording.console.print(renderable, crop=False)


@contextlib.contextmanager
def record(path: str | Path, *, width: int = 100, until: float = math.inf, title: str = "jaxtrain") -> Iterator[None]:
    """Within it, the display of a run is drawn into an SVG picture at `path` instead of standard output.

        with terminal.record("docs/terminal.svg", until=0.7):
            train.run(config)

    The picture ends with the live line at the first report past the share `until` of the run; by default it
    holds the whole run and its summary. It loads nothing from the network, no font either.
    """
    console = Console(
        file=io.StringIO(),
        record=True,
        width=width,
        force_terminal=True,
        color_system="truecolor",
        highlight=False,
    )
    token = _recording.set(Recording(console, until))
    try:
        yield
    finally:
        _recording.reset(token)
        Path(path).write_text(_svg(console, title), encoding="utf-8")


def _svg(console: Console, title: str) -> str:
    from rich.console import CONSOLE_SVG_FORMAT
    from rich.terminal_theme import TerminalTheme

    dark = [(22, 27, 34), (255, 123, 114), (63, 185, 80), (210, 153, 34)]
    dark += [(88, 166, 255), (188, 140, 255), (57, 197, 207), (177, 186, 196)]
    theme = TerminalTheme((13, 17, 23), (230, 237, 243), dark, [(125, 133, 144), *dark[1:]])
    layout = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title=title, theme=theme, code_format=layout)
