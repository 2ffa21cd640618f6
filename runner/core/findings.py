"""Findings about a file, a model, data or a machine, trust in files, and automatic choices."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any

log = logging.getLogger("runner")


class Severity(IntEnum):
    """How bad a finding is."""

    NOTE = 0
    WARNING = 1
    REFUSAL = 2

    @property
    def word(self) -> str:
        """The name in reports on models, tables and batches, where a refusal is a fault."""
        return "fault" if self is Severity.REFUSAL else self.name.lower()


class Trust(IntEnum):
    """How far a file may be trusted, in ascending order."""

    REFUSED = 0  # hostile, malformed, or of a kind that is code
    UNTRUSTED = 1  # no findings, but an unknown digest
    CHECKED = 2  # its digest is in a manifest that this runner wrote
    PINNED = 3  # its digest is in security.pinned


@dataclass(frozen=True)
class Reason:
    """A finding: in a file, a model, or data."""

    code: str  # stable, for programs: zip.overlap, pickle.global, weights.not_finite
    severity: Severity
    where: str  # a member, an offset, a tensor, a column
    evidence: str  # observation, in one line
    way_out: str = ""  # suggested fix

    def __str__(self) -> str:
        tail = f"; {self.way_out}" if self.way_out else ""
        return f"{self.where}: {self.evidence}{tail}" if self.where else f"{self.evidence}{tail}"


class CheckStatus(Enum):
    """The result of a check."""

    ok = "ok"
    warn = "warn"  # slower, or some runs will fail
    fail = "fail"  # no run can work


@dataclass(frozen=True)
class DoctorCheck:
    """A check's result, and how to fix it."""

    name: str
    status: CheckStatus
    finding: str
    fix: str = ""

    @classmethod
    def of(
        cls, name: str, ok: bool, finding: str, fix: str, failure: CheckStatus = CheckStatus.warn
    ) -> DoctorCheck:
        """Return a check; the fix is included unless it is good."""
        return cls(name, CheckStatus.ok, finding) if ok else cls(name, failure, finding, fix)


@dataclass(frozen=True)
class Choice:
    """An automatic decision and its reason."""

    key: str
    value: Any
    reason: str
    is_notice: bool = False  # shown on the screen and in the end table


def notice(key: str, value: object, reason: str) -> Choice:
    """Return a choice that is shown in the end table, and log it."""
    log.warning("%s: %s: %s", key, value, reason)
    return Choice(key, value, reason, is_notice=True)
