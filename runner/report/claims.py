"""What people say about techniques beside what was seen here: on the terminal, and as files."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from runner.benchmark.result import BETTER, FAILS, HOLDS, ClaimResult, Claims
from runner.errors import StorageError
from runner.record.console import plain_text
from runner.record.markdown import code, escape, table
from runner.record.storage import replace_text

FILE, PAGE = "claims.json", "claims.md"
STYLES = {HOLDS: "green", BETTER: "green", FAILS: "bold red"}
LOADED = 0.1  # share of the CPUs that others took, from which on it is said
UNITS = {"cost": "% time", "latency": "% latency"}  # of other quantities but speed: % memory


def seen(row: ClaimResult) -> str:
    """What was found, in the words of what is claimed."""
    if row.ratio is None or row.interval is None:
        return "–"
    low, high = row.interval
    if row.quantity in ("speed", "inference"):
        return f"{row.ratio:.2f}× ({low:.2f} to {high:.2f})"
    unit = UNITS.get(row.quantity, "% memory")
    return f"{_signed(row.ratio)} {unit} ({_signed(low)} to {_signed(high)})"


def _signed(ratio: float) -> str:
    return f"{(ratio - 1) * 100:+.0f}".replace("-", "−")


def about(found: Claims) -> str:
    """The machine, in a line."""
    machine, versions = found.machine, found.versions
    parts = [str(machine.get("cpu") or "unknown CPU"), f"{machine.get('cores', '?')} cores"]
    if machine.get("device") not in (None, "cpu"):
        parts.append(str(machine.get("device_name")))
    parts += [f"{name} {versions[name]}" for name in ("torch", "python") if name in versions]
    return ", ".join(parts)


def remarks(found: Claims) -> list[str]:
    """What to know of how it was measured."""
    texts = [
        "An interval is of 95 % and through the stopping rule; of memory, latency and int8 it is "
        "the range of six readings. A claim holds or does not where all of the interval, with the "
        "noise at both ends, is on one side of what is claimed at least; else it is undecided."
    ]
    others = found.load.get("others")
    if others is not None and others > LOADED:
        texts.append(
            f"Other processes took {others:.0%} of the CPUs meanwhile: intervals are "
            "wider for it, and what needs free cores did worse."
        )
    return texts


def show(found: Claims) -> RenderableType:
    """The table, and below it why something is not known; made for 100 columns, folds below."""
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in ("claim", "claimed", "seen here", "verdict"):
        grid.add_column(heading, overflow="fold")
    for row in found.rows:
        cells = [plain_text(text) for text in (row.name, row.said, seen(row))]
        grid.add_row(*cells, Text(row.verdict, style=STYLES.get(row.verdict, "yellow")))
    reasons = [f"· {row.name}: {row.reason}" for row in found.rows if row.reason]
    notes = [plain_text(note, "dim") for note in (*reasons, about(found), *remarks(found))]
    title = Text("what is said, and what holds here", style="bold cyan")
    return Group(title, Text(), grid, Text(), *notes)


def markdown(found: Claims) -> str:
    """All of it as a page: table, reasons, commands."""
    cells, items = [], []
    for row in found.rows:
        noise = "–" if row.noise is None else f"{row.noise * 100:.1f} %"
        cells.append((row.name, row.said, seen(row), noise, row.verdict))
        why = f"{escape(row.reason)}. " if row.reason else ""
        items.append(f"- **{escape(row.name)}** ({escape(row.work)}): {why}{escape(row.why)}")
    commands = dict.fromkeys(row.command for row in found.rows if row.command)
    parts = [
        "# What is said, and what holds here",
        escape(f"{about(found)}; {found.started[:10]}; {found.seconds / 60:.0f} minutes."),
        code(found.command, "sh"),
        table(("claim", "claimed", "seen here", "noise", "verdict"), cells),
        *(escape(note) for note in remarks(found)),
        "## Row by row",
        "\n".join(items),
        "## To see for oneself",
        "Each of these trains like the arm in question; the plain run has `optimization=none`, for "
        "flash attention `optimization.attention.kernel=plain`.",
        code("\n".join(commands), "sh"),
    ]
    return "\n\n".join(parts) + "\n"


def write(found: Claims, folder: Path) -> list[Path]:
    """claims.json and claims.md, whole or not at all. StorageError where that is not possible."""
    data = json.dumps(found.as_dict(), indent=2, default=str) + "\n"
    for name, text in ((FILE, data), (PAGE, markdown(found))):
        try:
            replace_text(folder / name, text)
        except OSError as error:
            raise StorageError(f"{folder / name}: not written: {error.strerror}") from error
    return [folder / FILE, folder / PAGE]
