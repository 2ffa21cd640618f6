"""Looking for faults in a loop of the user's own: calls, their times, and values not finite.

>>> from runner import debugger, debug_operation
>>> with debugger.context("step"):
...     loss = debugger.check(model(inputs).mean(), "loss")
>>> print(debugger.summary())
"""

from __future__ import annotations

import functools
import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from runner.debug.sections import profile
from runner.device.memory import process_bytes
from runner.errors import RunnerError, UsageError
from runner.record.history import Fault, History
from runner.record.storage import replace_text

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from runner.debug.gradient_layers import GradientReport

__all__ = [
    "Debugger",
    "NotFinite",
    "OperationStats",
    "DebugSummary",
    "debug_operation",
    "debugger",
    "profile",
]

log = logging.getLogger("runner")

R = TypeVar("R")
MOST = 500  # operations of different names; others are counted under OTHERS
OTHERS = "(others)"
MIB = 2**20
HEADER = ("operation", "calls", "seconds", "mean, ms", "longest, ms", "failed", "not finite", "MiB")


class NotFinite(RunnerError):
    """An operation's output holds a NaN or an Inf."""


@dataclass
class OperationStats:
    """All calls of one name."""

    name: str
    calls: int = 0
    seconds: float = 0.0
    longest: float = 0.0
    failures: int = 0  # calls that raised
    not_finite: int = 0  # tensors with a NaN or an Inf in them
    memory: int = 0  # bytes that the process grew by, in all calls

    @property
    def mean(self) -> float:
        """Seconds a call."""
        return self.seconds / self.calls if self.calls else 0.0

    def cells(self) -> tuple[str, ...]:
        """The row of a table, as in `HEADER`."""
        times = f"{self.seconds:.3f}", f"{self.mean * 1e3:.3f}", f"{self.longest * 1e3:.3f}"
        counts = f"{self.failures:,}", f"{self.not_finite:,}", f"{self.memory / MIB:+.1f}"
        return self.name, f"{self.calls:,}", *times, *counts


@dataclass(frozen=True)
class DebugSummary:
    """Operations and faults; `print` shows them as a table."""

    operations: list[OperationStats]  # those with faults first, then the longest
    faults: list[Fault] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """All of it in plain values."""
        return {
            "operations": [asdict(o) | {"mean": o.mean} for o in self.operations],
            "faults": [asdict(fault) for fault in self.faults],
        }

    def __str__(self) -> str:
        from runner.library.memory import table_text

        faults = [f"{f.kind} ({f.count:,}×): {f.message}" for f in self.faults]
        return "\n".join([table_text(HEADER, [o.cells() for o in self.operations]), *faults])


class Debugger:
    """Keeps account of operations, from any thread; its memory is bounded."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.threads = threading.local()
        self.reset()

    def reset(self) -> None:
        """Forget everything so far."""
        with self.lock:
            self.operations: dict[str, OperationStats] = {}
            self.history = History(None)

    @contextmanager
    def context(self, name: str, *, memory: bool = True) -> Iterator[OperationStats]:
        """Time what happens inside, and record an exception.

        Names nest: `forward` inside `step` is counted as `step/forward`. `memory` is how much
        larger the process is at the end; reading it takes 10 µs in all.
        """
        stack = self._stack()
        stack.append(name)
        path = "/".join(stack)
        row, number, failed = self._row(path), self._number(), False
        before = process_bytes() if memory else 0
        start = perf_counter()
        try:
            yield row
        except Exception as error:
            failed = True
            self._record("exception", f"{path}: {type(error).__name__}: {error}", number, error)
            raise
        finally:
            seconds = perf_counter() - start
            stack.pop()
            with self.lock:
                row.calls += 1
                row.seconds += seconds
                row.longest = max(row.longest, seconds)
                row.memory += process_bytes() - before if memory else 0
                row.failures += failed

    def check(self, value: R, name: str = "value", *, on: str = "record") -> R:
        """Look for NaN and Inf in a tensor, a number or a nest of them, and return it unchanged.

        Each is recorded with its name, and with `on="raise"` raised as NotFinite. The host waits
        for an accelerator.
        """
        if on not in ("record", "raise"):
            raise UsageError(f"debugger.check: on must be 'record' or 'raise', got {on!r}")
        from runner.library.inference import count_non_finite

        path = "/".join((*self._stack(), name))
        _, lines = count_non_finite(value, path)
        if lines:
            row = self._row("/".join(self._stack()) or name)
            with self.lock:
                row.not_finite += len(lines)
            message = "; ".join(lines[:3])
            self._record("non_finite", message, self._number())
            if on == "raise":
                raise NotFinite(message)
        return value

    def operation(
        self, name: Any = None, /, *, check_finite: bool | str = True, memory: bool = False
    ) -> Any:
        """A decorator: each call is a `context` of that name, or of the function's own.

        With `check_finite` its output is looked at for NaN and Inf: recorded (True), raised
        ("raise") or left alone (False).
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
                with self.context(name or function.__name__, memory=memory):
                    result = function(*args, **kwargs)
                    return self.check(result, "output", on=on) if check_finite else result

            return wrapper

        return decorate

    def check_gradients(
        self, model: nn.Module, optimizer: Optimizer | None = None
    ) -> GradientReport:
        """Each layer's gradient as it is in `.grad` now: vanishing, exploding, missing, not finite.

        With the optimizer, parameters that it does not have are named too. Faults are recorded.
        """
        from runner.debug import gradient_layers as layers

        with self.context("check_gradients", memory=False) as row:
            report = layers.check_gradients(model, optimizer)
            for state, names in layers.names_by_state(report.layers).items():
                if state is layers.LayerState.NOT_FINITE:
                    row.not_finite += len(names)
                message = f"{'/'.join(self._stack())}: {state.value}: {layers.join_names(names)}"
                self._record(layers.FAULTS[state], message, self._number())
            return report

    def summary(self) -> DebugSummary:
        """Operations so far, those with faults first."""
        with self.lock:
            rows = [replace(row) for row in self.operations.values()]
            faults = list(self.history.faults.values())
        rows.sort(key=lambda row: (-(row.failures + row.not_finite), -row.seconds))
        return DebugSummary(rows, faults)

    def export(self, path: str | Path) -> Path:
        """Write the summary as JSON; raises UsageError where that is not possible."""
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(path, json.dumps(self.summary().as_dict(), indent=2) + "\n")
        except OSError as error:
            raise UsageError(f"debugger.export: {path} cannot be written: {error}") from error
        return path

    def _row(self, path: str) -> OperationStats:
        with self.lock:
            known = path in self.operations or len(self.operations) < MOST
            path = path if known else OTHERS
            return self.operations.setdefault(path, OperationStats(path))

    def _stack(self) -> list[str]:
        """The contexts that this thread is in."""
        stack: list[str] = self.threads.__dict__.setdefault("stack", [])
        return stack

    def _number(self) -> int:
        """Which call of the outermost context this is: usually the step."""
        stack = self._stack()
        return self._row(stack[0]).calls + 1 if stack else 0

    def _record(self, kind: str, message: str, number: int, error: Exception | None = None) -> None:
        category, severity = ("code", "error") if error else ("numerics", "warning")
        with self.lock:
            fault = self.history.add(
                kind,
                message,
                step=number,
                category=category,
                severity=severity,
                error=error,
                say=False,
            )
        if fault.count == 1 and error is None:  # an exception is shown by Python
            log.warning("%s", message)


debugger = Debugger()
"""One for the whole program; `Debugger()` makes another."""
debug_operation = debugger.operation
