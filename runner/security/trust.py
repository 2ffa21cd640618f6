"""Findings about a file, and how far it may therefore be trusted."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from runner.errors import SecurityError
from runner.findings import Reason, Severity, Trust
from runner.record.text import escape_control_chars
from runner.security.config import SecurityLevel
from runner.security.files.policy import FilePolicy

log = logging.getLogger("runner")

SCHEMA = 1
OTHER = "other"  # the format of a file that nothing here ever loads
SHOWN_DIGESTS = 4  # in one message


@dataclass
class FileFacts:
    """One file, as it was when it was read."""

    sha256: str
    size: int
    format: str  # by magic and name: safetensors | torch_zip | pickle | npy | npz | …


@dataclass
class Assessment:
    """The verdict on a file or a folder, with its reasons and where it comes from."""

    path: str
    trust: Trust = Trust.UNTRUSTED
    reasons: list[Reason] = field(default_factory=list)
    files: dict[str, FileFacts] = field(default_factory=dict)  # by path within `path`
    seconds: float = 0.0
    schema: int = SCHEMA

    @property
    def refused(self) -> bool:
        """Whether nothing of it may be loaded."""
        return self.trust is Trust.REFUSED

    @property
    def refusals(self) -> list[Reason]:
        """Why not."""
        return [reason for reason in self.reasons if reason.severity is Severity.REFUSAL]

    def refuse(self, reasons: Sequence[Reason]) -> None:
        """Take note of what speaks against it, and let nothing raise it again."""
        self.reasons += reasons
        if self.refusals:
            self.trust = Trust.REFUSED

    @property
    def digests(self) -> list[str]:
        """sha256 of each file that can be loaded: what to put into security.pinned."""
        return [f.sha256 for f in self.files.values() if f.format != OTHER and f.sha256]

    def as_dict(self) -> dict[str, Any]:
        """In plain values; enums by their names."""
        values = asdict(self)
        values["trust"] = self.trust.name
        for row, reason in zip(values["reasons"], self.reasons, strict=True):
            row["severity"] = reason.severity.name
        return values


def enough(assessment: Assessment, level: SecurityLevel) -> bool:
    """Whether it may be loaded at that level; CHECKED is only ever what this run tree wrote."""
    if level is SecurityLevel.off:
        return True
    least = Trust.CHECKED if level is SecurityLevel.strict else Trust.UNTRUSTED
    return assessment.trust >= least


def require(assessment: Assessment, policy: FilePolicy) -> None:
    """Raise SecurityError where the policy does not let it in; one warning for an unknown file."""
    path, pin = escape_control_chars(assessment.path), way_in(assessment)
    if not enough(assessment, policy.level):
        why = "security=strict loads only files of this run tree and pinned ones; " + pin
        if assessment.refused:
            first = next(iter(assessment.refusals), "nothing of it may be loaded")
            why = escape_control_chars(str(first))
        raise SecurityError(f"{path}: refused: {why}")
    if assessment.trust is Trust.UNTRUSTED and policy.level is SecurityLevel.standard:
        text = "unknown file, checked in a sandboxed process and loaded as plain data"
        log.warning("%s: %s; %s", path, text, pin)


def way_in(assessment: Assessment) -> str:
    """What to type once one has made sure of it."""
    digests = assessment.digests
    if len(digests) > SHOWN_DIGESTS:
        return "if you know where it comes from, pin the sha256 of each file that job=scan lists"
    return f"if you know where it comes from, add security.pinned=[{','.join(digests)}]"
