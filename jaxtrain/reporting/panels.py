"""What the terminal shows, as rich renderables: panels, permanent lines, and the rows of the live line."""

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from jaxtrain.reporting import wording
from jaxtrain.reporting.wording import SYNTHETIC, Facts, Line, Summary

WIDTH = 108  # columns that panels and bar use at most; longer lines are hard to read
ACCENT = "cyan"
DIM = "bright_black"
_SHARE = 12  # columns of the bars that show a layer's share of the parameters


def progress_row(line: Line, eta: float | None, status: str, width: int) -> Text:
    """Bar, share, place in the run, time left: one row of `width` columns."""
    left = status or (f"{wording.countdown(eta)} left" if eta is not None and line.step < line.total else "")
    fields = [f"{100 * line.fraction:3.0f}%", wording.position(line), wording.epochs(line), left]
    while len(tail := "  ".join(filter(None, fields))) > width - 14 and any(fields[1:]):
        fields[2 if fields[2] else 3 if fields[3] else 1] = ""
    size = max(width - len(tail) - 3, 0)
    full = int(size * line.fraction)
    row = Text.assemble(" ", ("━" * full, ACCENT), ("━" * (size - full), DIM), "  ", (tail[:width], ""))
    if left and status:
        row.highlight_words([status], style="yellow")
    return row


def value_rows(line: Line, losses: list[float], width: int) -> list[Text]:
    """The values of a report on as many rows as they need; a curve of the loss where there is room."""
    rows = [Text(" ")]
    if line.synthetic:
        rows[-1].append(f" {SYNTHETIC} ", style="black on yellow").append("  ")
    for name, number in wording.training(line):
        style = "bold" if name in ("loss", "accuracy") else ""
        text = Text.assemble((f"{name} " if name else "", DIM), (number, style))
        if len(rows[-1]) + len(text) > width and len(rows[-1]) > 1:
            rows.append(Text(" "))
        rows[-1].append(text).append("   ")
    for row in rows:
        row.rstrip()
    curve = wording.sparkline(losses, min(width - len(rows[-1]) - 4, 24))
    if len(curve) >= 4:
        rows[-1].append("   ").append(curve, style=ACCENT)
    return rows


def evaluation_texts(line: Line) -> list[Text]:
    """A permanent line for each evaluation in a report; a triangle marks the best validation so far."""
    texts = []
    for group in line.evaluations():
        best = line.best and group == "eval"
        text = Text.assemble((" ▲ " if best else " · ", "bold green" if best else DIM))
        if line.synthetic:
            text.append(f"{SYNTHETIC} ", style="yellow")
        place = f"{line.step:>{len(f'{line.total:,}')},}"
        text.append(f"step {place}  ", style=DIM)
        text.append(f"{wording.evaluation(group):<11}", style="" if group == "eval" else "bold")
        values = line.group(group)
        for name in wording.ordered(values):
            style = "bold green" if best and name == "accuracy" else ""
            text.append(f" {wording.label(name)} ", style=DIM)
            text.append(f"{wording.spread(name, values):>7} ", style=style)
        texts.append(text)
    return texts


def note_text(text: str, warning: bool) -> Text:
    """A note or a warning that stays."""
    return _whole((" ! ", "bold yellow"), (text, "yellow")) if warning else _whole(" · " + text)


def header_panel(facts: Facts, width: int) -> RenderableType:
    """Who runs, where, on what; then the parameter table."""
    width = min(width, WIDTH)
    workdir = ("workdir  ", DIM) if facts.workdir else ("no workdir", DIM)
    parts: list[RenderableType] = [_whole(workdir, str(facts.workdir or ""))]
    if facts.synthetic:
        loud = f" {SYNTHETIC} — no result of this run says anything about the real data "
        parts.append(Text(loud, style="bold black on yellow"))
    body: list[RenderableType] = [_grid(facts.rows())]
    if facts.parameters:
        body += [Text(), _parameters(facts, width - 4)]
    edge = "yellow" if facts.synthetic else DIM
    title = Text.assemble(("jaxtrain ", f"bold {ACCENT}"), (facts.run, "bold"))
    parts.append(Panel(Group(*body), title=title, title_align="left", border_style=edge, width=width))
    parts += [note_text(note, warning=False) for note in facts.notes]
    return Group(*parts, Text())


def summary_panel(summary: Summary, width: int) -> RenderableType:
    """How it went, how long it took, where things are. Paths stand below the panel, whole, to be copied."""
    body: list[RenderableType] = [_grid(summary.rows(), strong=("best", "test"))]
    if curve := wording.sparkline(summary.losses, min(width, WIDTH) - 20):
        body.append(_grid([("train loss", curve)], strong=("train loss",)))
    if table := summary.table():
        body += [Text(), _members(table)]
    colour = "green" if summary.outcome.startswith(("finished", "evaluated")) else "yellow"
    title = Text(summary.outcome, style=f"bold {colour}")
    edge = "yellow" if summary.synthetic else colour
    if summary.synthetic:
        body.insert(0, Text(f" {SYNTHETIC} ", style="bold black on yellow"))
    panel = Panel(Group(*body), title=title, title_align="left", border_style=edge, width=min(width, WIDTH))
    paths = [_whole((f"  {name:<12} ", DIM), path) for name, path in summary.places]
    return Group(panel, *paths)


def _members(rows: list[tuple[str, ...]]) -> Table:
    head, *rest = rows
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style=DIM)
    table.add_column(head[0], no_wrap=True)
    for title in head[1:]:
        table.add_column(title, justify="right")
    for row in rest:
        table.add_row(*row)
    return table


def _whole(*parts: str | tuple[str, str]) -> Text:
    """A text that is never broken: the terminal wraps it, and a path in it can still be copied."""
    return Text.assemble(*parts, no_wrap=True, overflow="ignore")


def _grid(rows: Iterable[tuple[str, str]], strong: tuple[str, ...] = ()) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style=DIM, no_wrap=True, min_width=10)
    grid.add_column(overflow="fold")
    for label, text in rows:
        grid.add_row(label, Text(text, style="bold" if label in strong else ""))
    return grid


def _parameters(facts: Facts, width: int) -> Table:
    """The parameter table in `width` columns: where it is narrow the bars go, then the shapes."""
    layer = min(max(len(row.path) for row in facts.parameters), width // 2)
    total = f"{facts.total:,}"
    bars = _SHARE if width >= 80 else 0
    room = width - layer - max(len(total), len("parameters")) - bars - 3 * 4
    table = Table(box=None, padding=(0, 2), pad_edge=False, header_style=DIM, show_footer=True)
    table.add_column("layer", "total", width=layer, no_wrap=True)
    if room >= 12:
        table.add_column("tensors", style=DIM, no_wrap=True, max_width=room)
    table.add_column("parameters", total, justify="right", footer_style="bold", no_wrap=True)
    if bars:
        table.add_column("", width=bars, no_wrap=True)
    largest = max(max(row.count for row in facts.parameters), 1)
    for row in facts.parameters:
        share = Text("━" * round(_SHARE * row.count / largest), style=ACCENT)
        table.add_row(row.path, *[row.shape] * (room >= 12), f"{row.count:,}", *[share] * bool(bars))
    return table
