"""Findings about a file, a model or data, and how far a file may be trusted."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


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
