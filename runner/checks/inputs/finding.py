"""One thing that is wrong with a batch, and which of two is only the consequence of the other."""

from __future__ import annotations

import math
from dataclasses import dataclass

from runner.security.trust import Reason, Severity

# A finding may be the consequence of an earlier one of the same leaf.
CAUSES = ("not_finite", "labels", "range", "constant", "drift")
WAYS_OUT = {
    "form": "mend the data, or give checks.inputs.schema.shape or dtype (or form: warn)",
    "not_finite": "mend these samples, or leave them out: checks.inputs.not_finite=drop",
    "range": "scale the data, or give checks.inputs.schema.low and high",
    "labels": "mend these labels, or leave the samples out: checks.inputs.labels=drop",
    "constant": "mend the data, or checks.inputs.constant=off where it may be so",
    "duplicates": "look at how the data are put together and shuffled",
    "drift": "shuffle the data, or raise checks.inputs.threshold",
}


@dataclass
class Finding:
    """One thing that is wrong with a batch."""

    check: str
    leaf: str
    evidence: str
    low: float = -math.inf  # what values must be within, where samples can be told by it
    high: float = math.inf


def follows(finding: Finding, other: Finding) -> bool:
    """Whether it may be there only because the other is."""
    if finding.leaf != other.leaf or not {finding.check, other.check} <= set(CAUSES):
        return False
    return CAUSES.index(other.check) < CAUSES.index(finding.check)


def reason(finding: Finding) -> Reason:
    """As others say it."""
    return Reason(
        f"input.{finding.check}", Severity.WARNING, finding.leaf, finding.evidence,
        WAYS_OUT[finding.check],
    )  # fmt: skip
