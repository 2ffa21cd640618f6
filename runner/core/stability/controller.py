"""Classification of reported steps, and remedies for bad ones."""

from __future__ import annotations

import logging
import math
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch import nn

from runner.core.checkpoint.finite_checks import all_finite, infinite_buffers, is_statistic
from runner.core.errors import GaveUp
from runner.core.interfaces.hook import Report
from runner.core.interfaces.run import Run
from runner.core.schemas.stability import Action, BadStepKind, RecoveryRule, StabilityConfig
from runner.core.stability.anomalies import Anomalies, Anomaly
from runner.core.stability.policy import RecoveryTable
from runner.core.stability.spike import SpikeDetector

if TYPE_CHECKING:
    from runner.core.optim.optimizer_step import OptimizerStep
    from runner.core.stability.messages import Decision  # imported when a step is bad

log = logging.getLogger("runner")

# the kinds that end the run under debug.on_anomaly=raise
FATAL_KINDS = (BadStepKind.non_finite, BadStepKind.weights, BadStepKind.buffers)
NONFINITE_KINDS = (BadStepKind.non_finite, BadStepKind.overflow)
NO_STEP = sys.maxsize


class StabilityController:
    """Detects bad steps on the host, and decides and applies remedies.

    The device itself skips bad steps, including spikes above the limits stored on it. Step values
    reach the host one report at a time, on an accelerator one report late. Limits computed from a
    report apply from the end of the next one, so that a run is the same on every device and after
    every resume.
    """

    def __init__(
        self,
        config: StabilityConfig,
        update: OptimizerStep,
        model: nn.Module,
        raise_on_fatal: bool = False,
    ) -> None:
        """With `raise_on_fatal`, the first bad step of a kind in FATAL_KINDS ends the run."""
        self.config, self.update, self.model = config, update, model
        self.raise_on_fatal = raise_on_fatal
        self.spikes = SpikeDetector(config.spike, config.guard)
        self.table = RecoveryTable.from_config(config)
        self.anomalies = Anomalies()
        self.decision: Decision | None = None
        self.last_remedy_step = 0  # step of the last remedy; earlier bad steps need no other
        self.reset_step = 0  # values up to this step predate a roll-back or an accepted spike
        self.bad_since = 0  # first of the latest consecutive bad steps; 0: none
        self.rollback_lr_factor = 1.0  # product over all roll-backs
        self.lr_reductions: list[tuple[int, float]] = []  # (last step, factor) of lower_lr rules
        self.weights_nonfinite = False  # at the last report
        self.vetoed: list[int] = []  # steps that a hook skipped, not yet reported
        self.due = NO_STEP  # the next step after which `apply_limits` must be called
        # buffers that are non-finite by design, such as masks, do not make a checkpoint bad
        self.initially_nonfinite = {n for n, b in model.named_buffers() if not all_finite([b])}

    # -- called by the loop --------------------------------------------------------------------

    def inspect(self, run: Run, report: Report) -> None:
        """Add the values of a report, and decide on remedies without applying them."""
        progress = run.progress
        progress.skipped += sum(report.skipped)
        for i, kind in enumerate(self._classify_report(run, report)):
            step, loss, norm = report.first + i, report.loss[i], report.grad_norm[i]
            limits = self.spikes.limits_at(step)
            if kind is not None:
                numbers = (loss, norm, limits.loss, limits.grad_norm, report.skipped[i])
                self._handle_bad_step(run, kind, Anomaly(step, kind.name, *numbers))
            elif step > self.reset_step:
                progress.consecutive_skips = self.bad_since = 0
            if step > self.reset_step:
                self.spikes.add(step, {"loss": loss, "grad_norm": norm})
        self.spikes.update_limits(report.last, report.last + run.report_every)
        self._set_due(run.progress.step - 1)
        self.vetoed = [step for step in self.vetoed if step > report.last]
        self.anomalies.write(run.folder)

    def apply_limits(self, step: int) -> None:
        """Set the spike limits of the next step, and end reductions of the learning rate."""
        if self.spikes.baselines:
            limits = self.spikes.limits_at(step + 1)
            self.update.set_limits(limits.loss, limits.grad_norm)
        if any(last <= step for last, _ in self.lr_reductions):
            self.lr_reductions = [row for row in self.lr_reductions if row[0] > step]
            self._set_lr_factor()
        self._set_due(step)

    def request_rollback(self, run: Run) -> None:
        """Decide on a roll-back for a hook, by the first rollback rule, if any, of any kind."""
        from runner.core.stability.messages import Decision

        rows = [i for i, rule in enumerate(self.table.rules) if rule.action is Action.rollback]
        allowed = self.table.can_roll_back(run.progress.rollbacks)
        row = (rows[0] if rows else -1) if allowed else None
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
            decision.row = self._matching_row(run, kind, in_a_row=decision.in_a_row)
        decision.outdated = False
        rule = self._decided_rule(decision)
        if rule is None or rule.action is Action.stop:
            from runner.core.stability.messages import describe_giving_up

            self.decision = None  # a run resumed here with another table may continue
            first = next((row for row in self.anomalies if row.capture), None)
            rollbacks = run.progress.rollbacks
            raise GaveUp(describe_giving_up(decision, self.table, rollbacks, run.folder, first))
        if rule.action is Action.rollback:
            return rule
        step = run.progress.step
        self.table.record_use(decision.row or 0, decision.step)
        self.decision, self.last_remedy_step = None, step
        if rule.action is Action.lower_lr:
            self.lr_reductions.append((step + rule.for_steps, rule.factor))
            self._set_lr_factor()
        elif rule.action is Action.lower_scale and self.update.scale is not None:
            self.update.scale.lower(rule.factor)
        elif rule.action is Action.accept:
            self._reset_statistics(run)
        self.apply_limits(step)
        return None

    def record_rollback(self, run: Run) -> None:
        """Record the loop's roll-back, and multiply the learning rate by the rule's factor."""
        decision, self.decision = self.decision, None
        if decision is None:
            return
        rule = self._decided_rule(decision) or RecoveryRule()
        if decision.row is not None and decision.row >= 0:
            self.table.record_use(decision.row, run.progress.step)
        else:
            self.table.count_action(Action.rollback, run.progress.step)
        self.weights_nonfinite = False
        self.rollback_lr_factor *= rule.factor
        self._set_lr_factor()
        self.last_remedy_step = run.progress.step
        self._reset_statistics(run)
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
            decision.row = self._matching_row(run, BadStepKind[decision.kind], row + 1)
        if decision.row is not None:  # else the GaveUp message says so
            from runner.core.stability.messages import describe_remedy

            remedy = describe_remedy(self._decided_rule(decision))
            log.warning("no good checkpoint to roll back to; instead: %s", remedy)

    def has_finite_weights(self) -> bool:
        """Return whether weights, averages and buffers are finite (host sync); True unguarded."""
        return not self.config.guard or self.are_weights_finite()

    def are_weights_finite(self) -> bool:
        """Return whether weights, averages and buffers are finite (host sync)."""
        weights = [*self.update.parameters, *self.update.average]
        buffers = {n: b for n, b in self.model.named_buffers() if n not in self.initially_nonfinite}
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
        return self.initially_nonfinite | infinite_buffers(others)

    # -- the fault of a step -------------------------------------------------------------------

    def _loss_scales(self, run: Run, report: Report) -> list[float]:
        """Return the loss scale in each step of a report. Host sync."""
        rows = run.reader.since(report.first)
        norms = report.grad_norm if rows is None else [row[1] for row in rows]
        overflowed = [not math.isfinite(norm) for norm in norms]
        scale = self.update.scale
        values = [] if scale is None else scale.values_before(overflowed)
        return values[: len(report.loss)]

    def _classify_report(self, run: Run, report: Report) -> list[BadStepKind | None]:
        numbers = zip(report.loss, report.grad_norm, report.skipped, strict=True)
        kinds = [self._classify_step(report.first + i, *row) for i, row in enumerate(numbers)]
        if BadStepKind.overflow in kinds:
            scales = self._loss_scales(run, report)
            # without a scale above 1 it is the gradient itself
            kinds = [
                BadStepKind.non_finite if kind is BadStepKind.overflow and scale < 1 else kind
                for kind, scale in zip(kinds, scales, strict=True)
            ]
        # a host sync, made only after a non-finite step
        if any(kind in NONFINITE_KINDS for kind in kinds) and not self.update.finite(
            self.update.parameters
        ):
            first = len(kinds)  # index of the first step with bad weights, from the losses
            while first and kinds[first - 1] in NONFINITE_KINDS:
                first -= 1
            if first < len(kinds) and not report.skipped[first] and not self.weights_nonfinite:
                first += 1  # the step that ruined them
            kinds[first:] = [BadStepKind.weights] * (len(kinds) - first)
            self.weights_nonfinite = True
        return kinds

    def _classify_step(
        self, step: int, loss: float, norm: float, skipped: bool
    ) -> BadStepKind | None:
        if skipped and norm == 0.0 and step in self.vetoed:
            return None  # a hook skipped the update
        if math.isfinite(loss) and math.isfinite(norm):
            if not skipped or step in self.vetoed:
                return None
            limits = self.spikes.limits_at(step)
            if loss > limits.loss or norm > limits.grad_norm:
                return BadStepKind.spike
            return BadStepKind.buffers if self.update.buffers.statistic_slots else None
        overflow = self.update.scale is not None and math.isfinite(loss)
        return BadStepKind.overflow if overflow else BadStepKind.non_finite

    # -- the remedy ----------------------------------------------------------------------------

    def _handle_bad_step(self, run: Run, kind: BadStepKind, anomaly: Anomaly) -> None:
        """Decide on a bad step, capture and record it, without applying a remedy."""
        from runner.core.stability.messages import describe_fault

        step = anomaly.step
        # an overflow halves the scale until a step is taken, which may take many steps
        if step > self.reset_step and kind is not BadStepKind.overflow:
            run.progress.consecutive_skips += 1
            self.bad_since = self.bad_since or step
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
            say=step not in run.history.explained_steps or action not in ("", "skipped"),
        )
        if run.captures is not None:
            run.captures.log_capture()

    def _decide(self, run: Run, kind: BadStepKind, anomaly: Anomaly, message: str) -> str:
        """Set the decision unless one is pending; return the action as text."""
        from runner.core.stability.messages import Decision, describe_remedy

        in_a_row, overflow = run.progress.consecutive_skips, kind is BadStepKind.overflow
        if overflow:
            in_a_row = self.anomalies.count_before(anomaly.step, kind.name) + 1
        fatal = self.raise_on_fatal and kind in FATAL_KINDS
        action = "skipped" if anomaly.skipped else ""
        pending = self.decision is not None or anomaly.step <= self.last_remedy_step
        if pending or not (fatal or self.config.guard):
            return action
        row = None if fatal else self._matching_row(run, kind, in_a_row=in_a_row)
        if overflow and row is None:
            return action  # the loss scale is halved
        rule = None if row is None else self.table.rules[row]
        if row is not None and rule is not None and rule.action is Action.skip:
            self.table.record_use(row, anomaly.step)
            return action
        self.decision = Decision(
            row, kind.name, anomaly.step, message, raises=fatal, in_a_row=in_a_row
        )
        self.decision.since = self.bad_since
        return "the run ends" if fatal else describe_remedy(rule)

    def _matching_row(
        self, run: Run, kind: BadStepKind, start: int = 0, in_a_row: int = 0
    ) -> int | None:
        in_a_row = in_a_row or max(run.progress.consecutive_skips, 1)
        arguments = kind, in_a_row, run.progress.rollbacks, self.update.scale is not None
        row = self.table.first_match(*arguments, start)
        # rules for any kind are about bad steps; an overflow is one of loss scaling's own
        while kind is BadStepKind.overflow and row is not None:
            rule = self.table.rules[row]
            if BadStepKind.overflow is rule.kind or rule.action is Action.lower_scale:
                break
            row = self.table.first_match(*arguments, row + 1)
        return row

    def _decided_rule(self, decision: Decision) -> RecoveryRule | None:
        if decision.row is None:
            return None
        if decision.row < 0:  # asked by a hook, without a row in the table
            return RecoveryRule(action=Action.rollback)
        return self.table.rules[decision.row]

    def _reset_statistics(self, run: Run) -> None:
        """Discard the spike statistics and the count of consecutive bad steps."""
        run.progress.consecutive_skips = self.bad_since = 0
        self.reset_step = run.progress.step
        self.spikes.reset(run.progress.step)

    def _set_lr_factor(self) -> None:
        self.update.set_backoff(
            self.rollback_lr_factor * math.prod(factor for _, factor in self.lr_reductions)
        )

    def _set_due(self, step: int) -> None:
        """Set `due` to the next step after `step` that changes limits or the learning rate."""
        times = [limits.after for limits in self.spikes.limits if limits.after > step]
        self.due = min(times + [last for last, _ in self.lr_reductions], default=NO_STEP)

    # -- checkpoint ----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: all that later decisions depend on."""
        return {
            "spikes": self.spikes.state(),
            "table": self.table.state(),
            "anomalies": self.anomalies.state(),
            "decision": None if self.decision is None else asdict(self.decision),
            "lowered": [list(row) for row in self.lr_reductions],
            "vetoed": self.vetoed,
            "settled": self.last_remedy_step,
            "forgotten": self.reset_step,
            "streak": self.bad_since,
            "share": self.rollback_lr_factor,
            "ruined": self.weights_nonfinite,
        }

    def load(self, state: dict[str, Any], step: int) -> None:
        """Restore the state of a checkpoint made after `step`."""
        self.spikes.load(state["spikes"])
        self.table.load(state["table"])
        self.anomalies.load(state["anomalies"])
        from runner.core.stability.messages import restore_decision

        fatal = FATAL_KINDS if self.raise_on_fatal else ()
        self.decision = restore_decision(state["decision"], self.anomalies, self.spikes, fatal)
        if self.decision is not None and not (self.decision.raises or self.config.guard):
            self.decision = None
        self.last_remedy_step, self.reset_step = state["settled"], state["forgotten"]
        self.bad_since, self.rollback_lr_factor = state["streak"], state["share"]
        self.weights_nonfinite = state["ruined"]
        self.lr_reductions = [(last, factor) for last, factor in state["lowered"]]
        self.vetoed = list(state["vetoed"])
        self.apply_limits(step)
