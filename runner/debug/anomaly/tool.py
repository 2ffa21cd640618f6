"""Autograd's anomaly mode: the operation, the line and the module that made a gradient NaN."""

from __future__ import annotations

import logging
import math
import re
import warnings
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from statistics import median
from typing import Any

import torch

from runner.debug.anomaly.added import added
from runner.debug.anomaly.lines import line_of
from runner.debug.anomaly.trail import Trail, bad_samples, peak
from runner.debug.config import DebugConfig
from runner.debug.tool import Tool
from runner.errors import GaveUp
from runner.hook import Cost, Step
from runner.run import Run
from runner.stopwatch import SETTLING

log = logging.getLogger("runner")

RAISED = re.compile(r"Function '(\w+)' returned nan values in its \d+th output")
WARNED = "Error detected in "


class Anomaly(Tool):
    """Steps in anomaly mode; a NaN in backward is named, and by policy recorded or the end.

    The step is made again, this time with an account of each operation's gradients, and where a
    NaN is only recorded, the guard skips it as it would any other. The steps run uncompiled.
    Autograd itself reads every gradient in this mode: an accelerator waits at each operation.
    """

    name = "anomaly"
    eager = True

    def __init__(self, config: DebugConfig) -> None:
        super().__init__(config, config.anomaly.every or 1)
        self.raises = config.on_anomaly.name == "raise"
        self.trail: Trail | None = None
        self.active = False
        self.warned = ""  # what autograd said last of where a failed operation was called
        self.failed: Exception | None = None  # what the step in hand raised at first …
        self.module: str | None = None  # … and the module whose backward was under way
        self.culprits: Counter[str] = Counter()
        self.suspicious = False  # the last step looked at was not finite
        self.first = 0  # step before the first of this process
        self.steps = array("q")  # those looked at; 8 bytes a step
        self.shared = array("q")  # those of them that other tools looked at too
        self.added: tuple[float, float] | None = None  # to so much, where steps do not tell

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Listen to what autograd says, and be asked when a step fails."""
        self.trail = Trail(run.model)
        self.first = run.progress.step
        run.recoveries.insert(0, self._recover)
        try:
            with warnings.catch_warnings():  # once a run: entering it makes Python repeat warnings
                warnings.filterwarnings("always", message=WARNED)
                warnings.showwarning = self._listen(warnings.showwarning)
                yield
                if self.steps and not self._comparable(run):
                    self.active = True  # a batch of NaN is no news here
                    self.added = added(run, self.trail)
        finally:
            self.active = False
            run.recoveries.remove(self._recover)

    def around(self, run: Run) -> AbstractContextManager[None]:
        """Anomaly mode, and hooks on every module."""
        return self._around(run)

    @contextmanager
    def _around(self, run: Run) -> Iterator[None]:
        self.looks += 1
        step = run.progress.step + 1
        self.steps.append(step)
        if any(isinstance(h, Tool) and h is not self and h.due(step) for h in run.hooks):
            self.shared.append(step)
        self.warned, self.failed = "", None
        trail = self.trail or Trail(run.model)
        with trail.followed(), torch.autograd.set_detect_anomaly(True):
            trail.digging = self.suspicious  # an Inf alone raises nothing: the next one is found
            self.active = True
            try:
                yield
            finally:
                self.active = False

    def on_gradients(self, run: Run, step: Step) -> None:
        """Say what was found, also of an Inf of which backward made no NaN."""
        failed, self.failed = self.failed, None
        finite = math.isfinite(step.grad_norm.item())  # waits, as autograd has all along
        self.suspicious = not finite
        if self.trail is None or (finite and failed is None):
            return
        bad = self.trail.bad_input() is not None or self.trail.culprit() is not None
        if failed is not None or run.update.scale is None or bad:
            self._note(run, *self._told(run, self.trail, failed), failed)

    def _listen(self, show: Callable[..., None]) -> Callable[..., None]:
        def listen(message: Warning | str, *args: Any, **kwargs: Any) -> None:
            if self.active and str(message).startswith(WARNED):
                self.warned = str(message)
            else:
                show(message, *args, **kwargs)

        return listen

    def _recover(self, run: Run, error: Exception) -> bool:
        """A NaN: the step is worth another try, in which nothing is raised but all looked at."""
        if not self.active or self.trail is None:
            return False
        self.trail.inputs.clear()  # whoever takes care of it, the step is made again
        self.trail.outputs.clear()
        if RAISED.search(str(error)) is None:
            return False
        self.active, self.failed = False, error
        self.module = self.trail.module()
        torch.autograd.set_detect_anomaly(True, check_nan=False)  # `_around` puts back what was
        self.trail.digging = True
        self.trail.operations.clear()
        return True

    def _told(self, run: Run, trail: Trail, error: Exception | None) -> tuple[str, str]:
        """What there is to say of a step that is not finite, and by what to count it."""
        key = self._in_forward(run, trail)  # a batch that is bad is no module's fault
        if key:
            return key
        found, origin = RAISED.search(str(error)), trail.origin()  # waits
        if origin is not None:
            operation, kind = origin[0].name, origin[1]
            trace, module = origin[0].trace, origin[0].module
        elif found is not None:
            operation, kind, trace, module = found[1], "NaN", self.warned, self.module
        else:
            what = f"the gradient of {name}" if (name := _not_finite(run)) else "the loss"
            return f"{what} is not finite, and backward made no NaN of it", what
        line = line_of(trace)
        said = f"{operation} gave {kind} in backward, in {_module(module)}"
        if line is None:
            return said, operation
        return f"{said}, {line}", f"{operation} at {line}"

    def _in_forward(self, run: Run, trail: Trail) -> tuple[str, str] | None:
        """The same of a batch or an output of forward that is not finite; None for neither."""
        name, bad = "input", trail.bad_input()  # waits
        culprit = None if bad is not None else trail.culprit()  # waits
        if bad is None and culprit is None:
            name, bad = "target", bad_samples(run.train.at(run.progress.step)[1])
        if bad is not None:
            few, many = bad
            return f"the {name} is not finite: {few:,} of {many:,} samples", f"bad {name}"
        if culprit is None:
            return None
        key = f"{_module(culprit[0])} in forward"
        return f"{culprit[1]} first from {key}", key

    def _note(self, run: Run, said: str, key: str, error: Exception | None = None) -> None:
        step = run.progress.step + 1
        self.culprits[key] += 1
        (worst, times), others = self.culprits.most_common(1)[0], len(self.culprits) - 1
        self.finding = f"{times} × {worst}" + (f", {others} others" if others else "")
        # fp16 overflows are how its loss scale finds its size: they are no reason to end
        here = " in forward" in key or key.startswith("bad ")
        ends = self.raises and (run.update.scale is None or here)
        if run.update.scale:
            said += f", at a loss scale of {run.update.scale.value.item():g}"  # waits
        run.history.told.add(step)
        action = "the run ends" if ends else "skipped" if run.update.guard else ""
        run.history.add(
            "anomaly", said, step=step, category="numerics",
            severity="error" if ends else "warning", action=action, error=error,
            say=not ends and step not in run.history.causes,  # else that was said of its batch
        )  # fmt: skip
        if ends:
            raise GaveUp(f"step {step}: {said} (debug.on_anomaly=raise)") from None

    def cost(self, run: Run) -> Cost | None:
        """How many times a step one of its steps takes, and what it found."""
        times, self.seconds = self._slower(run)
        pace = "every step" if self.every == 1 else f"every {self.every} steps"
        compiled = run.whole is not None or (run.compilation is not None and run.compilation.mode)
        uncompiled = ", uncompiled" if compiled else ""
        cost = f"such a step takes {times:.1f} times as long" if times else ""
        finding = self.finding or "no NaN or Inf" if self.looks else "no step was looked at"
        finding = "; ".join(filter(None, [finding, f"{pace}{uncompiled}", cost]))
        return Cost(self.name, self.looks, self.seconds, finding)

    def _comparable(self, run: Run) -> bool:
        """Whether the run has steps that are the tool's alone, and others to hold against them."""
        alone, others = self._times(run)
        return bool(alone and others)

    def _times(self, run: Run) -> tuple[list[float], list[float]]:
        """Seconds of the steps that only this tool looked at, and of those that it did not."""
        seconds = run.watch.steps
        mine = {step - self.first - 1 for step in self.steps}
        alone = sorted(mine - {step - self.first - 1 for step in self.shared})
        return (
            [seconds[i] for i in alone if SETTLING <= i < len(seconds)],
            [seconds[i] for i in range(SETTLING, len(seconds)) if i not in mine],
        )

    def _slower(self, run: Run) -> tuple[float, float]:
        """Its steps against the others, and the seconds it took in all; 0 where none can be told.

        What other tools took at the same steps is not in it.
        """
        alone, others = self._times(run)
        if alone and others:
            usual, more = median(others), median(alone) - median(others)
        elif self.added is not None and (alone or others):
            least, more = self.added
            usual = median(others) if others else max(least, median(alone) - more)
        else:
            return 0.0, 0.0
        return max(1.0, 1 + more / usual), max(0.0, more * len(self.steps))


def _module(name: str | None) -> str:
    if name is None:
        return "the loss"
    return name or "the model itself"


def _not_finite(run: Run) -> str | None:
    """The parameter next to the loss whose gradient is not finite; waits for each."""
    for name, parameter in reversed(list(run.model.named_parameters())):
        if parameter.grad is not None and not math.isfinite(peak([parameter.grad]).item()):
            return name
    return None
