"""A comparison in the terminal: designed for 80 columns, with more columns if it is wider."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from runner import format
from runner.record.console import plain_text
from runner.record.text import escape_control_chars, shorten
from runner.report import verdicts
from runner.report.columns import ReportColumn, columns
from runner.report.comparison import BOARD, FILE, PAGE, Comparison, Row

TONES = {"plain": "bold", "warning": "yellow", "shout": "bold white on red"}
STYLES = {"faster": "green", "reference": "dim", "no difference": "dim", "not known": "dim"}
MOST_ROWS = 60  # in the terminal; the page has all
NAME = 24  # minimum width of the name column; longer names are folded
REASON = 300  # maximum characters of a failure's reason


@dataclass
class ComparisonScreen:
    """Return a comparison as a Rich renderable, conclusion first."""

    comparison: Comparison

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        comparison = self.comparison
        kind = "comparison" if comparison.kind == "runs" else comparison.kind
        yield Text()
        yield Text.assemble((f"{kind} ", "dim"), (escape_control_chars(comparison.title), "bold"))
        for sentence in verdicts.conclusion(comparison):
            yield plain_text(sentence.text, TONES[sentence.tone])
        yield Text()
        yield _fitting_table(comparison.by_configuration, console, options)
        if (beyond := len(comparison.rows) - MOST_ROWS) > 0:
            yield plain_text(f"and {beyond} more, in {PAGE} and {FILE}", "dim")
        for part in (_reasons(comparison), _notes(comparison), _files(comparison)):
            if lines := list(part):
                yield from (Text(), *lines)


def _fitting_table(comparison: Comparison, console: Console, options: ConsoleOptions) -> Table:
    """Return a table of as many columns as fit; long names are folded, never cut."""
    chosen = columns(comparison)
    while True:
        table = _table(comparison, chosen, NAME)
        width = Measurement.get(console, options.update(width=999), table).maximum
        room = options.max_width - width
        if room >= 0 or len(chosen) <= 2:
            return _table(comparison, chosen, NAME + max(0, room))
        chosen.pop()


def _table(comparison: Comparison, chosen: Sequence[ReportColumn], name: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False)
    table.add_column(comparison.row_title, header_style="dim", max_width=name, overflow="fold")
    for column in chosen:
        table.add_column(column.title, header_style="dim", justify="right", no_wrap=True)
    table.add_column("", header_style="dim", overflow="fold")
    for row in comparison.rows[:MOST_ROWS]:
        verdict = verdicts.verdict(row, comparison)
        style = STYLES.get(verdict, "yellow" if row.finished else "red")
        cells = [_cell(column, row) for column in chosen]
        stands = ", ".join(filter(None, (row.over, verdict)))
        table.add_row(plain_text(row.name), *cells, plain_text(stands, style))
    return table


def _cell(column: ReportColumn, row: Row) -> Text:
    text = column.text(row)
    if text == format.NONE:
        return Text(text if row.finished else "", style="dim")
    failed = column.key == "parity" and row.parity == "FAIL"
    return plain_text(text.replace(" to ", "–"), "bold red" if failed else "")


def _reasons(comparison: Comparison) -> Iterator[Text]:
    """Yield the failed rows with their reasons; equal reasons are shown once."""
    shared: dict[tuple[str, str], list[str]] = {}
    for row in comparison.failures:
        shared.setdefault((row.status, row.reason), []).append(row.name)
    for (status, reason), names in shared.items():
        reason = shorten(escape_control_chars(reason), REASON) or "no reason given"
        subject, how = escape_control_chars(format.listed(names)), escape_control_chars(status)
        yield Text.assemble((f"{subject} ", "bold"), (how, "red"), f": {reason}")


def _notes(comparison: Comparison) -> list[Text]:
    notes, benchmark = list(comparison.notes), comparison.benchmark
    if benchmark is not None:
        stopped = f", {benchmark.stopped}" if benchmark.stopped else ""
        how = f"{verdicts.measured(benchmark)}{stopped}"
        notes.append(f"{how}; {verdicts.unclaimed(benchmark)}")
    return [plain_text(f"· {note}", "dim") for note in notes]


def _files(comparison: Comparison) -> Iterator[Text]:
    """Yield file paths and commands; commands are not wrapped, so that they can be copied."""
    home = comparison.home
    if home is None or not (home / FILE).exists():
        return
    folder = format.short_path(home)
    lines = {"files:      ": folder}
    if comparison.search is not None and (best := comparison.search.best) is not None:
        lines = {"the best:   ": best.command, **lines}
    if (home / PAGE).exists():
        lines["the page:   "] = f"{folder}/{PAGE}"
    if (home / BOARD).exists():
        lines["look at it: "] = f"python -m runner.report --tensorboard {shlex.quote(folder)}"
    for name, text in lines.items():
        shown = escape_control_chars(text)
        yield Text.assemble((name, "dim"), shown, no_wrap=True, overflow="ignore")
