"""Classification of reported steps, and remedies for bad ones."""

from __future__ import annotations

import logging
import math
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch import nn

from runner.checkpoint.sound import finite, is_statistic, masks
from runner.errors import GaveUp
from runner.stability.anomalies import Anomalies, Anomaly
from runner.stability.config import Action, BadStepKind, RecoveryRule, StabilityConfig
from runner.stability.policy import RecoveryTable
from runner.stability.spike import Spikes
from runner.training.hook import Report
from runner.training.run import Run

if TYPE_CHECKING:
    from runner.optim.optimizer_step import OptimizerStep
    from runner.stability.messages import Decision  # imported when a step is bad

log = logging.getLogger("runner")

# the kinds that end the run under debug.on_anomaly=raise
FATAL = (BadStepKind.non_finite, BadStepKind.weights, BadStepKind.buffers)
NUMERIC = (BadStepKind.non_finite, BadStepKind.overflow)
PLAIN = ("settled", "forgotten", "streak", "share", "ruined")  # attributes saved unchanged
NEVER = sys.maxsize


class StabilityController:
    """Detects bad steps on the host, and decides and applies remedies.

    The device itself skips bad steps, including spikes above the limits stored on it. Step values
    reach the host one report at a time, on an accelerator one report late. Limits computed from a
    report apply from the end of the next one, so that a run is the same on every device and after
    every resume.
    """

    def __init__(
        self, config: StabilityConfig, update: OptimizerStep, model: nn.Module, raises: bool = False
    ) -> None:
        """With `raises`, the first bad step of a FATAL kind ends the run."""
        self.config, self.update, self.raises, self.model = config, update, raises, model
        self.spikes = Spikes(config.spike, config.guard)
        self.table = RecoveryTable.of(config)
        self.anomalies = Anomalies()
        self.decision: Decision | None = None
        self.settled = 0  # step of the last remedy; earlier bad steps need no other
        self.forgotten = 0  # values up to this step predate a roll-back or an accepted spike
        self.streak = 0  # first of the latest consecutive bad steps; 0: none
        self.share = 1.0  # factor of the learning rate from roll-backs
        self.lowered: list[tuple[int, float]] = []  # last step and factor of each lowering
        self.ruined = False  # the weights became non-finite
        self.vetoed: list[int] = []  # steps that a hook skipped, not yet reported
        self.due = NEVER  # the next step after which `apply_limits` must be called
        # buffers that are non-finite by design, such as masks, do not make a checkpoint bad
        self.odd_at_first = {n for n, buffer in model.named_buffers() if not finite([buffer])}

    # -- called by the loop --------------------------------------------------------------------

    def inspect(self, run: Run, report: Report) -> None:
        """Add the values of a report, and decide on remedies without applying them."""
        progress = run.progress
        progress.skipped += sum(report.skipped)
        for i, kind in enumerate(self._kinds(report)):
            step, loss, norm = report.first + i, report.loss[i], report.grad_norm[i]
            limits = self.spikes.of(step)
            if kind is not None:
                numbers = (loss, norm, limits.loss, limits.grad_norm, report.skipped[i])
                self._respond(run, kind, Anomaly(step, kind.name, *numbers))
            elif step > self.forgotten:
                progress.consecutive_skips = self.streak = 0
            if step > self.forgotten:
                self.spikes.add(step, {"loss": loss, "grad_norm": norm})
        self.spikes.move(report.last, report.last + run.report_every)
        self._set_due(run.progress.step - 1)
        self.vetoed = [step for step in self.vetoed if step > report.last]
        self.anomalies.write(run.folder)

    def apply_limits(self, step: int) -> None:
        """Set the spike limits of the next step, and end lowerings of the learning rate in time."""
        if self.spikes.usual:
            limits = self.spikes.of(step + 1)
            self.update.set_limits(limits.loss, limits.grad_norm)
        if any(last <= step for last, _ in self.lowered):
            self.lowered = [row for row in self.lowered if row[0] > step]
            self._set_rate()
        self._set_due(step)

    def ask(self, run: Run) -> None:
        """Decide on a roll-back for a hook, by the first rollback rule, if any, of any kind."""
        from runner.stability.messages import Decision

        rows = [i for i, rule in enumerate(self.table.rules) if rule.action is Action.rollback]
        left = self.table.can_roll_back(run.progress.rollbacks)
        row = (rows[0] if rows else -1) if left else None
        self.decision = Decision(row, "asked", run.progress.step, "a hook requested a rollback")

    def execute(self, run: Run) -> RecoveryRule | None:
        """Carry out the decision; return its rule if the loop has to roll back, else None.

        Raises GaveUp if the rule says stop or no rule is left.
        """
        decision = self.decision
        if decision is None:
            return None
        if decision.outdated and not decision.raises:
            kind = BadStepKind[decision.kind]
            decision.row = self._fitting(run, kind, in_a_row=decision.in_a_row)
        decision.outdated = False
        rule = self._rule(decision)
        if rule is None or rule.action is Action.stop:
            from runner.stability.messages import describe_giving_up

            self.decision = None  # a run resumed here with another table may continue
            first = next((row for row in self.anomalies if row.capture), None)
            rollbacks = run.progress.rollbacks
            raise GaveUp(describe_giving_up(decision, self.table, rollbacks, run.folder, first))
        if rule.action is Action.rollback:
            return rule
        step = run.progress.step
        self.table.note(decision.row or 0, decision.step)
        self.decision, self.settled = None, step
        if rule.action is Action.lower_lr:
            self.lowered.append((step + rule.for_steps, rule.factor))
            self._set_rate()
        elif rule.action is Action.lower_scale and self.update.scale is not None:
            self.update.scale.lower(rule.factor)
        elif rule.action is Action.accept:
            self._forget(run)
        self.apply_limits(step)
        return None

    def rolled_back(self, run: Run) -> None:
        """Record the loop's roll-back, and multiply the learning rate by the rule's factor."""
        decision, self.decision = self.decision, None
        if decision is None:
            return
        rule = self._rule(decision) or RecoveryRule()
        if decision.row is not None and decision.row >= 0:
            self.table.note(decision.row, run.progress.step)
        else:
            self.table.count(Action.rollback, run.progress.step)
        self.ruined = False
        self.share *= rule.factor
        self._set_rate()
        self.settled = run.progress.step
        self._forget(run)
        self.apply_limits(run.progress.step)

    def give_up(self, run: Run) -> None:
        """Replace a roll-back that has no good checkpoint by the next rule that fits, if any."""
        decision = self.decision
        if decision is None:
            return
        decision.message += "; no good checkpoint to roll back to"
        decision.stuck = True
        row, decision.row = decision.row, None
        if decision.kind != "asked" and row is not None:
            decision.row = self._fitting(run, BadStepKind[decision.kind], row + 1)
        if decision.row is not None:  # else the GaveUp message says so
            from runner.stability.messages import describe_remedy

            then = describe_remedy(self._rule(decision))
            log.warning("no good checkpoint to roll back to; instead: %s", then)

    def sound(self) -> bool:
        """Return whether weights, averages and buffers are finite (host sync); True unguarded."""
        if not self.config.guard:
            return True
        weights = [*self.update.parameters, *self.update.average]
        buffers = {n: b for n, b in self.model.named_buffers() if n not in self.odd_at_first}
        if self.update.finite([*weights, *buffers.values()]):
            return True
        by_design = self.nonfinite_by_design
        return self.update.finite(
            [*weights, *(b for name, b in buffers.items() if name not in by_design)]
        )

    @property
    def nonfinite_by_design(self) -> set[str]:
        """Names of buffers that are non-finite by design or filled so by a forward, such as masks.

        Takes one host sync per buffer.
        """
        others = [row for row in self.model.named_buffers() if not is_statistic(row[0])]
        return self.odd_at_first | masks(others)

    # -- the fault of a step -------------------------------------------------------------------

    def _kinds(self, report: Report) -> list[BadStepKind | None]:
        numbers = zip(report.loss, report.grad_norm, report.skipped, strict=True)
        kinds = [self._kind(report.first + i, *row) for i, row in enumerate(numbers)]
        # a host sync, made only after a non-finite step
        if any(kind in NUMERIC for kind in kinds) and not self.update.finite(
            self.update.parameters
        ):
            first = len(kinds)  # index of the first step with bad weights, from the losses
            while first and kinds[first - 1] in NUMERIC:
                first -= 1
            if first < len(kinds) and not report.skipped[first] and not self.ruined:
                first += 1  # the step that ruined them
            kinds[first:] = [BadStepKind.weights] * (len(kinds) - first)
            self.ruined = True
        return kinds

    def _kind(self, step: int, loss: float, norm: float, skipped: bool) -> BadStepKind | None:
        if skipped and norm == 0.0 and step in self.vetoed:
            return None  # a hook skipped the update
        if math.isfinite(loss) and math.isfinite(norm):
            if not skipped or step in self.vetoed:
                return None
            limits = self.spikes.of(step)
            if loss > limits.loss or norm > limits.grad_norm:
                return BadStepKind.spike
            return BadStepKind.buffers if self.update.buffers.watched else None
        overflow = self.update.scale is not None and math.isfinite(loss)
        return BadStepKind.overflow if overflow else BadStepKind.non_finite

    # -- the remedy ----------------------------------------------------------------------------

    def _respond(self, run: Run, kind: BadStepKind, anomaly: Anomaly) -> None:
        """Decide on a bad step, capture and record it, without applying a remedy."""
        from runner.stability.messages import describe_fault

        step = anomaly.step
        if step > self.forgotten:
            run.progress.consecutive_skips += 1
            self.streak = self.streak or step
        message = describe_fault(kind, anomaly, self.spikes)
        if (cause := run.history.causes.get(step)) is not None:
            message += f"; cause in the batch: {cause}"
        anomaly.action = action = self._decide(run, kind, anomaly, message)
        # skipped overflows are normal while the loss scale adapts
        if run.captures is not None and not (kind is BadStepKind.overflow and action == "skipped"):
            anomaly.capture = run.captures.take(run, step, kind.name, message) or ""
        if self.decision is not None and self.decision.step == step:
            self.decision.capture = anomaly.capture
        self.anomalies.add(anomaly)
        run.history.add(
            kind.name,
            message,
            step=step,
            category="numerics",
            action=action,
            severity="error" if kind is BadStepKind.weights else "warning",
            capture=anomaly.capture,
            # debug=anomaly has logged the details already; a remedy is logged in any case
            say=step not in run.history.explained or action not in ("", "skipped"),
        )
        if run.captures is not None:
            run.captures.log_capture()

    def _decide(self, run: Run, kind: BadStepKind, anomaly: Anomaly, message: str) -> str:
        """Set the decision unless one is pending; return the action as text."""
        from runner.stability.messages import Decision, describe_remedy

        many, fatal = run.progress.consecutive_skips, self.raises and kind in FATAL
        action = "skipped" if anomaly.skipped else ""
        pending = self.decision is not None or anomaly.step <= self.settled
        if pending or not (fatal or self.config.guard):
            return action
        row = None if fatal else self._fitting(run, kind)
        rule = None if row is None else self.table.rules[row]
        if row is not None and rule is not None and rule.action is Action.skip:
            self.table.note(row, anomaly.step)
            return action
        self.decision = Decision(row, kind.name, anomaly.step, message, raises=fatal, in_a_row=many)
        self.decision.since = self.streak
        return "the run ends" if fatal else describe_remedy(rule)

    def _fitting(
        self, run: Run, kind: BadStepKind, start: int = 0, in_a_row: int = 0
    ) -> int | None:
        in_a_row = in_a_row or max(run.progress.consecutive_skips, 1)
        scaled = self.update.scale is not None
        return self.table.first(kind, in_a_row, run.progress.rollbacks, scaled, start)

    def _rule(self, decision: Decision) -> RecoveryRule | None:
        if decision.row is None:
            return None
        if decision.row < 0:  # asked by a hook, without a row in the table
            return RecoveryRule(action=Action.rollback)
        return self.table.rules[decision.row]

    def _forget(self, run: Run) -> None:
        """Discard the spike statistics and the count of consecutive bad steps."""
        run.progress.consecutive_skips = self.streak = 0
        self.forgotten = run.progress.step
        self.spikes.forget(run.progress.step)

    def _set_rate(self) -> None:
        self.update.set_backoff(self.share * math.prod(factor for _, factor in self.lowered))

    def _set_due(self, step: int) -> None:
        """Set `due` to the next step after `step` that changes limits or the learning rate."""
        times = [limits.after for limits in self.spikes.limits if limits.after > step]
        self.due = min(times + [last for last, _ in self.lowered], default=NEVER)

    # -- checkpoint ----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: all that later decisions depend on."""
        return {
            "spikes": self.spikes.state(),
            "table": self.table.state(),
            "anomalies": self.anomalies.state(),
            "decision": None if self.decision is None else asdict(self.decision),
            "lowered": [list(row) for row in self.lowered],
            "vetoed": self.vetoed,
            **{name: getattr(self, name) for name in PLAIN},
        }

    def load(self, state: dict[str, Any], step: int) -> None:
        """Restore the state of a checkpoint made after `step`."""
        self.spikes.load(state["spikes"])
        self.table.load(state["table"])
        self.anomalies.load(state["anomalies"])
        from runner.stability.messages import restore_decision

        fatal = FATAL if self.raises else ()
        self.decision = restore_decision(state["decision"], self.anomalies, self.spikes, fatal)
        if self.decision is not None and not (self.decision.raises or self.config.guard):
            self.decision = None
        for name in PLAIN:
            setattr(self, name, state[name])
        self.lowered = [(last, factor) for last, factor in state["lowered"]]
        self.vetoed = list(state["vetoed"])
        self.apply_limits(step)
