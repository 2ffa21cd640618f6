"""Debug a user's training loop: time operations, detect non-finite values, record exceptions.

>>> from runner import debugger, debug_operation
>>> with debugger.context("step"):
...     loss = debugger.check(model(inputs).mean(), "loss")
>>> print(debugger.summary())
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

from runner.core.errors import RunnerError, UsageError
from runner.core.format import join_names
from runner.core.record.history import Fault, History
from runner.diagnose.debug.sections import SectionTotal, SectionTotals, profile

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from runner.diagnose.debug.gradient_layers import GradientReport

__all__ = ["DebugSummary", "Debugger", "NotFinite", "debug_operation", "debugger", "profile"]

log = logging.getLogger("runner")

T = TypeVar("T")


class NotFinite(RunnerError):
    """An operation's output contains NaN or Inf."""


@dataclass(frozen=True)
class DebugSummary:
    """Operations and faults; `print` shows a table."""

    operations: list[SectionTotal]  # name, calls, seconds; slowest first
    faults: list[Fault]

    def __str__(self) -> str:
        from runner.diagnose.memory import table_text

        rows = [
            (row.name, f"{row.calls:,}", f"{row.seconds:.3f}", f"{row.mean * 1e3:.3f}")
            for row in self.operations
        ]
        faults = [f"{f.kind} ({f.count:,}×): {f.message}" for f in self.faults]
        return "\n".join([table_text([("operation", "calls", "s", "ms a call"), *rows]), *faults])


class Debugger:
    """Counts operations and faults; thread-safe, with bounded memory."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.reset()

    def __repr__(self) -> str:
        return f"<Debugger: {len(self.totals.rows)} operations, {len(self.history.faults)} faults>"

    def reset(self) -> None:
        """Discard all counts and faults."""
        self.totals, self.history = SectionTotals(), History(None)

    @contextmanager
    def context(self, name: str) -> Iterator[None]:
        """Time what happens inside, and record an exception.

        Names nest: `forward` inside `step` is counted as `step/forward`.
        """
        path = self._path(name)
        self.totals.enter(path, "")
        try:
            yield
        except Exception as error:
            self._record_fault("exception", f"{path}: {type(error).__name__}: {error}", error)
            raise
        finally:
            self.totals.leave()

    def trace(self, folder: str | os.PathLike[str]) -> AbstractContextManager[None]:
        """Profile what runs inside with torch.profiler, and write two files into `folder`.

        trace.json, for ui.perfetto.dev, has the operators, a range for each call of a module and
        for each `context`; profile.md their times in all: operators, and forward and backward by
        module. Use it around a few steps. Raises UsageError if `folder` is a file or a link, or if
        another profiler is active; StorageError.
        """
        from runner.diagnose.debug.loop_trace import trace_loop

        return trace_loop(folder, self.totals)

    def check(self, value: T, name: str = "value", *, on: str = "record") -> T:
        """Check a tensor, a number or a nest of them for NaN and Inf, and return it unchanged.

        Findings are recorded under `name`; `on="raise"` also raises NotFinite. The host waits for
        an accelerator.
        """
        if on not in ("record", "raise"):
            raise UsageError(f"debugger.check: on must be 'record' or 'raise', got {on!r}")
        label: Any = name
        if not isinstance(label, str):
            got = f"got a {type(label).__name__}; write check(value, name)"
            raise UsageError(f"debugger.check: name must be a string, {got}")
        from runner.loops.inference import count_non_finite

        if lines := count_non_finite(value, self._path(name))[1]:
            message = "; ".join(lines[:3])
            self._record_fault("non_finite", message)
            if on == "raise":
                raise NotFinite(message)
        return value

    def operation(self, name: Any = None, /, *, check_finite: bool | str = True) -> Any:
        """Decorator that runs each call in a `context` of the given name or the function's.

        `check_finite` checks the output for NaN and Inf: record (True), raise ("raise"), or skip
        (False).
        """
        if callable(name):
            return self.operation()(name)
        if check_finite not in (True, False, "raise"):
            raise UsageError(
                f"debug_operation: check_finite must be True, False or 'raise', got {check_finite}"
            )
        on = "raise" if check_finite == "raise" else "record"

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                with self.context(name or function.__name__):
                    result = function(*args, **kwargs)
                    return self.check(result, "output", on=on) if check_finite else result

            return wrapper

        return decorate

    def check_gradients(
        self, model: nn.Module, optimizer: Optimizer | None = None
    ) -> GradientReport:
        """Check each layer's current `.grad`, and record faults.

        With `optimizer`, parameters that it does not contain are reported too.
        """
        from runner.diagnose.debug import gradient_layers as layers

        if not hasattr(model, "named_parameters"):
            problem = f"model must be a torch.nn.Module, got a {type(model).__name__}"
            raise UsageError(f"debugger.check_gradients: {problem}")
        report = layers.check_gradients(model, optimizer)
        for state, names in layers.names_by_state(report.layers).items():
            message = f"{self._path('gradients')}: {state}: {join_names(names)}"
            self._record_fault(layers.FAULTS[state], message)
        return report

    def summary(self) -> DebugSummary:
        """Return operations and faults so far."""
        with self.lock:
            return DebugSummary(self.totals.by_time(), list(self.history.faults.values()))

    def _path(self, name: str) -> str:
        """Return the name below those of the current thread's contexts."""
        return "/".join([*self.totals.open_names()[-1:], name])

    def _record_fault(self, kind: str, message: str, error: Exception | None = None) -> None:
        """Record a fault; its step is the call number of the outermost context."""
        category, severity = ("code", "error") if error else ("numerics", "warning")
        with self.lock:
            outermost = self.totals.rows.get((next(iter(self.totals.open_names()), ""), ""))
            step = 1 + (outermost.calls if outermost else 0)
            kinds: Any = {"category": category, "severity": severity}
            fault = self.history.add(kind, message, step=step, error=error, say=False, **kinds)
        if fault.count == 1 and error is None:  # an exception is shown by Python
            log.warning("%s", message)


debugger = Debugger()
"""The program's shared instance."""
debug_operation = debugger.operation
