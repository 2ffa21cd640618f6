"""A comparison on the terminal: made for 80 columns, says more where there are more."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from runner.record.console import plain_text
from runner.record.text import escape_control_chars, shorten
from runner.report import format, verdicts
from runner.report.columns import ReportColumn, columns
from runner.report.comparison import BOARD, FILE, PAGE, Comparison, Row

TONES = {"plain": "bold", "warning": "yellow", "shout": "bold white on red"}
STYLES = {"faster": "green", "reference": "dim", "no difference": "dim", "not known": "dim"}
NAME = 24  # characters of a row's name that other columns leave it; longer ones are folded
REASON = 300  # characters of a failure's reason: the page has all of it


def terminal(comparison: Comparison) -> RenderableType:
    """What the comparison came to, the conclusion first."""
    return _Screen(comparison)


@dataclass
class _Screen:
    comparison: Comparison

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        comparison = self.comparison
        kind = "comparison" if comparison.kind == "runs" else comparison.kind
        yield Text()
        yield Text.assemble((f"{kind} ", "dim"), (escape_control_chars(comparison.title), "bold"))
        for sentence in verdicts.conclusion(comparison):
            yield from _wrapped(plain_text(sentence.text, TONES[sentence.tone]), console, options)
        yield Text()
        yield _fitting_table(comparison, console, options)
        for reason in _reasons(comparison):
            yield from _wrapped(reason, console, options)
        notes = _notes(comparison)
        if notes:
            yield Text()
        for note in notes:
            yield from _wrapped(plain_text(f"· {note}", "dim"), console, options)
        yield from _where(comparison)


def _wrapped(text: Text, console: Console, options: ConsoleOptions) -> Iterator[Text]:
    """The lines of a text, without the blanks that rich leaves at their ends."""
    for line in text.wrap(console, options.max_width):
        line.rstrip()
        yield line


def _fitting_table(comparison: Comparison, console: Console, options: ConsoleOptions) -> Table:
    """As many columns as fit; a name that is too long is folded, never cut."""
    chosen = columns(comparison)
    while True:
        table = _table(comparison, chosen, NAME)
        room = (
            options.max_width - Measurement.get(console, options.update(width=999), table).maximum
        )
        if room >= 0 or len(chosen) <= 2:
            return _table(comparison, chosen, NAME + max(0, room))
        chosen.pop()


def _table(comparison: Comparison, chosen: Sequence[ReportColumn], name: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False)
    title = "arm" if comparison.kind == "benchmark" else "run"
    table.add_column(title, header_style="dim", max_width=name, overflow="fold")
    for column in chosen:
        table.add_column(column.title, header_style="dim", justify="right", no_wrap=True)
    table.add_column("", header_style="dim", overflow="fold")
    for row in comparison.rows:
        verdict = verdicts.verdict(row, comparison)
        style = STYLES.get(verdict, "yellow" if row.finished else "red")
        cells = [_cell(column, row) for column in chosen]
        table.add_row(plain_text(row.name), *cells, plain_text(verdict, style))
    return table


def _cell(column: ReportColumn, row: Row) -> Text:
    text = column.text(row)
    if text == format.NONE:
        return Text(text if row.finished else "", style="dim")
    failed = column.key == "parity" and row.parity == "FAIL"
    return plain_text(text.replace(" to ", "–"), "bold red" if failed else "")


def _reasons(comparison: Comparison) -> Iterator[Text]:
    """Those that did not come to an end, with the reason; one that several share is said once."""
    shared: dict[tuple[str, str], list[str]] = {}
    for row in comparison.failures:
        shared.setdefault((row.status, row.reason), []).append(row.name)
    if shared:
        yield Text()
    for (status, reason), names in shared.items():
        reason = shorten(escape_control_chars(reason), REASON) or "no reason is known"
        who, how = escape_control_chars(format.listed(names)), escape_control_chars(status)
        yield Text.assemble((f"{who} ", "bold"), (how, "red"), f": {reason}")


def _notes(comparison: Comparison) -> list[str]:
    found = comparison.benchmark
    if found is None:
        return comparison.notes
    stopped = f", {found.stopped}" if found.stopped else ""
    how = f"{found.blocks} blocks in {format.seconds(found.seconds)}{stopped}"
    return [*comparison.notes, f"{how}; {verdicts.unclaimed(found)}"]


def _where(comparison: Comparison) -> Iterator[Text]:
    """Where the files are; commands are not broken over lines, so that they can be copied."""
    home = comparison.home
    if home is None:
        return
    folder, lines = _short(home), []
    if (home / FILE).exists():
        lines.append(("files:      ", folder))
    if (home / PAGE).exists():
        lines.append(("the page:   ", f"{folder}/{PAGE}"))
    if any(home.glob(f"{BOARD}/events.out.tfevents.*")):
        lines.append(("look at it: ", f"tensorboard --logdir {shlex.quote(folder)}"))
    if lines:
        yield Text()
    for name, text in lines:
        shown = escape_control_chars(text)
        yield Text.assemble((name, "dim"), shown, no_wrap=True, overflow="ignore")


def _short(folder: Path) -> str:
    """A folder as one would type it from here."""
    path, here = folder.absolute(), Path.cwd()
    return os.path.relpath(path, here) if path.is_relative_to(here) else str(path)
