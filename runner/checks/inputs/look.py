"""What is wrong with a batch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from runner.batch import Batch
from runner.checks.config import InputsConfig, Policy
from runner.checks.inputs.baseline import Baseline
from runner.checks.inputs.here import numbers
from runner.checks.inputs.limits import Limit, limits
from runner.checks.inputs.measure import (
    Labels,
    Measure,
    Plan,
    bad_samples,
    key_of,
    leaves,
    plan_of,
)
from runner.checks.inputs.repeats import Repeats
from runner.checks.inputs.schema import Schema
from runner.security.trust import Reason, Severity

BY_SAMPLE = ("not_finite", "range", "labels")  # a single sample can be at fault
WAYS_OUT = {
    "form": "mend the data, or give checks.inputs.schema.shape or dtype (or form: warn)",
    "not_finite": "mend these samples, or leave them out: checks.inputs.not_finite=drop",
    "range": "scale the data, or give checks.inputs.schema.low and high",
    "labels": "mend these labels, or leave the samples out: checks.inputs.labels=drop",
    "constant": "look at what the data set gives for them",
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


@dataclass
class Look:
    """A batch that was looked at; nothing of it is remembered before `InputChecks.remember`."""

    found: dict[str, Tensor]
    plan: Plan
    samples: int
    values: int = 0  # in the main leaf
    row: list[float] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


class InputChecks:
    """Looks at batches, for a loop of one's own: `for reason in checks.look(batch): …`.

    Where an accelerator holds the batch, `look` waits for it; the runner's own loop does not.
    """

    def __init__(
        self,
        config: InputsConfig | None = None,
        *,
        classes: int | None = None,  # labels are below it
        ignored: int | None = None,  # a label that stands for none
        vocab: int | None = None,  # token ids are below it
    ) -> None:
        self.config = config or InputsConfig()
        self.known = Labels(self.config.schema.classes or classes or None, ignored, vocab)
        self.measure = Measure(self.known)
        self.schema = Schema(self.config.schema)
        self.baseline = Baseline(self.config.baseline, self.config.threshold)
        self.repeats = Repeats()
        self.plan: Plan | None = None  # of the batch before
        self.form = ""  # of the baseline's batches
        self.limits: list[Limit] = []  # of `plan`
        self.usual: list[Limit] = []  # those that drift is told by
        self.last = 0  # step that was remembered last

    def look(self, batch: Batch, epoch: int | None = None) -> list[Reason]:
        """What is wrong with it; duplicates are looked for among those of the same `epoch`."""
        step = self.last + 1
        seen = self.see(batch)
        if seen.plan.entries and not self.lost(seen):
            self.judge(seen, numbers(self.measure, seen.found, seen.plan), step, epoch)
        self.remember(seen, step, epoch)
        return [reason(finding) for finding in seen.findings]

    # -- in three parts, so that the row may come later ----------------------------------------

    def policy(self, check: str) -> Policy:
        """What is done about findings of this check."""
        policy: Policy = getattr(self.config, check)
        return policy

    def see(self, batch: Batch) -> Look:
        """The batch's form; no value is read."""
        found = leaves(batch)
        if self.plan is None or self.plan.key != key_of(found):
            self.plan = plan_of(found, self.known)
            self._set_limits()
        samples = len(next(reversed(found.values()))) if found else 0
        main = found.get(self.plan.main or "")
        seen = Look(found, self.plan, samples, 0 if main is None else main.numel())
        if self.policy("form") is not Policy.off:
            differs = self.schema.differs(found, self.plan.main)
            if differs is not None:
                seen.findings.append(Finding("form", "", differs))
        return seen

    @staticmethod
    def lost(seen: Look) -> bool:
        """Whether it has another form, so that its values say nothing."""
        return any(finding.check == "form" for finding in seen.findings)

    def judge(self, seen: Look, row: list[float], step: int, epoch: int | None) -> None:
        """What its numbers say, added to the findings."""
        seen.row = row
        usual = self._has_baseline(seen)
        if self._outside(self.limits, seen) or self._constant(seen):
            return  # which says it all
        if usual:
            self._outside(self.usual, seen)
            self._judge_shares(seen)
        if epoch is not None and self.policy("duplicates") is not Policy.off:
            marks = row[seen.plan.width + seen.plan.shares :]
            earlier = self.repeats.find(epoch, marks, seen.samples, step)
            if earlier:
                said = f"the batch of step {earlier} comes again in the epoch, or nearly so"
                seen.findings.append(Finding("duplicates", seen.plan.main or "", said))

    def _outside(self, limits: list[Limit], seen: Look) -> bool:
        """Numbers that are not between their limits, the first of each leaf."""
        bad: set[str] = set()
        for limit in limits if seen.plan is self.plan else ():
            value = seen.row[limit.at]
            if limit.low <= value <= limit.high:
                continue
            leaf = seen.plan.entries[limit.at].leaf
            if leaf not in bad and (value == value or limit.check == "not_finite"):
                bad.add(leaf)
                seen.findings.append(self._finding(limit, seen, value))
        return bool(bad)

    def _constant(self, seen: Look) -> bool:
        plan, main = seen.plan, seen.plan.main or ""
        if main not in plan.values or self.policy("constant") is Policy.off:
            return False
        at = next(i for i, entry in enumerate(plan.entries) if entry.leaf == main)
        if seen.row[at] != seen.row[at + 1] or not seen.values > seen.samples > 1:
            return False
        said = f"every value of the batch is {seen.row[at]:g}"
        seen.findings.append(Finding("constant", main, said))
        return True

    def _judge_shares(self, seen: Look) -> None:
        plan, row = seen.plan, seen.row
        if not plan.shares or self.policy("drift") is Policy.off:
            return
        if self.baseline.apart(row, plan) > self.baseline.most_apart:
            counts = row[plan.width : plan.width + plan.shares]
            most = max(range(len(counts)), key=counts.__getitem__)
            share, was = counts[most] / max(1.0, sum(counts)), self.baseline.shares[most]
            said = f"{share:.0%} of the labels are {most}, and {was:.0%} were among the first"
            seen.findings.append(Finding("drift", plan.labels or "", said))

    def remember(self, seen: Look, step: int, epoch: int | None) -> bool:
        """Learn from it; True where the baseline is complete with it. Twice is as once."""
        if step <= self.last:
            return False
        self.last = step
        if self.lost(seen):
            return False
        plan = seen.plan
        if epoch is not None and seen.row:
            self.repeats.add(epoch, seen.row[plan.width + plan.shares :], seen.samples, step)
        if seen.findings or self.baseline.full:
            return False
        self.schema.learn(seen.found)
        if not seen.row:
            return False
        if self.form != plan.form:
            self.form, self.baseline.rows = plan.form, []
        complete = self.baseline.add(seen.row, seen.samples, plan)
        if complete:
            self.schema.settled = True
            self._set_limits()
        return complete

    def _has_baseline(self, seen: Look) -> bool:
        """Whether drift can be told: means of few samples vary more."""
        usual = self.baseline.full and self.form == seen.plan.form
        return usual and 2 * seen.samples > self.baseline.samples

    # -- limits --------------------------------------------------------------------------------

    def _set_limits(self) -> None:
        plan = self.plan
        if plan is None:
            return
        learned = self.baseline.full and self.form == plan.form
        if learned and not self.baseline.limits:
            self.baseline.settle(plan)  # loaded from a checkpoint
        known = self.baseline if learned else None
        found = limits(plan, self.config, self.known, known)
        self.limits = [limit for limit in found if limit.check != "drift"]
        self.usual = [limit for limit in found if limit.check == "drift"]

    def _finding(self, limit: Limit, seen: Look, value: float) -> Finding:
        entry = seen.plan.entries[limit.at]
        low, high = limit.low, limit.high
        if limit.check == "drift":
            unit = " deviations" if entry.stat == "mean" else ""
            said = f"its {entry.stat} is {value:.4g}, and {low:.4g} to {high:.4g}{unit} is usual"
            return Finding("drift", entry.leaf, said)
        what = "labels" if entry.leaf == seen.plan.labels else "values"
        said = {
            "not_finite": "values that are NaN or infinite",
            "labels": f"{what} such as {value:g}, and there are {low:g} to {high:g}",
            "range": f"values such as {value:.6g}, outside {low:.6g} to {high:.6g}",
        }[limit.check]
        return Finding(limit.check, entry.leaf, said, low, high)

    # -- samples -------------------------------------------------------------------------------

    def culprits(self, seen: Look, finding: Finding) -> Tensor | None:
        """Which samples are at fault, one flag each; None: the batch as a whole. Waits."""
        if finding.check not in BY_SAMPLE:
            return None
        of_labels = finding.leaf == seen.plan.labels
        ignored = self.known.ignored if of_labels else None
        tensor = seen.found[finding.leaf]
        return bad_samples(tensor, finding.low, finding.high, ignored).cpu()

    def harmless(self, seen: Look) -> dict[str, Tensor]:
        """Labels and tokens that point nowhere, made to point somewhere; nothing is read."""
        safe: dict[str, Tensor] = {}
        bounds = [(seen.plan.labels, self.known.classes), (seen.plan.tokens, self.known.vocab)]
        for leaf, below in bounds:
            if leaf is None or below is None:
                continue
            tensor = seen.found[leaf]
            bad = (tensor < 0) | (tensor >= below)
            if leaf == seen.plan.labels and self.known.ignored is not None:
                bad &= tensor != self.known.ignored
            safe[leaf] = torch.where(bad, 0, tensor)
        return safe

    # -- checkpoint ----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: all that later findings depend on."""
        return {
            "last": self.last,
            "form": self.form,
            "schema": self.schema.state(),
            "baseline": self.baseline.state(),
            "repeats": self.repeats.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.last, self.form, self.plan = state["last"], state["form"], None
        self.schema.load(state["schema"])
        self.baseline.load(state["baseline"], None)
        self.repeats.load(state["repeats"])


def reason(finding: Finding) -> Reason:
    """As others say it."""
    return Reason(
        f"input.{finding.check}", Severity.WARNING, finding.leaf, finding.evidence,
        WAYS_OUT[finding.check],
    )  # fmt: skip
