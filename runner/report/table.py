"""A comparison on the terminal: made for 80 columns, says more where there are more."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from runner.record.console import plain_text
from runner.record.text import escape_control_chars, shorten
from runner.report import format, row_fields, verdicts
from runner.report.columns import Column, columns
from runner.report.comparison import BOARD, FILE, PAGE, Comparison, Row
from runner.report.naming import about_speed

TONES = {"plain": "bold", "warning": "yellow", "shout": "bold white on red"}
NAME = 24  # characters of a row's name; longer ones are folded
REASON = 300  # characters of a failure's reason: the page has all of it

WANTED = (
    "speedup",
    "interval",
    "best",
    "step_ms",
    "rate",
    "memory",
    "parity",
    "device_memory",
    "compile_seconds",
    "break_even",
)
"""The columns by what they are worth: where there is no room, the last ones go."""
FIRST = ("best", "step_ms", "rate")
"""Those worth more where the rows are to differ in what they learn, and not in how they compute."""

SHORT = {
    "interval": "95 %",
    "step_ms": "step ms",
    "device_memory": "device",
    "compile_seconds": "compile",
    "break_even": "pays at",
}


def terminal(comparison: Comparison) -> RenderableType:
    """What the comparison came to, the conclusion first."""
    return _Screen(comparison)


@dataclass
class _Screen:
    comparison: Comparison

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        comparison = self.comparison
        heading = "damaged " if comparison.damaged else ""
        heading += {"benchmark": "benchmark", "sweep": "sweep"}.get(comparison.kind, "comparison")
        yield Text()
        yield Text.assemble(
            (f"{heading} ", "dim"), (escape_control_chars(comparison.title), "bold")
        )
        width = options.max_width
        for sentence in verdicts.conclusion(comparison):
            said = Text(escape_control_chars(sentence.text), TONES[sentence.tone])
            yield from _wrapped(said, console, width)
        yield Text()
        yield _table(comparison, width)
        for reason in _reasons(comparison):
            yield from _wrapped(reason, console, width)
        if notes := _notes(comparison):
            yield Text()
            for note in notes:
                yield from _wrapped(Text(f"· {escape_control_chars(note)}", "dim"), console, width)
        yield from _where(comparison)


def _wrapped(text: Text, console: Console, width: int) -> Iterator[Text]:
    """The lines of a text, without the blanks that rich leaves at their ends."""
    for line in text.wrap(console, width):
        line.rstrip()
        yield line


def _table(comparison: Comparison, width: int) -> Table:
    """As many columns as fit; a name that is too long is folded, never cut."""
    there = {column.key: column for column in columns(comparison)}
    speed = comparison.kind == "benchmark" or about_speed(row.overrides for row in comparison.rows)
    wanted = WANTED if speed else dict.fromkeys((*FIRST, *WANTED))
    chosen = [there[key] for key in wanted if key in there]
    longest = max((len(row.name) for row in comparison.rows), default=0)
    longest = max(longest, 4) + 2
    verdict = _verdict_width(comparison)
    while len(chosen) > 2 and min(NAME, longest) + verdict + _wide(chosen, comparison) > width:
        chosen.pop()
    name = min(longest, max(NAME, width - verdict - _wide(chosen, comparison)))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False)
    title = "arm" if comparison.kind == "benchmark" else "run"
    table.add_column(title, header_style="dim", max_width=name - 2, overflow="fold")
    for column in chosen:
        heading = SHORT.get(column.key, column.title)
        table.add_column(heading, header_style="dim", justify="right", no_wrap=True)
    table.add_column("", header_style="dim", overflow="fold")
    for row in comparison.rows:
        cells = [_cell(column, row) for column in chosen]
        table.add_row(Text(escape_control_chars(row.name)), *cells, _verdict(row, comparison))
    return table


def _wide(chosen: list[Column], comparison: Comparison) -> int:
    """Columns of the terminal that these take."""
    wide = 0
    for column in chosen:
        cells = [_cell(column, row).cell_len for row in comparison.rows]
        wide += max(len(SHORT.get(column.key, column.title)), *cells) + 2
    return wide


def _verdict_width(comparison: Comparison) -> int:
    return max((len(verdicts.verdict(row, comparison)) for row in comparison.rows), default=0) + 1


def _cell(column: Column, row: Row) -> Text:
    if column.number(row) is None and column.key != "break_even":
        return Text(format.NONE if row.finished else "", style="dim")
    if column.key == "parity" and row.parity == "FAIL":
        return Text("FAIL", style="bold red")
    text = column.text(row)
    return Text(text.replace(" to ", "–") if column.key == "interval" else text)


def _verdict(row: Row, comparison: Comparison) -> Text:
    said = verdicts.verdict(row, comparison)
    style = {"faster": "green", "reference": "dim", "no difference": "dim", "not known": "dim"}
    return plain_text(said, style.get(said, "yellow" if row.finished else "red"))


def _reasons(comparison: Comparison) -> Iterator[Text]:
    """Those that did not come to an end, with the reason; one that several share is said once."""
    shared: dict[tuple[str, str], list[str]] = {}
    for row in row_fields.failures(comparison):
        shared.setdefault((row.status, row.reason), []).append(row.name)
    for number, ((status, reason), names) in enumerate(shared.items()):
        if number == 0:
            yield Text()
        reason = shorten(escape_control_chars(reason), REASON) or "no reason is known"
        who = escape_control_chars(format.listed(names))
        yield Text.assemble(
            (f"{who} ", "bold"), (escape_control_chars(status), "red"), f": {reason}"
        )


def _notes(comparison: Comparison) -> list[str]:
    notes = list(comparison.notes)
    found = comparison.benchmark
    if found is not None:
        how = f"{found.blocks} blocks in {format.seconds(found.seconds)}"
        stopped = f", {found.stopped}" if found.stopped else ""
        notes.append(f"{how}{stopped}; {verdicts.unclaimed(found)}")
    return notes


def _where(comparison: Comparison) -> Iterator[Text]:
    """Where the files are; commands are not broken over lines, so that they can be copied."""
    if comparison.home is None:
        return
    home, folder, lines = comparison.home, short(comparison.home), []
    if (home / FILE).exists():
        lines.append(("files:      ", folder))
    if (home / PAGE).exists():
        lines.append(("the page:   ", f"{folder}/{PAGE}"))
    if any(home.glob(f"{BOARD}/events.out.tfevents.*")):
        lines.append(("look at it: ", f"tensorboard --logdir {shlex.quote(folder)}"))
    if lines:
        yield Text()
    for name, text in lines:
        yield Text.assemble(
            (name, "dim"), escape_control_chars(text), no_wrap=True, overflow="ignore"
        )


def short(folder: Path) -> str:
    """A folder as one would type it from here."""
    path, here = folder.absolute(), Path.cwd()
    shown = os.path.relpath(path, here) if path.is_relative_to(here) else str(path)
    return shown
