"""Autograd's anomaly mode: find the operation, line and module that made a gradient NaN."""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from runner.core.errors import GaveUp
from runner.core.interfaces.hook import Cost, Step
from runner.core.interfaces.run import Run
from runner.core.preserved_state import preserve_random_state
from runner.core.schemas.debug import DebugConfig
from runner.diagnose.debug.tool import DebugTool
from runner.diagnose.replay.results import Cause, StepPhase, finiteness
from runner.diagnose.replay.trace import trace_step

NAN_ERROR = re.compile(r"Function '(\w+)' returned nan values in its \d+th output")
NAN_WARNING = "Error detected in "
VALUES = re.compile(r" \(\d+ of \d+ values\)")  # differs by step, unlike the rest of a message


class AnomalyTool(DebugTool):
    """Runs steps in anomaly mode; a NaN in backward is reported, and recorded or raised.

    A step with a NaN is repeated without raising, and a step that is not finite with every
    operation traced, as by `job=replay`; if it is only recorded, the guard skips it as usual. These
    steps run uncompiled. Autograd reads every gradient in this mode, which synchronises an
    accelerator at each operation.
    """

    name = "anomaly"
    eager = True

    def __init__(self, config: DebugConfig) -> None:
        super().__init__(config, config.anomaly.every or 1)
        self.raise_on_anomaly = config.on_anomaly.name == "raise"
        self.active = False
        self.error: Exception | None = None  # of autograd, in the step's first attempt
        self.culprits: Counter[str] = Counter()

    def state(self) -> dict[str, Any]:
        """Return how often each operation or module was at fault."""
        return {"culprits": self.culprits}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue to count."""
        self.culprits = Counter(state["culprits"])

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Silence autograd's warnings, and register the recovery of failed steps."""
        run.recoveries.insert(0, self._recover)
        try:
            with warnings.catch_warnings():  # once per run: entering makes Python repeat warnings
                warnings.filterwarnings("ignore", message=NAN_WARNING)
                yield
        finally:
            self.active = False
            run.recoveries.remove(self._recover)

    @contextmanager
    def around(self, run: Run) -> Iterator[None]:
        """Run the step in anomaly mode."""
        self.inspections += 1
        self.error = None
        with torch.autograd.set_detect_anomaly(True):
            self.active = True
            try:
                yield
            finally:
                self.active = False

    def on_gradients(self, run: Run, step: Step) -> None:
        """Report the culprit, also for an Inf that did not become NaN in backward."""
        error, norm = self.error, step.grad_norm.item()  # waits, as autograd has
        if not math.isfinite(norm):
            cause = _trace(run)
        elif error is not None:
            cause = Cause(StepPhase.nowhere, "")
        else:
            return
        in_backward = cause.phase in (StepPhase.backward, StepPhase.norm, StepPhase.nowhere)
        if error is None and run.update.scale is not None and in_backward:
            return  # fp16 overflows are part of loss scaling
        message, key = _describe(run, cause, error)
        self._add_fault(run, message, key, not in_backward, error)

    def _recover(self, run: Run, error: Exception) -> bool:
        """On a NaN, repeat the step without raising."""
        if not self.active or NAN_ERROR.search(str(error)) is None:
            return False
        self.active, self.error = False, error
        torch.autograd.set_detect_anomaly(True, check_nan=False)  # `around` restores it
        return True

    def _add_fault(
        self, run: Run, message: str, key: str, in_forward: bool, error: Exception | None
    ) -> None:
        step = run.progress.step + 1
        self.culprits[key] += 1
        (most_common, count), others = self.culprits.most_common(1)[0], len(self.culprits) - 1
        self.finding = f"{count} × {most_common}" + (f", {others} others" if others else "")
        ends_run = self.raise_on_anomaly and (run.update.scale is None or in_forward)
        if run.update.scale:
            message += f", at a loss scale of {run.update.scale.value.item():g}"  # waits
        run.history.explained_steps.add(step)
        run.history.add(
            "anomaly",
            message,
            step=step,
            category="numerics",
            severity="error" if ends_run else "warning",
            action="the run ends" if ends_run else "skipped" if run.update.guard else "",
            error=error,
            # else it was reported with its batch
            say=not ends_run and step not in run.history.causes,
        )
        if ends_run:
            raise GaveUp(f"step {step}: {message} (debug.on_anomaly=raise)") from None

    def cost(self, run: Run) -> Cost | None:
        """Return the findings, and how much longer its steps take than others."""
        finding = self.finding or "no NaN or Inf" if self.inspections else "no step was checked"
        finding += "; every step" if self.every == 1 else f"; every {self.every} steps"
        if run.step_graph is not None or (run.compilation is not None and run.compilation.mode):
            finding += ", uncompiled"
        return Cost(self.name, self.inspections, self.total_seconds(run), finding)


def _trace(run: Run) -> Cause:
    """Repeat the running step with every operation traced; gradients and random state stay.

    Of several processes each repeats its own part alone, as one may end early.
    """
    # a BatchNorm with a forward of its own normalises by the batch of all processes
    norms = (module for module in run.model.modules() if isinstance(module, _BatchNorm))
    if run.shards is not None or any("forward" in vars(norm) for norm in norms):
        return Cause(StepPhase.nowhere, "")
    gradients = [parameter.grad for parameter in run.model.parameters()]
    run.update.abandon()  # the buffers are again those before the step
    try:
        with torch.autograd.set_detect_anomaly(False), preserve_random_state():
            return trace_step(run.alone(), run.train.at(run.progress.step))
    finally:
        for parameter, gradient in zip(run.model.parameters(), gradients, strict=True):
            parameter.grad = gradient


def _describe(run: Run, cause: Cause, error: Exception | None) -> tuple[str, str]:
    """Return a message on the cause, and the key to count it by."""
    if cause.phase is StepPhase.input:
        name, samples = cause.inputs[0].name, cause.inputs[0].shape[0]
        text = f"the {name} is not finite: {len(cause.samples):,} of {samples:,} samples"
        return text, f"bad {name}"
    where = cause.module or "the model itself"
    if cause.kind or cause.operation or cause.line is not None:
        line = cause.line.short if cause.line is not None else ""
        text = ", ".join(filter(None, (VALUES.sub("", cause.cause), cause.operation, line)))
        operation = cause.operation.rpartition(" in ")[2]
        key = f"{operation} at {line}" if cause.phase is StepPhase.backward and line else ""
        return text, key or f"{where} in {cause.phase.value}"
    if error is not None and (match := NAN_ERROR.search(str(error))) is not None:
        return f"{match[1]} gave NaN in backward", match[1]
    named = reversed(list(run.model.named_parameters()))
    bad = (name for name, p in named if p.grad is not None and finiteness(p.grad))
    culprit = next((f"the gradient of {name}" for name in bad), "the loss")
    if cause.phase is StepPhase.norm and culprit == "the loss":
        return cause.cause, "the gradient norm"
    hint = "job=replay of the step's capture may name the module"
    return f"{culprit} is not finite; {hint}", culprit
