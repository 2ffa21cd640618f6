"""Autograd's anomaly mode: the operation, the line and the module that made a gradient NaN."""

from __future__ import annotations

import logging
import math
import os
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

import runner
from runner.batch import call, count, rows
from runner.debug.anomaly.trail import Trail, peak
from runner.debug.config import DebugConfig
from runner.debug.tool import Tool
from runner.errors import GaveUp
from runner.hook import Cost, Step
from runner.run import Run
from runner.stopwatch import SETTLING

log = logging.getLogger("runner")

RAISED = re.compile(r"Function '(\w+)' returned nan values in its \d+th output")
WARNED = "Error detected in "
FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+), in .+\n(?:    (?P<code>.+)\n?)?')
TORCH = str(Path(torch.__file__).parent) + os.sep
LOOP = tuple(str(Path(runner.__file__).with_name(name)) for name in ("batch.py", "loop.py"))


@dataclass(frozen=True)
class Line:
    """A line of somebody's code."""

    file: str
    number: int
    code: str

    def __str__(self) -> str:
        path = Path(self.file)
        near = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        return f"{near}:{self.number} `{self.code}`" if self.code else f"{near}:{self.number}"


def line_of(trace: str) -> Line | None:
    """The innermost line that is not torch's own in a trace as Python prints it.

    None where the loop itself calls torch, as with a model that is one nn.Sequential.
    """
    found = [match for match in FRAME.finditer(trace) if not match["file"].startswith(TORCH)]
    if not found or found[-1]["file"].startswith(LOOP):
        return None
    return Line(found[-1]["file"], int(found[-1]["line"]), found[-1]["code"] or "")


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
        self.steps: list[int] = []  # those looked at
        self.added: float | None = None  # seconds a step, where all steps are looked at

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
                if self.every == 1 and self.steps:
                    self.added = _added(run, self.trail)
        finally:
            run.recoveries.remove(self._recover)

    def around(self, run: Run) -> AbstractContextManager[None]:
        """Anomaly mode, and hooks on every module."""
        return self._around(run)

    @contextmanager
    def _around(self, run: Run) -> Iterator[None]:
        self.looks += 1
        self.steps.append(run.progress.step + 1)
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
        if failed is not None or run.update.scale is None or self.trail.culprit():
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
        if not self.active or self.trail is None or RAISED.search(str(error)) is None:
            return False
        self.active, self.failed = False, error
        self.module = self.trail.module()
        torch.autograd.set_detect_anomaly(True, check_nan=False)  # `_around` puts back what was
        self.trail.digging = True
        self.trail.operations.clear()
        return True

    def _told(self, run: Run, trail: Trail, error: Exception | None) -> tuple[str, str]:
        """What there is to say of a step that is not finite, and by what to count it."""
        found = RAISED.search(str(error))
        origin, culprit = trail.origin(), trail.culprit()  # waits
        said = key = ""
        if culprit is not None:
            key = f"{_module(culprit[0])} in forward"
            said = f"{culprit[1]} first from {key}"
        if origin is not None and culprit is None:
            operation, kind = origin[0].name, origin[1]
            trace, module = origin[0].trace, origin[0].module
        elif found is not None:
            operation, kind, trace, module = found[1], "NaN", self.warned, self.module
        elif culprit is not None:
            return said, key
        else:
            key = f"the gradient of {name}" if (name := _not_finite(run)) else "the loss"
            return f"{key} is not finite, and backward made no NaN of it", key
        line = line_of(trace)
        what = f"{operation} gave {kind} in backward, in {_module(module)}"
        what += f", {line}" if line is not None else ""
        if culprit is not None:
            return f"{said}; then {what}", key
        return what, f"{operation} at {line}" if line is not None else operation

    def _note(self, run: Run, said: str, key: str, error: Exception | None = None) -> None:
        step = run.progress.step + 1
        self.culprits[key] += 1
        (worst, times), others = self.culprits.most_common(1)[0], len(self.culprits) - 1
        self.finding = f"{times} × {worst}" + (f", {others} others" if others else "")
        # fp16 overflows are how its loss scale finds its size: they are no reason to end
        ends = self.raises and (run.update.scale is None or " in forward" in key)
        if run.update.scale:
            said += f", at a loss scale of {run.update.scale.value.item():g}"  # waits
        action = "the run ends" if ends else "skipped" if run.update.guard else ""
        run.history.add(
            "anomaly", said, step=step, category="numerics",
            severity="error" if ends else "warning", action=action, error=error, say=not ends,
        )  # fmt: skip
        if ends:
            raise GaveUp(f"step {step}: {said} (debug.on_anomaly=raise)") from None

    def cost(self, run: Run) -> Cost | None:
        """How many times a step one of its steps takes, and what it found."""
        times, self.seconds = self._slower(run)
        pace = "every step" if self.every == 1 else f"every {self.every} steps"
        compiled = run.whole is not None or (run.compilation is not None and run.compilation.mode)
        uncompiled = ", uncompiled" if compiled else ""
        said = f"{times:.1f} times a step, {pace}" if times else f"{pace}{uncompiled}"
        finding = "; ".join(filter(None, [said, self.finding]))
        return Cost(self.name, self.looks, self.seconds, finding)

    def _slower(self, run: Run) -> tuple[float, float]:
        """Its steps against the others, and the seconds it took in all; 0 where none can be told.

        Other tools that look at the same steps are in it.
        """
        seconds = run.watch.steps
        at = {step - self.first - 1 for step in self.steps}
        mine = [seconds[i] for i in at if SETTLING <= i < len(seconds)]
        others = [seconds[i] for i in range(SETTLING, len(seconds)) if i not in at]
        if not mine:
            return 0.0, 0.0
        usual = median(others) if others else median(mine) - (self.added or 0.0)
        if usual <= 0 or not (others or self.added):
            return 0.0, 0.0
        return median(mine) / usual, max(0.0, sum(mine) - len(mine) * usual)


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


def _added(run: Run, trail: Trail) -> float | None:
    """Seconds that the mode adds to a step, where no step was made without: six are rehearsed.

    Once training is over; no update is made, and buffers go back.
    """
    batch = rows(run.train.peek(), slice(run.micro_batch))
    spent: dict[bool, list[float]] = {True: [], False: []}
    try:
        for watched in (True, False) * 3:
            with ExitStack() as stack:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                if watched:
                    stack.enter_context(trail.followed())
                    stack.enter_context(torch.autograd.set_detect_anomaly(True))
                for context in run.contexts:
                    stack.enter_context(context())
                run.update.begin()
                run.device.synchronize()
                start = time.perf_counter()
                run.objective(call(run.forward, batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
                run.device.synchronize()
                spent[watched].append(time.perf_counter() - start)
            run.update.abandon()
    except RuntimeError as error:  # a model that makes NaN of this batch too
        log.debug("anomaly mode is not timed: %s", error)
        return None
    finally:
        run.update.abandon()
    parts = -(-count(run.train.peek()[1]) // run.micro_batch)
    return max(0.0, min(spent[True]) - min(spent[False])) * parts
