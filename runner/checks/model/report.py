"""What a look at a model came to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from runner.record import markdown
from runner.record.console import one_line
from runner.security.trust import Reason, Severity

HEADER = ("severity", "code", "where", "what", "way out")
WORST = 5  # reasons that a summary holds; all are in the report, in TensorBoard and the history


@dataclass
class ModelReport:
    """What was found in a model, the worst first, and what was looked at; `print` shows it.

    REFUSAL: it cannot be of use as it is, such as with a NaN among its weights. WARNING: something
    that hardly anybody wants. NOTE: good to know.
    """

    reasons: list[Reason] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reasons = sorted(self.reasons, key=lambda r: -r.severity)

    @property
    def ok(self) -> bool:
        """Whether there is nothing worse than a note."""
        return not self.findings

    @property
    def findings(self) -> list[Reason]:
        """All that is worse than a note."""
        return [reason for reason in self.reasons if reason.severity > Severity.NOTE]

    def count(self, severity: Severity) -> int:
        """How many reasons are as bad as that."""
        return sum(reason.severity is severity for reason in self.reasons)

    @property
    def verdict(self) -> str:
        """How many there are of each, in a few words."""
        named = (
            (Severity.REFUSAL, "fault"),
            (Severity.WARNING, "warning"),
            (Severity.NOTE, "note"),
        )
        counts = [(self.count(severity), name) for severity, name in named]
        said = ", ".join(f"{n} {name}{'s' * (n > 1)}" for n, name in counts if n)
        return said or "nothing found"

    def as_dict(self) -> dict[str, Any]:
        """All of it in plain values."""
        return {
            "ok": self.ok,
            "reasons": [_plain(reason) for reason in self.reasons],
            "facts": self.facts,
        }

    def compact(self) -> dict[str, Any]:
        """What a run's summary says of it."""
        return {
            "ok": self.ok,
            "faults": self.count(Severity.REFUSAL),
            "warnings": self.count(Severity.WARNING),
            "notes": self.count(Severity.NOTE),
            "worst": [_plain(reason) for reason in self.reasons[:WORST]],
            "seconds": self.facts.get("seconds", 0.0),
        }

    def markdown(self) -> str:
        """Two tables; every name and text in them is escaped."""
        parts = [f"**{self.verdict}**"]
        if self.reasons:
            rows = [
                (r.severity.name.lower(), r.code, r.where, r.evidence, r.way_out)
                for r in self.reasons
            ]
            parts.append(markdown.table(HEADER, rows))
        parts.append(markdown.table(("looked at", ""), list(self._facts())))
        return "\n\n".join(parts) + "\n"

    def __str__(self) -> str:
        lines = [self.verdict]
        lines += [f"{r.severity.name.lower()} {r.code}: {one_line(str(r))}" for r in self.reasons]
        lines += [f"{name}: {one_line(value)}" for name, value in self._facts()]
        return "\n".join(lines)

    def _facts(self) -> Iterable[tuple[str, str]]:
        for name, value in self.facts.items():
            if value in (None, [], {}):
                continue
            if isinstance(value, list):
                value = "; ".join(" = ".join(x) if isinstance(x, list) else str(x) for x in value)
            elif isinstance(value, dict):
                value = ", ".join(f"{key}: {x:,}" for key, x in value.items())
            elif isinstance(value, float):
                value = f"{value:.3g}"
            elif isinstance(value, int) and not isinstance(value, bool):
                value = f"{value:,}"
            yield name.replace("_", " "), str(value)


def _plain(reason: Reason) -> dict[str, Any]:
    return asdict(reason) | {"severity": reason.severity.name}
