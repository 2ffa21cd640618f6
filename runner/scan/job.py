"""`job=scan`: judge whether a file, or everything in a folder, may be loaded."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress import track
from rich.text import Text

from runner.core.config.run_config import RunConfig
from runner.core.device.signals import InterruptHandler
from runner.core.errors import Interrupted, SecurityError, UsageError
from runner.core.findings import Reason, Severity, Trust
from runner.core.format import count_noun, size
from runner.core.record.console import console, plain_text, print_stdout, supports_live_display
from runner.core.record.storage import write_json
from runner.core.record.text import escape_control_chars
from runner.core.schemas.security import SecurityLevel
from runner.core.security.files.formats import is_loadable
from runner.core.security.files.policy import FilePolicy
from runner.core.security.files.provenance import OTHER, Assessment, may_load, pin_hint
from runner.core.security.paths import run_tree_folders
from runner.scan.scan import ScanItem, Scanner, list_items

SCAN_FILE = "scan.json"
STYLES = {Trust.REFUSED: "bold red", Trust.UNTRUSTED: "yellow"}
TRUST_REASONS = {
    Trust.UNTRUSTED: "no problem found, but its digest is unknown",
    Trust.CHECKED: "its digest is in a manifest that this run tree wrote",
    Trust.PINNED: "its digest is in security.pinned",
}


@dataclass(frozen=True)
class ScanRow:
    """One judged item."""

    kind: str  # file | checkpoint | folder | metadata
    assessment: Assessment

    @property
    def worst(self) -> Reason | None:
        """The most severe reason."""
        return max(self.assessment.reasons, key=lambda reason: reason.severity, default=None)

    @property
    def digest(self) -> str:
        """sha256 of a single file; "" for a folder."""
        files = list(self.assessment.files.values())
        return files[0].sha256 if len(files) == 1 else ""

    @property
    def size(self) -> int:
        """Total bytes of its files."""
        return sum(facts.size for facts in self.assessment.files.values())

    def accepted(self, level: SecurityLevel) -> bool:
        """Whether it is loaded at that level."""
        return not self.assessment.refused and may_load(self.assessment, level)

    def explain(self, level: SecurityLevel) -> str:
        """Return the reason for its trust, and what to do."""
        worst, trust = self.worst, self.assessment.trust
        is_serious = worst is not None and worst.severity is not Severity.NOTE
        if not self.assessment.refused and not may_load(self.assessment, level):
            fix = pin_hint(self.assessment)
            unknown = f"unknown file, which security={level.value} does not load; {fix}"
            return f"{worst}; {unknown}" if is_serious else unknown
        if worst is not None and (is_serious or trust is Trust.UNTRUSTED):
            return str(worst)
        return TRUST_REASONS.get(trust, "refused")


@dataclass
class ScanResult:
    """The result of job=scan."""

    path: str
    level: SecurityLevel
    total: int = 0  # number of items
    rows: list[ScanRow] = field(default_factory=list)  # judged items
    ignored_files: int = 0  # files that are not models or arrays
    skipped: list[Reason] = field(default_factory=list)  # links that lead outside, pipes, …
    interrupted: bool = False
    seconds: float = 0.0

    @property
    def worst_first(self) -> list[ScanRow]:
        """Rows by trust, least first, then by the most severe reason."""
        severity = {id(row): row.worst.severity if row.worst else 0 for row in self.rows}
        return sorted(self.rows, key=lambda row: (row.assessment.trust, -severity[id(row)]))

    @property
    def refused(self) -> list[ScanRow]:
        """Rows that are refused at any level, or not loaded at this one."""
        return [row for row in self.worst_first if not row.accepted(self.level)]

    @property
    def verdict(self) -> str:
        """The verdict in one line."""
        refused, count = self.refused, count_noun(len(self.rows), "item")
        if refused:
            kinds = Counter("refused" if row.assessment.refused else "UNTRUSTED" for row in refused)
            counts = ", ".join(f"{kinds[kind]} of {count} {kind}" for kind in sorted(kinds)[::-1])
            if kinds["UNTRUSTED"]:
                counts += f", which security={self.level.value} does not load"
            first = f"{refused[0].assessment.path}: {refused[0].explain(self.level)}"
            return escape_control_chars(f"{counts}; the first, {first}")
        if self.interrupted:
            total = count_noun(self.total, "item")
            return f"interrupted after {len(self.rows)} of {total}: no verdict"
        if not self.rows:
            return f"no model or array in {escape_control_chars(self.path)}"
        trusts = Counter(row.assessment.trust for row in self.rows)
        each = ", ".join(f"{trusts[trust]} {trust.name}" for trust in sorted(trusts))
        return f"{count}, none refused: {each}"

    @property
    def outcome(self) -> str:
        """The verdict in one word."""
        if self.refused or self.interrupted:
            return "refused" if self.refused else "interrupted"
        return "accepted" if self.rows else "empty"

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-compatible values, worst rows first."""
        rows = [
            {
                "kind": row.kind,
                "accepted": row.accepted(self.level),
                "size": row.size,
                "digest": row.digest,
                **row.assessment.as_dict(),
            }
            for row in self.worst_first
        ]
        return {
            "schema": 1,
            "path": self.path,
            "security": self.level.value,
            "verdict": self.outcome,
            "complete": not self.interrupted,
            "counts": {t.name: sum(r.assessment.trust is t for r in self.rows) for t in Trust},
            "things": self.total,
            "passed_over": self.ignored_files,
            "seconds": self.seconds,
            "odd": [{**vars(reason), "severity": reason.severity.name} for reason in self.skipped],
            "rows": rows,
        }


