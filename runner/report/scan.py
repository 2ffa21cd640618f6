"""What job=scan found: a list for the terminal, scan.md and scan.json for the folder."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from runner.record import markdown as md
from runner.record.storage import replace_text
from runner.record.text import escape_control_chars, json_safe
from runner.report.format import size
from runner.security.config import SecurityLevel
from runner.security.trust import OTHER, Assessment, Reason, Severity, Trust, enough, way_in

JSON, PAGE = "scan.json", "scan.md"
SCHEMA = 1
ROWS = 1000  # of scan.md; scan.json has them all
STYLES = {
    Trust.REFUSED: "bold red",
    Trust.UNTRUSTED: "yellow",
    Trust.CHECKED: "green",
    Trust.PINNED: "green",
}


@dataclass(frozen=True)
class Row:
    """One thing that was judged."""

    kind: str  # file | checkpoint | capture | run | dcp | folder
    found: Assessment

    @property
    def first(self) -> Reason | None:
        """The worst of what was found."""
        reasons = sorted(self.found.reasons, key=lambda reason: -reason.severity)
        return reasons[0] if reasons else None

    @property
    def formats(self) -> str:
        """What it is made of, without what nobody loads."""
        kinds = {facts.format for facts in self.found.files.values()} - {OTHER}
        return ", ".join(sorted(kinds)) or OTHER

    @property
    def digest(self) -> str:
        """sha256 of a single file; of a folder each file has its own."""
        return next(iter(self.found.files.values())).sha256 if len(self.found.files) == 1 else ""

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(facts.size for facts in self.found.files.values())


@dataclass
class Scan:
    """All of it."""

    path: str
    level: SecurityLevel
    total: int = 0  # things that there are to judge
    rows: list[Row] = field(default_factory=list)  # those that were
    passed_over: int = 0  # files that nothing loads as a model or as arrays
    odd: list[Reason] = field(default_factory=list)  # links that lead out, pipes, …
    interrupted: bool = False
    seconds: float = 0.0

    @property
    def worst_first(self) -> list[Row]:
        """In the order they are shown."""
        return sorted(self.rows, key=_badness)

    @property
    def refused(self) -> list[Row]:
        """Those that are refused at any level, and those that this one does not load."""
        return [
            row
            for row in self.worst_first
            if row.found.refused or not enough(row.found, self.level)
        ]

    @property
    def verdict(self) -> str:
        """In one line."""
        refused = self.refused
        if not refused and self.interrupted:
            return f"interrupted after {len(self.rows)} of {_things(self.total)}: no verdict"
        if not self.rows:
            return f"no model and no array lies in {escape_control_chars(self.path)}"
        if not refused:
            counts = Counter(row.found.trust for row in self.rows)
            each = ", ".join(f"{counts[t]} {t.name}" for t in sorted(counts))
            return f"nothing refused of {_things(len(self.rows))}: {each}"
        first = refused[0]
        of = f"of {_things(len(self.rows))}"
        bad = sum(row.found.refused for row in refused)
        low = len(refused) - bad
        told = [f"{bad} {of} refused"] if bad else []
        if low:
            below = "UNTRUSTED, which" if bad else f"{of} UNTRUSTED, which"
            told.append(f"{low} {below} security={self.level.value} does not load")
        why = _why(first, self.level)
        return escape_control_chars(f"{', '.join(told)}; the first, {first.found.path}: {why}")

    @property
    def outcome(self) -> str:
        """In one word."""
        if self.refused:
            return "refused"
        if self.interrupted:
            return "interrupted"
        return "accepted" if self.rows else "empty"

    def as_dict(self) -> dict[str, Any]:
        """In plain values, the worst first."""
        return {
            "schema": SCHEMA,
            "path": self.path,
            "security": self.level.value,
            "verdict": self.outcome,
            "complete": not self.interrupted,
            "counts": {t.name: sum(r.found.trust is t for r in self.rows) for t in Trust},
            "things": self.total,
            "passed_over": self.passed_over,
            "seconds": self.seconds,
            "odd": [{**vars(reason), "severity": reason.severity.name} for reason in self.odd],
            "rows": [
                {
                    "kind": row.kind,
                    "accepted": not row.found.refused and enough(row.found, self.level),
                    "size": row.size,
                    "digest": row.digest,
                    **row.found.as_dict(),
                }
                for row in self.worst_first
            ],
        }

    def write(self, folder: Path) -> None:
        """scan.json and scan.md. Raises OSError."""
        text = json.dumps(json_safe(self.as_dict()), indent=2, allow_nan=False) + "\n"
        replace_text(folder / JSON, text)
        replace_text(folder / PAGE, markdown(self))


def _badness(row: Row) -> tuple[int, int, str]:
    """Sort key: the least trusted first, then by the severity of the worst reason."""
    return row.found.trust, -(row.first.severity if row.first else 0), row.found.path


def terminal(scan: Scan, most: int) -> RenderableType:
    """The worst first, `most` of them; made for 80 columns."""
    parts: list[RenderableType] = [
        Text.assemble(("\nscan of ", "dim"), (escape_control_chars(scan.path), "bold"))
    ]
    for row in scan.worst_first[:most]:
        head = Text(f"{row.found.trust.name:9}", STYLES[row.found.trust], no_wrap=True)
        head.overflow = "ignore"  # as for the digest: what is broken cannot be copied
        head.append(f" {escape_control_chars(row.found.path)}", style="bold")
        about = Text(
            escape_control_chars(f"{row.kind}, {row.formats}, {size(row.size)}"), style="dim"
        )
        told = escape_control_chars(f"  sha256 {row.digest}")
        digest = Text(told, "dim", no_wrap=True, overflow="ignore")
        lines = Text("\n").join(
            Text(escape_control_chars(line)) for line in _lines(row, scan.level)
        )
        parts += [head, *([digest] if row.digest else [])]
        parts.append(Padding(Group(about, lines), (0, 0, 0, 9)))
    if len(scan.rows) > most:
        parts.append(Text(f"… and {_things(len(scan.rows) - most)} more, in {JSON}", style="dim"))
    for reason in scan.odd[:most]:
        parts.append(Text(f"not opened: {escape_control_chars(str(reason))}", style="dim"))
    if scan.passed_over:
        told = "1 file" if scan.passed_over == 1 else f"{scan.passed_over:,} files"
        parts.append(Text(f"{told} of other kinds, which nothing here loads", style="dim"))
    return Group(*parts)


def markdown(scan: Scan) -> str:
    """The same as a document."""
    lines = [f"# Scan of {md.escape(scan.path)}", "", f"**{md.escape(scan.verdict)}**", ""]
    lines.append(f"security: {scan.level.value}.")
    if scan.interrupted:
        lines += ["", f"Interrupted after {len(scan.rows)} of {_things(scan.total)}."]
    rows = [
        (
            row.found.trust.name,
            row.found.path,
            f"{row.kind}, {row.formats}",
            size(row.size),
            row.digest,
            row.found.written_by,
            "; ".join(_lines(row, scan.level)),
        )
        for row in scan.worst_first[:ROWS]
    ]
    if rows:
        header = (
            "trust",
            "what",
            "format",
            "size",
            "sha256",
            "says it was written by",
            "why, and the way out",
        )
        lines += ["", md.table(header, rows)]
    if len(scan.rows) > ROWS:
        lines += ["", f"… and {_things(len(scan.rows) - ROWS)} more, in {JSON}."]
    if scan.odd:
        lines += ["", "## Not opened", "", *(f"- {md.escape(str(r))}" for r in scan.odd[:ROWS])]
    if scan.passed_over:
        lines += ["", f"{scan.passed_over:,} files of other kinds, which nothing here loads."]
    return "\n".join(lines) + "\n"


def _lines(row: Row, level: SecurityLevel) -> Iterator[str]:
    """Why, and the way out; of notes only the first."""
    yield _why(row, level)
    if row.found.written_by and not row.found.refused:
        yield f"says it was written by {row.found.written_by}"


def _why(row: Row, level: SecurityLevel) -> str:
    first = row.first
    worst = first is not None and first.severity is not Severity.NOTE
    if not row.found.refused and not enough(row.found, level):
        way = way_in(row.found)
        if row.kind == "run":  # what is loaded, and pinned, is one of its checkpoints
            way = f"scan.path={row.found.path}/checkpoints shows what to pin"
        told = f"unknown file, which security={level.value} does not load; {way}"
        return f"{first}; {told}" if worst else told
    if first is not None and (worst or row.found.trust is Trust.UNTRUSTED):
        return str(first)
    return {
        Trust.UNTRUSTED: "nothing is wrong with it, and its digest is unknown",
        Trust.CHECKED: "its digest is in a manifest that this run tree wrote",
        Trust.PINNED: "its digest is in security.pinned",
    }.get(row.found.trust, "refused")


def _things(count: int) -> str:
    return "1 thing" if count == 1 else f"{count:,} things"
