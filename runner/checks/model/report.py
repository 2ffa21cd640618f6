"""The findings of a model check, and how they are printed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from runner.record.text import escape_control_chars
from runner.security.trust import Reason, Severity

WAYS_OUT = {
    "weights.not_finite": "load an earlier checkpoint, or initialise it again",
    "weights.huge": "was a file damaged, or did training diverge? load an earlier checkpoint",
    "weights.negative_variance": "recompute its statistics, or load an earlier checkpoint",
    "weights.dead": "train it on, or initialise it again",
    "weights.constant": "train it on, or initialise it again",
    "weights.dead_units": "they add nothing: prune them, or initialise them again",
    "behaviour.raises": "are the probes what it is called with?",
    "behaviour.not_finite": "debug=anomaly names the layer in which they come up",
    "behaviour.out_of_range": "is outputs= right? end with a softmax, or scale the inputs",
    "behaviour.constant": "does its input reach its output? look for dead layers, train it longer",
    "behaviour.random": "draw random numbers only while self.training is true",
    "behaviour.writes": "update statistics only while self.training is true",
}
UNKNOWN = "not known; with trained=True zero layers and constant answers are warnings"
WORST = 5  # reasons that a summary holds; all are in the report and, but for notes, the history


@dataclass
class ModelReport:
    """The findings about a model, the worst first, and what was checked; `print` shows it.

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
        words = ", ".join(f"{n} {name}{'s' * (n > 1)}" for n, name in counts if n)
        return words or "nothing found"

    def as_dict(self) -> dict[str, Any]:
        """All of it in plain values."""
        return {"ok": self.ok, "reasons": [*map(_plain, self.reasons)], "facts": self.facts}

    def compact(self) -> dict[str, Any]:
        """The part that a run's summary holds."""
        return {
            "ok": self.ok,
            "faults": self.count(Severity.REFUSAL),
            "warnings": self.count(Severity.WARNING),
            "notes": self.count(Severity.NOTE),
            "worst": [_plain(reason) for reason in self.reasons[:WORST]],
            "seconds": self.facts.get("seconds", 0.0),
        }

    def __str__(self) -> str:
        lines = [f"{r.severity.word} {r.code}: {r}" for r in self.reasons]
        lines += [f"{name}: {value}" for name, value in self._facts()]
        return "\n".join([self.verdict, *map(escape_control_chars, lines)])

    def _facts(self) -> list[tuple[str, str]]:
        facts = dict(self.facts)
        facts["trained"] = {True: "yes", False: "no", None: UNKNOWN}[facts["trained"]]
        if "not_checked" in facts:
            facts["not_checked"] = ", ".join(facts["not_checked"])
        shown = {k: f"{v:.3g}" if isinstance(v, float) else str(v) for k, v in facts.items()}
        return [(name.replace("_", " "), text) for name, text in shown.items() if text]


def make_reason(code: str, severity: Severity, where: str, evidence: str) -> Reason:
    """A finding about a model, with the way out that its code has."""
    return Reason(code, severity, where, evidence, WAYS_OUT[code])


def _plain(reason: Reason) -> dict[str, Any]:
    return asdict(reason) | {"severity": reason.severity.word}
