"""Autograd's anomaly mode: the operation, the line and the module that made a gradient NaN."""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from runner.debug.config import DebugConfig
from runner.debug.module_trace import ModuleTrace, bad_samples, peak
from runner.debug.source_line import line_at, place_in_text
from runner.debug.tool import Tool
from runner.errors import GaveUp
from runner.training.hook import Cost, Step
from runner.training.run import Run
from runner.training.timing import SETTLING

RAISED = re.compile(r"Function '(\w+)' returned nan values in its \d+th output")
WARNED = "Error detected in "


class AnomalyTool(Tool):
    """Steps in anomaly mode; a NaN in backward is named, and by policy recorded or the end.

    The step is made again, this time recording each operation's gradients, and where a NaN is only
    recorded, the guard skips it as it would any other. The steps run uncompiled. Autograd itself
    reads every gradient in this mode: an accelerator waits at each operation.
    """

    name = "anomaly"
    eager = True

    def __init__(self, config: DebugConfig) -> None:
        super().__init__(config, config.anomaly.every or 1)
        self.raises = config.on_anomaly.name == "raise"
        self.trace: ModuleTrace | None = None
        self.active = False
        self.warned = ""  # autograd's last warning, with where a failed operation was called
        self.failed: Exception | None = None  # the error of the step's first attempt
        self.culprits: Counter[str] = Counter()
        self.suspicious = False  # the last step looked at was not finite
        self.first = 0  # step before the first of this process
        self.shared: set[int] = set()  # steps that other tools looked at too

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Listen to autograd's warnings, and be asked when a step fails."""
        self.trace, self.first = ModuleTrace(run.model), run.progress.step
        run.recoveries.insert(0, self._recover)
        try:
            with warnings.catch_warnings():  # once a run: entering it makes Python repeat warnings
                warnings.filterwarnings("always", message=WARNED)
                warnings.showwarning = self._listen(warnings.showwarning)
                yield
        finally:
            self.active = False
            run.recoveries.remove(self._recover)

    @contextmanager
    def around(self, run: Run) -> Iterator[None]:
        """Anomaly mode, and hooks on every module."""
        self.looks += 1
        step = run.progress.step + 1
        if any(isinstance(h, Tool) and h is not self and h.due(step) for h in run.hooks):
            self.shared.add(step)
        self.warned, self.failed = "", None
        trace = self.trace or ModuleTrace(run.model)
        with trace.watching(), torch.autograd.set_detect_anomaly(True):
            # an Inf alone raises nothing: the operation of the next one is found
            trace.operations_too = self.suspicious
            self.active = True
            try:
                yield
            finally:
                self.active = False

    def on_gradients(self, run: Run, step: Step) -> None:
        """Name the culprit, also of an Inf of which backward made no NaN."""
        failed, self.failed = self.failed, None
        self.suspicious = not math.isfinite(step.grad_norm.item())  # waits, as autograd has
        if self.trace is None or (failed is None and not self.suspicious):
            return
        in_forward = self._find_in_forward(run, self.trace)
        if failed is None and run.update.scale is not None and in_forward is None:
            return  # fp16 overflows are how its loss scale finds its size
        # a batch that is bad is no module's fault
        message, key = in_forward or self._find_in_backward(run, self.trace, failed)
        self._add_fault(run, message, key, in_forward is not None, failed)

    def _listen(self, show: Callable[..., None]) -> Callable[..., None]:
        def listen(message: Warning | str, *args: Any, **kwargs: Any) -> None:
            if self.active and str(message).startswith(WARNED):
                self.warned = str(message)
            else:
                show(message, *args, **kwargs)

        return listen

    def _recover(self, run: Run, error: Exception) -> bool:
        """A NaN: the step is made again, raising nothing and recording every operation."""
        if not self.active or self.trace is None:
            return False
        self.trace.forget()  # whichever recovery it is, the step is made again
        if RAISED.search(str(error)) is None:
            return False
        self.active, self.failed = False, error
        torch.autograd.set_detect_anomaly(True, check_nan=False)  # `around` restores it
        self.trace.operations_too = True
        return True

    def _find_in_backward(
        self, run: Run, trace: ModuleTrace, error: Exception | None
    ) -> tuple[str, str]:
        """The message about a step whose backward is not finite, and the key to count it by."""
        raised, origin = RAISED.search(str(error)), trace.origin()  # waits
        if origin is not None:
            operation, kind = origin[0].name, origin[1]
            text, module = origin[0].trace, _label(origin[0].module)
        elif raised is not None:  # each operation of the model got NaN or Inf already
            operation, kind, text, module = raised[1], "NaN", self.warned, "the loss"
        else:
            name = _bad_parameter(run)
            culprit = f"the gradient of {name}" if name else "the loss"
            return f"{culprit} is not finite, and backward made no NaN of it", culprit
        place = place_in_text(text)
        message = f"{operation} gave {kind} in backward, in {module}"
        if place is None:
            return message, operation
        line = line_at(place).short
        return f"{message}, {line}", f"{operation} at {line}"

    def _find_in_forward(self, run: Run, trace: ModuleTrace) -> tuple[str, str] | None:
        """The same of a batch or an output of forward that is not finite; None for neither."""
        name, bad = "input", trace.bad_input()  # waits
        culprit = None if bad is not None else trace.first_bad_output()  # waits
        if bad is None and culprit is None:
            name, bad = "target", bad_samples(run.train.at(run.progress.step)[1])
        if bad is not None:
            return f"the {name} is not finite: {bad[0]:,} of {bad[1]:,} samples", f"bad {name}"
        key = f"{_label(culprit[0])} in forward" if culprit else ""
        return (f"{culprit[1]} first from {key}", key) if culprit else None

    def _add_fault(
        self, run: Run, message: str, key: str, in_forward: bool, error: Exception | None
    ) -> None:
        step = run.progress.step + 1
        self.culprits[key] += 1
        (worst, times), others = self.culprits.most_common(1)[0], len(self.culprits) - 1
        self.finding = f"{times} × {worst}" + (f", {others} others" if others else "")
        ends = self.raises and (run.update.scale is None or in_forward)
        if run.update.scale:
            message += f", at a loss scale of {run.update.scale.value.item():g}"  # waits
        run.history.explained.add(step)
        run.history.add(
            "anomaly",
            message,
            step=step,
            category="numerics",
            severity="error" if ends else "warning",
            action="the run ends" if ends else "skipped" if run.update.guard else "",
            error=error,
            say=not ends and step not in run.history.causes,  # else that was said of its batch
        )
        if ends:
            raise GaveUp(f"step {step}: {message} (debug.on_anomaly=raise)") from None

    def cost(self, run: Run) -> Cost | None:
        """Its findings, and how many times a step one of its steps takes."""
        times, self.seconds = self._slowdown(run)
        finding = self.finding or "no NaN or Inf" if self.looks else "no step was looked at"
        finding += "; every step" if self.every == 1 else f"; every {self.every} steps"
        if run.whole is not None or (run.compilation is not None and run.compilation.mode):
            finding += ", uncompiled"
        if times:
            finding += f"; such a step takes {times:.1f} times as long"
        return Cost(self.name, self.looks, self.seconds, finding)

    def _slowdown(self, run: Run) -> tuple[float, float]:
        """Its steps against the others, and the seconds it took in all; 0 where none can be told.

        Steps at which other tools looked too are left out.
        """
        alone: list[float] = []
        others: list[float] = []
        laps = run.watch.laps()
        for step, seconds in enumerate(laps.tolist(), self.first + run.watch.count - len(laps) + 1):
            if step > self.first + SETTLING and step not in self.shared:
                (alone if step % self.every == 0 else others).append(seconds)
        if not alone or not others:
            return 0.0, 0.0
        usual, more = median(others), median(alone) - median(others)
        return max(1.0, 1 + more / usual), max(0.0, more * self.looks)


def _label(name: str) -> str:
    return name or "the model itself"


def _bad_parameter(run: Run) -> str | None:
    """The parameter next to the loss whose gradient is not finite; waits for each."""
    for name, parameter in reversed(list(run.model.named_parameters())):
        if parameter.grad is not None and not math.isfinite(peak([parameter.grad]).item()):
            return name
    return None
