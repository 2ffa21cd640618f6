"""What job=scan found: a list for the terminal, and scan.json for the folder."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from runner.record.console import plain_text
from runner.record.storage import replace_text
from runner.record.text import escape_control_chars, json_safe
from runner.report.format import size
from runner.security.config import SecurityLevel
from runner.security.trust import OTHER, Assessment, Reason, Severity, Trust, enough, way_in

JSON = "scan.json"
SCHEMA = 1
STYLES = {Trust.REFUSED: "bold red", Trust.UNTRUSTED: "yellow"}
KNOWN = {
    Trust.UNTRUSTED: "nothing is wrong with it, and its digest is unknown",
    Trust.CHECKED: "its digest is in a manifest that this run tree wrote",
    Trust.PINNED: "its digest is in security.pinned",
}


@dataclass(frozen=True)
class ScanRow:
    """One thing that was judged."""

    kind: str  # file | checkpoint | capture | run | dcp | folder
    found: Assessment

    @property
    def first(self) -> Reason | None:
        """The worst of what was found."""
        return max(self.found.reasons, key=lambda reason: reason.severity, default=None)

    @property
    def about(self) -> str:
        """Its kind, and the formats that it is made of, without files that are not loaded."""
        formats = {facts.format for facts in self.found.files.values()} - {OTHER}
        return f"{self.kind}, {', '.join(sorted(formats)) or OTHER}"

    @property
    def digest(self) -> str:
        """sha256 of a single file; of a folder each file has its own."""
        return next(iter(self.found.files.values())).sha256 if len(self.found.files) == 1 else ""

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(facts.size for facts in self.found.files.values())

    def why(self, level: SecurityLevel) -> str:
        """The reason for its trust, and the way out."""
        first, trust = self.first, self.found.trust
        serious = first is not None and first.severity is not Severity.NOTE
        if not self.found.refused and not enough(self.found, level):
            way = way_in(self.found)
            if self.kind == "run":  # what is loaded, and pinned, is one of its checkpoints
                way = f"scan.path={self.found.path}/checkpoints shows what to pin"
            unknown = f"unknown file, which security={level.value} does not load; {way}"
            return f"{first}; {unknown}" if serious else unknown
        if first is not None and (serious or trust is Trust.UNTRUSTED):
            return str(first)
        return KNOWN.get(trust, "refused")


@dataclass
class Scan:
    """All of it."""

    path: str
    level: SecurityLevel
    total: int = 0  # things that there are to judge
    rows: list[ScanRow] = field(default_factory=list)  # those that were
    passed_over: int = 0  # files that nothing loads as a model or as arrays
    odd: list[Reason] = field(default_factory=list)  # links that lead out, pipes, …
    interrupted: bool = False
    seconds: float = 0.0

    @property
    def worst_first(self) -> list[ScanRow]:
        """The least trusted first, then by the severity of the worst reason."""
        severity = {id(row): row.first.severity if row.first else 0 for row in self.rows}
        return sorted(self.rows, key=lambda row: (row.found.trust, -severity[id(row)]))

    @property
    def refused(self) -> list[ScanRow]:
        """Those that are refused at any level, and those that this one does not load."""
        return [x for x in self.worst_first if x.found.refused or not enough(x.found, self.level)]

    @property
    def verdict(self) -> str:
        """In one line."""
        refused, count = self.refused, _things(len(self.rows))
        if not refused and self.interrupted:
            return f"interrupted after {len(self.rows)} of {_things(self.total)}: no verdict"
        if not self.rows:
            return f"no model and no array lies in {escape_control_chars(self.path)}"
        if not refused:
            trusts = Counter(row.found.trust for row in self.rows)
            each = ", ".join(f"{trusts[t]} {t.name}" for t in sorted(trusts))
            return f"nothing refused of {count}: {each}"
        bad = sum(row.found.refused for row in refused)
        low, first = len(refused) - bad, refused[0]
        counts = [f"{bad} of {count} refused"] if bad else []
        if low:
            of = "" if bad else f"of {count} "
            counts.append(f"{low} {of}UNTRUSTED, which security={self.level.value} does not load")
        text = f"{', '.join(counts)}; the first, {first.found.path}: {first.why(self.level)}"
        return escape_control_chars(text)

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
        """Write scan.json. Raises OSError."""
        text = json.dumps(json_safe(self.as_dict()), indent=2, allow_nan=False) + "\n"
        replace_text(folder / JSON, text)


def terminal(scan: Scan, most: int) -> RenderableType:
    """The worst first, `most` of them; made for 80 columns."""
    parts: list[RenderableType] = [Text(), plain_text(f"scan of {scan.path}", "bold")]
    for row in scan.worst_first[:most]:
        head = Text(f"{row.found.trust.name:9} ", STYLES.get(row.found.trust, "green"))
        head.append(plain_text(row.found.path, "bold"))
        digest = plain_text(f"  sha256 {row.digest or 'in scan.json'}", "dim")
        for line in (head, digest):  # what is broken cannot be copied
            line.no_wrap, line.overflow = True, "ignore"
        about = [
            plain_text(f"{row.about}, {size(row.size)}", "dim"),
            plain_text(row.why(scan.level)),
        ]
        if row.found.written_by and not row.found.refused:
            about.append(plain_text(f"says it was written by {row.found.written_by}"))
        parts += [head, digest, Padding(Group(*about), (0, 0, 0, 9))]
    notes = [f"not opened: {reason}" for reason in scan.odd[:most]]
    if len(scan.rows) > most:
        notes.insert(0, f"… and {_things(len(scan.rows) - most, ' more')}, in {JSON}")
    if scan.passed_over:
        files = "1 file" if scan.passed_over == 1 else f"{scan.passed_over:,} files"
        notes.append(f"{files} of other kinds, which nothing here loads")
    return Group(*parts, *(plain_text(note, "dim") for note in notes))


def _things(count: int, more: str = "") -> str:
    return f"1 thing{more}" if count == 1 else f"{count:,} things{more}"
