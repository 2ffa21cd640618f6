"""`benchmark.claims`: what people say about techniques beside what was measured here."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from runner.benchmark.result import BETTER, FAILS, HOLDS, ClaimResult, Claims
from runner.errors import StorageError
from runner.record.console import plain_text
from runner.record.markdown import code, escape, table
from runner.record.storage import replace_text
from runner.report.format import NONE

FILE, PAGE = "claims.json", "claims.md"
TITLE = "What is said, and what holds here"
STYLES = {HOLDS: "green", BETTER: "green", FAILS: "bold red"}
LOADED = 0.1  # share of the CPUs that others took, from which on it is said
METHOD = (
    "An interval is of 95 % and through the stopping rule; of memory and latency it is the "
    "range of six readings. A claim holds or does not where all of the interval, with the "
    "noise at both ends, is on one side of what is claimed at least; else it is undecided."
)
PLAIN = (
    "Each of these trains like the arm in question; the plain run has `optimization=none`, for "
    "flash attention `optimization.attention.kernel=plain`."
)


def _measured(row: ClaimResult) -> str:
    """What was measured, in the words of what is claimed."""
    if row.ratio is None or row.interval is None:
        return NONE
    low, high = row.interval
    if row.quantity == "speed":
        return f"{row.ratio:.2f}× ({low:.2f} to {high:.2f})"
    unit = "% latency" if row.quantity == "latency" else "% memory"
    ratio, low_end, high_end = (
        f"{(x - 1) * 100:+.0f}".replace("-", "−") for x in (row.ratio, low, high)
    )
    return f"{ratio} {unit} ({low_end} to {high_end})"


def _notes(claims: Claims) -> list[str]:
    """The machine, and what to know of how it was measured."""
    machine, versions, others = claims.machine, claims.versions, claims.load.get("others")
    parts = [str(machine.get("cpu") or "unknown CPU"), f"{machine.get('cores', '?')} cores"]
    if machine.get("device") not in (None, "cpu"):
        parts.append(str(machine.get("device_name")))
    parts += [f"{name} {versions[name]}" for name in ("torch", "python") if name in versions]
    load = (
        f"Other processes took {others or 0:.0%} of the CPUs meanwhile: intervals are wider for "
        "it, and what needs free cores did worse."
    )
    return [", ".join(parts), METHOD, *([load] if (others or 0) > LOADED else [])]


def show(claims: Claims) -> RenderableType:
    """The table, and below it why something is not known; made for 100 columns, folds below."""
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in ("claim", "claimed", "seen here", "verdict"):
        grid.add_column(heading, overflow="fold")
    for row in claims.rows:
        cells = [plain_text(text) for text in (row.name, row.said, _measured(row))]
        grid.add_row(*cells, Text(row.verdict, style=STYLES.get(row.verdict, "yellow")))
    reasons = [f"· {row.name}: {row.reason}" for row in claims.rows if row.reason]
    notes = [plain_text(note, "dim") for note in (*reasons, *_notes(claims))]
    return Group(Text(TITLE, style="bold cyan"), Text(), grid, Text(), *notes)


def markdown(claims: Claims) -> str:
    """All of it as a page: table, reasons, commands."""
    cells, items = [], []
    for row in claims.rows:
        noise = NONE if row.noise is None else f"{row.noise * 100:.1f} %"
        cells.append((row.name, row.said, _measured(row), noise, row.verdict))
        why = f"{escape(row.reason)}. " if row.reason else ""
        items.append(f"- **{escape(row.name)}** ({escape(row.work)}): {why}{escape(row.why)}")
    commands = dict.fromkeys(row.command for row in claims.rows if row.command)
    machine, *notes = _notes(claims)
    parts = [
        f"# {TITLE}",
        escape(f"{machine}; {claims.started[:10]}; {claims.seconds / 60:.0f} minutes."),
        code(claims.command, "sh"),
        table(("claim", "claimed", "seen here", "noise", "verdict"), cells),
        *(escape(note) for note in notes),
        "## Row by row",
        "\n".join(items),
        "## To see for oneself",
        PLAIN,
        code("\n".join(commands), "sh"),
    ]
    return "\n\n".join(parts) + "\n"


def write(claims: Claims, folder: Path) -> list[Path]:
    """claims.json and claims.md, whole or not at all. StorageError where that is not possible."""
    data = json.dumps(asdict(claims), indent=2, default=str) + "\n"
    for name, text in ((FILE, data), (PAGE, markdown(claims))):
        try:
            replace_text(folder / name, text)
        except OSError as error:
            raise StorageError(f"{folder / name}: not written: {error.strerror}") from error
    return [folder / FILE, folder / PAGE]
