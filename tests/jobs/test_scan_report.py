from __future__ import annotations

import io

import pytest
from rich.console import Console

from runner.jobs.scan import Scan, ScanRow, terminal
from runner.security.config import SecurityLevel
from runner.security.trust import Assessment, FileFacts, Reason, Severity, Trust

STRICT = SecurityLevel.strict
DIGEST = "ab" * 32


def row(name: str, trust: Trust = Trust.UNTRUSTED, *reasons: Reason, kind: str = "file") -> ScanRow:
    found = Assessment(name, trust, files={name: FileFacts(DIGEST, 2048, "npy")})
    found.reasons += reasons
    return ScanRow(kind, found)


def finding(severity: Severity, text: str = "overlaps b") -> Reason:
    return Reason("zip.overlap", severity, "a", text, "get it again")


def shown(scan: Scan, most: int = 30, width: int = 80) -> str:
    screen = Console(file=io.StringIO(), width=width)
    screen.print(terminal(scan, most), crop=False)
    return screen.file.getvalue()


def test_the_worst_comes_first_and_within_a_trust_what_has_warnings():
    names = [
        row("fine", Trust.PINNED),
        row("plain"),
        row("odd", Trust.UNTRUSTED, finding(Severity.WARNING)),
        row("bad", Trust.REFUSED, finding(Severity.REFUSAL)),
        row("own", Trust.CHECKED),
    ]
    scan = Scan("x", SecurityLevel.standard, rows=names)
    assert [r.found.path for r in scan.worst_first] == ["bad", "odd", "plain", "own", "fine"]
    assert scan.verdict == "1 of 5 items refused; the first, bad: a: overlaps b; get it again"


@pytest.mark.parametrize(
    ("level", "trust", "refused"),
    [
        (SecurityLevel.off, Trust.REFUSED, True),
        (SecurityLevel.standard, Trust.UNTRUSTED, False),
        (STRICT, Trust.UNTRUSTED, True),
        (STRICT, Trust.CHECKED, False),
        (STRICT, Trust.PINNED, False),
    ],
)
def test_what_counts_as_refused_at_a_level(level, trust, refused):
    scan = Scan("x", level, rows=[row("a", trust)])
    assert bool(scan.refused) is refused
    assert scan.as_dict()["rows"][0]["accepted"] is not refused


def test_a_reason_worth_more_than_a_note_is_told_and_strict_says_what_to_type():
    noted = row("a", Trust.UNTRUSTED, finding(Severity.NOTE), finding(Severity.WARNING, "has NaN"))
    assert "has NaN" in shown(Scan("x", SecurityLevel.standard, rows=[noted]))
    told = Scan("x", STRICT, rows=[noted]).verdict
    assert "has NaN" in told and f"security.pinned=[{DIGEST}]" in told
