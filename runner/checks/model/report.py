"""What a look at a model came to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from runner.record import markdown
from runner.record.text import escape_control_chars
from runner.security.trust import Reason, Severity

HEADER = ("severity", "code", "where", "what", "way out")
SAID = {
    "probes": ("probes", " samples"),
    "repeated": ("two answers to the same samples differ by", " of their size"),
    "gain": ("a tiny change of the inputs comes out", " times as large"),
    "seconds": ("looked at for", " s"),
}
"""What a fact is called, and its unit, where its name says too little."""
TRAINED = {
    True: "yes",
    False: "no",
    None: "not known; with trained=True copies, zero layers and constant answers are warnings",
}
WORST = 5  # reasons that a summary holds; all are in the report, in TensorBoard and the history


@dataclass
class ModelReport:
    """What was found in a model, the worst first, and what was looked at; `print` shows it.

    fault (Severity.REFUSAL): it cannot be of use as it is, such as with a NaN among its weights.
    warning: something that hardly anybody wants. note: good to know. None of them ends a run.
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
        counts = [(self.count(severity), severity.word) for severity in reversed(Severity)]
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
            rows = [(r.severity.word, r.code, r.where, r.evidence, r.way_out) for r in self.reasons]
            parts.append(markdown.table(HEADER, rows))
        parts.append(markdown.table(("looked at", ""), list(self._facts())))
        return "\n\n".join(parts) + "\n"

    def __str__(self) -> str:
        lines = [self.verdict]
        lines += [
            f"{r.severity.word} {r.code}: {escape_control_chars(str(r))}" for r in self.reasons
        ]
        lines += [f"{name}: {escape_control_chars(value)}" for name, value in self._facts()]
        return "\n".join(lines)

    def _facts(self) -> Iterable[tuple[str, str]]:
        for name, value in self.facts.items():
            if name == "trained":
                value = TRAINED[value]
            if value in (None, [], {}):
                continue
            if isinstance(value, list):
                value = "; ".join(" = ".join(x) if isinstance(x, list) else str(x) for x in value)
            elif isinstance(value, dict):
                value = ", ".join(f"{x:,} × {key}" for key, x in value.items())
            elif isinstance(value, float):
                value = f"{value:.3g}"
            elif isinstance(value, int) and not isinstance(value, bool):
                value = f"{value:,}"
            label, unit = SAID.get(name, (name.replace("_", " "), ""))
            yield label, f"{value}{unit}"


def _plain(reason: Reason) -> dict[str, Any]:
    return asdict(reason) | {"severity": reason.severity.word}
