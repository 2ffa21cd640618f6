"""Classification of reported steps, and remedies for bad ones."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch import nn

from runner.core.checkpoint.finite_checks import all_finite, infinite_buffers, is_statistic
from runner.core.errors import GaveUp
from runner.core.interfaces.hook import Report
from runner.core.interfaces.run import Run
from runner.core.schemas.stability import StabilityConfig
from runner.core.stability.anomalies import Anomalies, Anomaly, BadStepKind
from runner.core.stability.spike import SpikeDetector

if TYPE_CHECKING:
    from runner.core.optim.optimizer_step import OptimizerStep
    from runner.core.stability.messages import Decision  # imported when a step is bad

# the kinds that end the run under debug.on_anomaly=raise
FATAL_KINDS = (BadStepKind.non_finite, BadStepKind.weights, BadStepKind.buffers)
NONFINITE_KINDS = (BadStepKind.non_finite, BadStepKind.overflow)
NO_STEP = sys.maxsize


class StabilityController:
    """Detects bad steps on the host, and decides what is done beyond skipping them.

    The device itself skips bad steps, including spikes above the limits stored on it. Step values
    reach the host one report at a time, on an accelerator one report late. Limits computed from a
    report apply from the end of the next one, so that a run is the same on every device and after
    every resume.

    After `max_consecutive_skips` bad steps in a row, and at once if weights or buffers are not
    finite, the run rolls back, at most `max_rollbacks` times; then it gives up. Spikes neither roll
    back nor end a run: after as many in a row their limits are learned again.
    """

    def __init__(
        self,
        config: StabilityConfig,
        update: OptimizerStep,
        model: nn.Module,
        raise_on_fatal: bool = False,
        rolls_back: bool = True,
    ) -> None:
        """With `raise_on_fatal`, the first bad step of a kind in FATAL_KINDS ends the run.

        `rolls_back` is False in a hand-written loop, which has its own checkpoints.
        """
        self.config, self.update, self.model = config, update, model
        self.raise_on_fatal, self.rolls_back = raise_on_fatal, rolls_back
        self.spikes = SpikeDetector(config.spike, config.guard)
        self.anomalies = Anomalies()
        self.decision: Decision | None = None
        self.last_remedy_step = 0  # step of the last roll-back; earlier bad steps need no other
        self.reset_step = 0  # values up to this step predate a roll-back or accepted spikes
        self.bad_since = 0  # first of the latest consecutive bad steps; 0: none
        self.weights_nonfinite = self.buffers_nonfinite = False  # at the last report
        self.vetoed: list[int] = []  # steps that a hook skipped, not yet reported
        self.due = NO_STEP  # the next step after which `apply_limits` must be called
        # buffers that are non-finite by design, such as masks, do not make a checkpoint bad
        self.initially_nonfinite = {n for n, b in model.named_buffers() if not all_finite([b])}

    # -- called by the loop --------------------------------------------------------------------

    def inspect(self, run: Run, report: Report) -> None:
        """Add the values of a report, and decide on a remedy without applying it."""
        progress, next_limits = run.progress, report.last + run.report_every
        progress.skipped += sum(report.skipped)
        for i, kind in enumerate(self._classify_report(run, report)):
            step, loss, norm = report.first + i, report.loss[i], report.grad_norm[i]
            limits = self.spikes.limits_at(step)
            if kind is not None:
                numbers = (loss, norm, limits.loss, limits.grad_norm, report.skipped[i])
                self._handle_bad_step(run, kind, Anomaly(step, kind.name, *numbers), next_limits)
            elif step > self.reset_step:
                progress.consecutive_skips = self.bad_since = 0
            if step > self.reset_step:
                self.spikes.add(step, {"loss": loss, "grad_norm": norm})
        self.spikes.update_limits(report.last, next_limits)
        self._set_due(run.progress.step - 1)
        self.vetoed = [step for step in self.vetoed if step > report.last]
        self.anomalies.write(run.folder)

    def apply_limits(self, step: int) -> None:
        """Set the spike limits of the next step."""
        if self.spikes.baselines:
            limits = self.spikes.limits_at(step + 1)
            self.update.set_limits(limits.loss, limits.grad_norm)
        self._set_due(step)

    def needs_rollback(self, run: Run) -> bool:
        """Return whether the loop has to roll back; raises GaveUp if that is no longer allowed."""
        decision, rollbacks = self.decision, run.progress.rollbacks
        if decision is None:
            return False
        if not (decision.raises or decision.stuck) and self._can_roll_back(run):
            return True
        from runner.core.stability.messages import describe_giving_up

        self.decision = None  # a run resumed here with other limits may continue
        captures = [decision.capture, *(row.capture for row in self.anomalies)]
        folders = [] if run.folder is None else [run.folder / name for name in captures if name]
        config = self.config if self.rolls_back else None
        raise GaveUp(describe_giving_up(decision, config, rollbacks, folders))

    def record_rollback(self, run: Run) -> None:
        """Record the loop's roll-back, and lower the learning rate."""
        self.decision, self.weights_nonfinite = None, False
        self.update.set_backoff(self.update.backoff * self.config.rollback_lr_factor)
        self.last_remedy_step = run.progress.step
        self._reset_statistics(run, run.progress.step)
        self.apply_limits(run.progress.step)

    def record_missing_checkpoint(self) -> None:
        """Record that there is no good checkpoint to roll back to: the run gives up."""
        if self.decision is not None:
            self.decision.message += "; no good checkpoint to roll back to"
            self.decision.stuck = True

    def are_weights_finite(self) -> bool:
        """Return whether weights, averages and buffers are finite (host sync)."""
        weights = [*self.update.parameters, *self.update.average]
        buffers = {n: b for n, b in self.model.named_buffers() if n not in self.initially_nonfinite}
        if self.update.finite([*weights, *buffers.values()]):
            return True
        by_design = self.nonfinite_by_design
        others = [buffer for name, buffer in buffers.items() if name not in by_design]
        return self.update.finite([*weights, *others])

    @property
    def nonfinite_by_design(self) -> set[str]:
        """Names of buffers that are non-finite by design, as masks. A host sync per buffer."""
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
            for i, scale in enumerate(scales):
                if kinds[i] is BadStepKind.overflow and scale < 1:
                    kinds[i] = BadStepKind.non_finite
        # host syncs, made only after such a step
        suspect = any(kind in NONFINITE_KINDS for kind in kinds)
        if suspect and not self.update.finite(self.update.parameters):
            first = len(kinds)  # index of the first step with bad weights, from the losses
            while first and kinds[first - 1] in NONFINITE_KINDS:
                first -= 1
            if first < len(kinds) and not report.skipped[first] and not self.weights_nonfinite:
                first += 1  # the step that ruined them
            kinds[first:] = [BadStepKind.weights] * (len(kinds) - first)
            self.weights_nonfinite = True
        if BadStepKind.buffers in kinds:  # restored, unless they were lost before
            self.buffers_nonfinite = not self.update.finite(self.update.buffers.statistics())
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

    def _handle_bad_step(
        self, run: Run, kind: BadStepKind, anomaly: Anomaly, next_limits: int
    ) -> None:
        """Decide on a bad step, capture and record it, without applying a remedy.

        Limits that are learned again apply from the step after `next_limits`.
        """
        from runner.core.stability.messages import describe_fault

        step = anomaly.step
        # an overflow halves the scale until a step is taken, which may take many steps
        if step > self.reset_step and kind is not BadStepKind.overflow:
            run.progress.consecutive_skips += 1
            self.bad_since = self.bad_since or step
        message = describe_fault(kind, anomaly, self.spikes)
        if (cause := run.history.causes.get(step)) is not None:
            message += f"; cause in the batch: {cause}"
        anomaly.action = action = self._decide(run, kind, anomaly, message, next_limits)
        # skipped overflows are normal while the loss scale adapts
        if run.captures is not None and not (kind is BadStepKind.overflow and action == "skipped"):
            anomaly.capture = run.captures.take(run, step, kind.name, message) or ""
        if self.decision is not None and self.decision.step == step:
            self.decision.capture = anomaly.capture
        self.anomalies.add(anomaly)
        run.history.add(
            kind.name, message, step=step, category="numerics", action=action,
            severity="error" if kind is BadStepKind.weights else "warning", capture=anomaly.capture,
            # debug=anomaly has logged the details already; a remedy is logged in any case
            say=step not in run.history.explained_steps or action not in ("", "skipped"),
        )  # fmt: skip
        if run.captures is not None:
            run.captures.log_capture()

    def _decide(
        self, run: Run, kind: BadStepKind, anomaly: Anomaly, message: str, next_limits: int
    ) -> str:
        """Set the decision unless one is pending; return the action as text."""
        action = "skipped" if anomaly.skipped else ""
        fatal = self.raise_on_fatal and kind in FATAL_KINDS
        pending = self.decision is not None or anomaly.step <= self.last_remedy_step
        if pending or kind is BadStepKind.overflow or not (fatal or self.config.guard):
            return action
        in_a_row = max(run.progress.consecutive_skips, 1)
        lost = kind is BadStepKind.weights
        lost = lost or (kind is BadStepKind.buffers and self.buffers_nonfinite)
        if not (fatal or lost or in_a_row > self.config.max_consecutive_skips):
            return action
        if kind is BadStepKind.spike:
            if anomaly.step <= self.reset_step:
                return action
            self._reset_statistics(run, next_limits)
            return "accepted as the new baseline"
        from runner.core.stability.messages import Decision

        self.decision = Decision(kind.name, anomaly.step, message, in_a_row, self.bad_since)
        self.decision.raises = fatal
        if fatal:
            return "the run ends"
        return "rolling back" if self._can_roll_back(run) else "the run gives up"

    def _can_roll_back(self, run: Run) -> bool:
        return self.rolls_back and run.progress.rollbacks < self.config.max_rollbacks

    def _reset_statistics(self, run: Run, step: int) -> None:
        """Discard spike statistics up to `step`, and the count of consecutive bad steps."""
        run.progress.consecutive_skips = self.bad_since = 0
        self.reset_step = step
        self.spikes.reset(step)

    def _set_due(self, step: int) -> None:
        times = [limits.after for limits in self.spikes.limits if limits.after > step]
        self.due = min(times, default=NO_STEP)

    # -- checkpoint ----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: all that later decisions depend on."""
        return {
            "spikes": self.spikes.state(),
            "anomalies": self.anomalies.state(),
            "decision": None if self.decision is None else asdict(self.decision),
            "vetoed": self.vetoed,
            "settled": self.last_remedy_step,
            "forgotten": self.reset_step,
            "streak": self.bad_since,
            "ruined": self.weights_nonfinite,
        }

    def load(self, state: dict[str, Any], step: int) -> None:
        """Restore the state of a checkpoint made after `step`."""
        self.spikes.load(state["spikes"])
        self.anomalies.load(state["anomalies"])
        from runner.core.stability.messages import restore_decision

        fatal = FATAL_KINDS if self.raise_on_fatal else ()
        self.decision = restore_decision(state["decision"], self.anomalies, self.spikes, fatal)
        if self.decision is not None and not (self.decision.raises or self.config.guard):
            self.decision = None
        self.last_remedy_step, self.reset_step = state["settled"], state["forgotten"]
        self.bad_since, self.weights_nonfinite = state["streak"], state["ruined"]
        self.vetoed = list(state["vetoed"])
        if state.get("lowered"):  # an older version's reduction for some steps ends here
            self.update.set_backoff(state["share"])
        self.apply_limits(step)
