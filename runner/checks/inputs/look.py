"""What is wrong with a batch."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from runner.batch import Batch
from runner.checks.config import InputsConfig, Policy
from runner.checks.inputs.baseline import Baseline
from runner.checks.inputs.finding import Finding, follows, reason
from runner.checks.inputs.here import numbers
from runner.checks.inputs.limits import DRIFT, Limit, crossed, limits
from runner.checks.inputs.measure import (
    Labels,
    Measure,
    Plan,
    key_of,
    leaves,
    passed_over,
    plan_of,
)
from runner.checks.inputs.repeats import Repeats
from runner.checks.inputs.schema import Schema
from runner.checks.inputs.shares import POOLED, joined
from runner.security.trust import Reason

log = logging.getLogger("runner")

CHANCE = 1e-4  # of batches: constant ones that come more often are no fault


@dataclass
class Look:
    """A batch that was looked at; nothing of it is remembered before `InputChecks.remember`."""

    found: dict[str, Tensor]
    plan: Plan
    samples: int
    values: int = 0  # in the main leaf
    row: list[float] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    pool: list[float] | None = None  # counts of labels up to this batch; None: it counts for none


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
        longest: int | None = None,  # tokens of a sample
    ) -> None:
        self.config, self.longest = config or InputsConfig(), longest
        self.known = Labels(self.config.schema.classes or classes or None, ignored, vocab)
        self.measure = Measure(self.known)
        self.schema = Schema(self.config.schema)
        self.baseline = Baseline(self.config.baseline, self.config.threshold)
        self.repeats = Repeats()
        self.plan: Plan | None = None  # of the batch that was looked at last
        self.form = ""  # of the baseline's batches
        self.limits: list[Limit] = []  # of `plan`
        self.usual: list[Limit] = []  # those that drift is told by
        self.pool: list[float] = []  # counts of labels that are yet too few to tell
        self.unseen: set[str] = set()  # tensors that are not looked at, and were named
        self.last = 0  # step that was remembered last

    def look(self, batch: Batch, epoch: int | None = None) -> list[Reason]:
        """What is wrong with it; duplicates are looked for among those of the same `epoch`."""
        step = self.last + 1
        seen = self.see(batch)
        if seen.plan.entries:
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
        key, plan = key_of(found), self.plan
        if plan is None or plan.key != key:
            plan = plan_of(key, self.known)
            self._set_limits(plan)
            self._name(passed_over(batch))
        samples = len(next(reversed(found.values()))) if found else 0
        main = found.get(plan.main or "")
        seen = Look(found, plan, samples, 0 if main is None else main.numel())
        if self.policy("form") is not Policy.off:
            differs = self.schema.differs(found, plan.main, plan.text, self.longest)
            if differs is not None:
                seen.findings.append(Finding("form", "", differs))
        return seen

    def _name(self, unseen: list[str]) -> None:
        """Say once which tensors no check looks at."""
        new = [name for name in unseen if name not in self.unseen]
        if new:
            log.warning("checks.inputs looks at dense tensors only, not at %s", ", ".join(new))
            self.unseen.update(new)

    @staticmethod
    def lost(seen: Look) -> bool:
        """Whether it has another form, so that it is not held against earlier ones."""
        return any(finding.check == "form" for finding in seen.findings)

    def judge(self, seen: Look, row: list[float], step: int, epoch: int | None) -> None:
        """What its numbers say, added to the findings."""
        seen.row = row
        if self.plan is None or self.plan.key != seen.plan.key:  # others were seen since
            self._set_limits(seen.plan)
        self._outside(self.limits, seen)
        by_chance = self._constant(seen)
        if not self.lost(seen):
            if self._has_baseline(seen) and not by_chance:
                self._outside(self.usual, seen)
                self._judge_shares(seen)
            self._again(seen, step, epoch)
        seen.findings = [one for one in seen.findings if not self._is_said(one, seen)]

    def _is_said(self, finding: Finding, seen: Look) -> bool:
        """Whether another says as much, and as much or more is done about that one."""
        order, policy = list(Policy), self.policy(finding.check)
        return any(
            order.index(self.policy(other.check)) >= order.index(policy)
            for other in seen.findings
            if follows(finding, other)
        )

    def _outside(self, limits: list[Limit], seen: Look) -> None:
        """Numbers that are not between their limits, NaN too; the first of each check and leaf.

        Of drift only what is finite tells.
        """
        told: set[tuple[str, str]] = set()
        for limit in limits:
            value = seen.row[limit.at]
            if limit.low <= value <= limit.high:
                continue
            if limit.check == DRIFT and not math.isfinite(value):
                continue
            place = limit.check, seen.plan.entries[limit.at].leaf
            if place not in told:
                told.add(place)
                seen.findings.append(crossed(limit, seen.plan, value))

    def main_at(self, seen: Look) -> int | None:
        """Where in its row the least value of the main leaf is, and next to it the largest, if it
        is worth a word that the two are one; no value is read.
        """
        main = seen.plan.main or ""
        if main not in seen.plan.values or self.policy("constant") is Policy.off:
            return None
        if not seen.values > seen.samples > 1:
            return None
        return next(i for i, entry in enumerate(seen.plan.entries) if entry.leaf == main)

    def may_be_constant(self, seen: Look) -> bool:
        """Whether the data are so sparse that it comes by chance."""
        known = self.form == seen.plan.form
        return known and self.baseline.all_alike(seen.plan, seen.samples) > CHANCE

    def _constant(self, seen: Look) -> bool:
        """Whether it is one value by chance; one that is so otherwise is a finding."""
        at = self.main_at(seen)
        if at is None or seen.row[at] != seen.row[at + 1]:
            return False
        if self.may_be_constant(seen):
            return True
        said = f"every value of the batch is {seen.row[at]:g}"
        seen.findings.append(Finding("constant", seen.plan.main or "", said))
        return False

    def _again(self, seen: Look, step: int, epoch: int | None) -> None:
        if epoch is None or self.policy("duplicates") is Policy.off:
            return
        marks = seen.row[seen.plan.width + seen.plan.shares :]
        earlier = self.repeats.find(epoch, marks, seen.samples, step)
        if earlier:
            said = f"the batch of step {earlier} comes again in the epoch, or nearly so"
            seen.findings.append(Finding("duplicates", seen.plan.main or "", said))

    def _judge_shares(self, seen: Look) -> None:
        plan, row = seen.plan, seen.row
        if not plan.shares or self.policy("drift") is Policy.off:
            return
        counts = row[plan.width : plan.width + plan.shares]
        seen.pool = joined(self.pool, counts)
        said = self.baseline.shares.odd(counts)
        if sum(seen.pool) >= POOLED:
            said = said or self.baseline.shares.odd(seen.pool)
            seen.pool = []
        if said:
            seen.findings.append(Finding("drift", plan.labels or "", said))

    def remember(self, seen: Look, step: int, epoch: int | None) -> bool:
        """Learn from it; True where the baseline is complete with it. Twice is as once."""
        if step <= self.last:
            return False
        self.last = step
        if self.lost(seen):
            return False
        plan = seen.plan
        if seen.pool is not None:
            self.pool = seen.pool
        if epoch is not None and seen.row:
            self.repeats.add(epoch, seen.row[plan.width + plan.shares :], seen.samples, step)
        if self.schema.settled and seen.found:
            self._widen(seen)
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
            self._set_limits(plan)
        return complete

    def _widen(self, seen: Look) -> None:
        widened = self.schema.widen(seen.found, seen.plan.text)
        if widened:
            log.info("checks.inputs: other lengths than before: %s", "; ".join(widened))

    def _has_baseline(self, seen: Look) -> bool:
        """Whether drift can be told: means of few samples vary more."""
        usual = self.baseline.full and self.form == seen.plan.form
        return usual and 2 * seen.samples > self.baseline.samples

    # -- limits --------------------------------------------------------------------------------

    def _set_limits(self, plan: Plan) -> None:
        self.plan = plan
        if self.form == plan.form and not self.baseline.fits(plan):
            log.warning(
                "checks.inputs: what the checkpoint has of the first batches is not of such as "
                "these; what is usual is learned anew"
            )
            self.form, self.baseline.rows, self.baseline.samples = "", [], 0
        learned = self.baseline.full and self.form == plan.form
        if learned and not self.baseline.limits:
            self.baseline.settle(plan)  # loaded from a checkpoint
        known = self.baseline if learned else None
        found = limits(plan, self.config, self.known, known)
        self.limits = [limit for limit in found if limit.check != DRIFT]
        self.usual = [limit for limit in found if limit.check == DRIFT]

    # -- checkpoint ----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: all that later findings depend on."""
        return {
            "last": self.last,
            "form": self.form,
            "schema": self.schema.state(),
            "baseline": self.baseline.state(),
            "pool": list(self.pool),
            "repeats": self.repeats.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.last, self.form, self.plan = state["last"], state["form"], None
        self.schema.load(state["schema"])
        self.baseline.load(state["baseline"])
        self.pool = list(state.get("pool", ()))  # older checkpoints have none
        self.repeats.load(state["repeats"])