def render_terminal(scan: ScanResult, max_rows: int) -> RenderableType:
    """Show the `max_rows` worst rows, for 80 columns."""
    parts: list[RenderableType] = [Text(), plain_text(f"scan of {scan.path}", "bold")]
    for row in scan.worst_first[:max_rows]:
        head = Text(f"{row.assessment.trust.name:9} ", STYLES.get(row.assessment.trust, "green"))
        head.append(plain_text(row.assessment.path, "bold"))
        digest = plain_text(f"  sha256 {row.digest or 'in scan.json'}", "dim")
        for line in (head, digest):  # wrapped lines could not be copied
            line.no_wrap, line.overflow = True, "ignore"
        formats = {facts.format for facts in row.assessment.files.values()} - {OTHER}
        about = f"{row.kind}, {', '.join(sorted(formats)) or OTHER}, {size(row.size)}"
        lines = [plain_text(about, "dim"), plain_text(row.explain(scan.level))]
        parts += [head, digest, Padding(Group(*lines), (0, 0, 0, 9))]
    notes = [f"not opened: {reason}" for reason in scan.skipped[:max_rows]]
    if len(scan.rows) > max_rows:
        more = count_noun(len(scan.rows) - max_rows, "item")
        notes.insert(0, f"… and {more} more, in {SCAN_FILE}")
    if scan.ignored_files:
        files = count_noun(scan.ignored_files, "file")
        notes.append(f"{files} of other kinds, which the runner does not load")
    return Group(*parts, *(plain_text(note, "dim") for note in notes))


def main(config: RunConfig, folder: Path) -> ScanResult:
    """Judge `scan.path`; print the list and write scan.json to `folder`.

    Raises SecurityError if any item is refused or below the trust that the level requires,
    UsageError if there is nothing to judge, and Interrupted after writing the items so far.
    """
    path = find_scan_path(config.scan.path)
    scan = ScanResult(str(path), config.security.level)
    policy = FilePolicy.of(config.security, run_tree_folders(folder))
    start = time.monotonic()
    with InterruptHandler() as interrupts:
        try:
            interrupts.begin_wait()  # so that a signal interrupts immediately
            _scan_items(path, policy, scan, config)
        except KeyboardInterrupt:
            scan.interrupted = True
        interrupts.end_wait()
        scan.seconds = time.monotonic() - start
        write_json(folder / SCAN_FILE, scan.as_dict())
        print_stdout(render_terminal(scan, config.scan.rows), crop=False)
    files = f"{SCAN_FILE} lies in {folder}"
    if scan.interrupted:
        so_far = f" after {len(scan.rows)} of {scan.total}; the list is in {folder / SCAN_FILE}"
        raise Interrupted(interrupts.received or signal.SIGINT, so_far)
    if scan.refused:
        raise SecurityError(f"{scan.verdict}; {files}")
    if not scan.rows:
        raise UsageError(f"scan.path: {scan.verdict}; {files}")
    print_stdout(f"{scan.verdict}; {files}", soft_wrap=True)
    return scan


def find_scan_path(name: str | None) -> Path:
    """Return the file or folder to scan. Raises UsageError if it does not exist."""
    path = Path(name or "")
    if not os.path.exists(path):
        raise UsageError(f"scan.path: no file or folder {path} (current folder: {Path.cwd()})")
    return path


def _scan_items(path: Path, policy: FilePolicy, scan: ScanResult, config: RunConfig) -> None:
    items = list(_select_items(path, policy, scan))
    scan.total = len(items)
    screen = console()
    quiet = not config.monitoring.progress or not supports_live_display(screen)
    with Scanner(policy, config.scan.deep) as scanner:
        for item in track(items, "scanning", console=screen, transient=True, disable=quiet):
            scan.rows.append(ScanRow(item.kind, scanner.scan(item)))


def _select_items(path: Path, policy: FilePolicy, scan: ScanResult) -> Iterator[ScanItem]:
    """Yield the items to judge; count the others."""
    for item in list_items(path, policy):
        is_nested_file = item.kind == "file" and item.path != path
        if is_nested_file and item.files and not is_loadable(item.path):
            scan.ignored_files += 1
        elif not item.files and not item.refused:
            scan.skipped += item.findings
        else:
            yield item
