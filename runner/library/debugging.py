"""Looking for faults in a loop of one's own: calls, their times, and what was not finite.

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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from runner.debug.sections import profile
from runner.device.memory import process_bytes
from runner.errors import RunnerError, UsageError
from runner.record import markdown
from runner.record.history import Fault, History
from runner.record.storage import replace_text

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from runner.debug.gradient_layers import GradientReport

__all__ = [
    "Debugger",
    "NotFinite",
    "Operation",
    "Summary",
    "debug",
    "debug_operation",
    "debugger",
    "profile",
]

log = logging.getLogger("runner")

P = ParamSpec("P")
R = TypeVar("R")
MOST = 500  # operations of different names; what comes after is counted under OTHERS
OTHERS = "(others)"
ON = ("record", "raise")


class NotFinite(RunnerError):
    """An operation's output holds a NaN or an Inf."""


class Debugger:
    """Keeps account of operations, from any thread; what it keeps is bounded."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.threads = threading.local()
        self.reset()

    def reset(self) -> None:
        """Forget everything so far."""
        with self.lock:
            self.operations: dict[str, Operation] = {}
            self.history = History(None)

    @contextmanager
    def context(
        self, name: str, *, memory: bool = True, catch: bool = False
    ) -> Iterator[Operation]:
        """Time what happens inside, and record an exception; with `catch` it ends there.

        Names nest: `forward` inside `step` is counted as `step/forward`. `memory` is how much
        larger the process is at the end; reading it takes 10 µs in all.
        """
        stack = self._stack()
        path = "/".join((*stack, name))
        stack.append(name)
        held = process_bytes() if memory else 0
        row, number = self._row(path), self._number()
        failed: Exception | None = None
        start = perf_counter()
        try:
            yield row
        except Exception as error:
            failed = error
            if not catch:
                raise
        finally:
            took = perf_counter() - start
            stack.pop()
            grown = process_bytes() - held if memory else 0
            with self.lock:
                row.calls += 1
                row.seconds += took
                row.longest = max(row.longest, took)
                row.memory += grown
                row.failures += failed is not None
            if failed is not None:
                said = f"{path}: {type(failed).__name__}: {failed}"
                self._record("exception", said, number, "went on" if catch else "raised", failed)

    def check(self, value: R, name: str = "value", *, on: str = "record") -> R:
        """Look for NaN and Inf in a tensor, or a nest of them, and hand it back as it came.

        What is found is recorded with the name, and with `on="raise"` raised as NotFinite. The
        host reads one flag a tensor, and waits for it on an accelerator.
        """
        if on not in ON:
            raise UsageError(f"debugger.check: on={on!r}; use one of {', '.join(ON)}")
        path = "/".join((*self._stack(), name))
        bad = [said for said in _not_finite(value)]
        if bad:
            row = self._row("/".join(self._stack()) or name)
            with self.lock:
                row.not_finite += len(bad)
            message = f"{path}: {'; '.join(bad[:3])}"
            self._record("non_finite", message, self._number(), "raised" if on == "raise" else "")
            if on == "raise":
                raise NotFinite(message)
        return value

    @overload
    def operation(self, function: Callable[P, R], /) -> Callable[P, R]: ...

    @overload
    def operation(
        self, name: str | None = None, /, *, check_finite: bool | str = True, memory: bool = False
    ) -> Callable[[Callable[P, R]], Callable[P, R]]: ...

    def operation(
        self, name: Any = None, /, *, check_finite: bool | str = True, memory: bool = False
    ) -> Any:
        """A decorator: each call is a `context` of that name, or of the function's own.

        With `check_finite` its output is looked at for NaN and Inf: recorded (True), raised
        ("raise") or left alone (False).
        """
        if callable(name):
            return self.operation()(name)
        if check_finite not in (True, False, *ON):
            raise UsageError(
                f"debug_operation: check_finite={check_finite!r}; use True, False or 'raise'"
            )
        on = "raise" if check_finite == "raise" else "record"

        def decorate(function: Callable[P, R]) -> Callable[P, R]:
            called = name or function.__name__

            @functools.wraps(function)
            def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
                with self.context(called, memory=memory):
                    result = function(*args, **kwargs)
                    return self.check(result, "output", on=on) if check_finite else result

            return wrapper

        return decorate

    def check_gradients(
        self, model: nn.Module, optimizer: Optimizer | None = None
    ) -> GradientReport:
        """Each layer's gradient as it is in `.grad` now: vanishing, exploding, missing, not finite.

        With the optimizer, those that it does not have are named too. What is amiss is recorded.
        """
        from runner.debug.gradient_layers import (
            FAULTS,
            State,
            check_gradients,
            join_names,
            names_by_state,
        )

        with self.context("check_gradients", memory=False) as row:
            report = check_gradients(model, optimizer)
            for state, names in names_by_state(report.layers).items():
                if state is State.NOT_FINITE:
                    with self.lock:
                        row.not_finite += len(names)
                path = "/".join(self._stack())
                message = f"{path}: {state.value}: {join_names(names)}"
                self._record(FAULTS[state], message, self._number(), "")
            return report

    def summary(self) -> Summary:
        """What there was so far, those with faults first."""
        with self.lock:
            rows = [Operation(**asdict(row)) for row in self.operations.values()]
            faults = list(self.history.faults.values())
        rows.sort(key=lambda row: (-(row.failures + row.not_finite), -row.seconds))
        return Summary(rows, faults)

    def export(self, path: str | Path) -> Path:
        """Write the summary as JSON; raises UsageError where that is not possible."""
        path = Path(path)
        text = json.dumps(self.summary().as_dict(), indent=2) + "\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(path, text)
        except OSError as error:
            raise UsageError(f"debugger.export: {path} cannot be written: {error}") from error
        return path

    def _row(self, path: str) -> Operation:
        with self.lock:
            row = self.operations.get(path)
            if row is None:
                if len(self.operations) >= MOST:
                    path = OTHERS
                row = self.operations.setdefault(path, Operation(path))
            return row

    def _stack(self) -> list[str]:
        """The contexts that this thread is in."""
        if not hasattr(self.threads, "stack"):
            self.threads.stack = []
        stack: list[str] = self.threads.stack
        return stack

    def _number(self) -> int:
        """Which call of the outermost context this is: the step, where that is what it is."""
        stack = self._stack()
        with self.lock:
            row = self.operations.get(stack[0]) if stack else None
            return row.calls + 1 if row is not None else 0

    def _record(
        self, kind: str, message: str, number: int, action: str, error: Exception | None = None
    ) -> None:
        with self.lock:
            fault = self.history.add(
                kind,
                message,
                step=number,
                category="code" if error is not None else "numerics",
                severity="error" if error is not None else "warning",
                action=action,
                error=error,
                say=False,
            )
        if fault.count == 1 and error is None:  # an exception speaks for itself
            log.warning("%s", message)


def _not_finite(value: Any, where: str = "") -> Iterator[str]:
    """In words, each tensor of a nest that holds a NaN or an Inf."""
    import torch

    if isinstance(value, torch.Tensor):
        if value.is_floating_point() or value.is_complex():
            held = value.detach()
            held = held.coalesce().values() if held.is_sparse else held
            bad = ~torch.isfinite(held)
            if bad.any():  # waits for the device
                nans, many = int(torch.isnan(held).sum()), int(bad.sum())  # waits: it is bad anyway
                shape = "×".join(map(str, value.shape)) or "scalar"
                yield (
                    f"{where or 'tensor'} ({shape}): {nans:,} NaN, {many - nans:,} Inf "
                    f"of {held.numel():,}"
                )
    elif isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            yield f"{where or 'number'}: {value}"
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _not_finite(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _not_finite(item, f"{where}[{i}]")


debugger = debug = Debugger()
"""One for the whole program; `Debugger()` makes another."""
debug_operation = debugger.operation


MIB = 2**20


@dataclass
class Operation:
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


@dataclass(frozen=True)
class Summary:
    """What was called and what went wrong; `print` shows it as a table."""

    operations: list[Operation]  # those with faults first, then the longest
    faults: list[Fault] = field(default_factory=list)

    @property
    def worst(self) -> Operation | None:
        """The one to look at first: with the most faults, else the one that took longest."""
        return self.operations[0] if self.operations else None

    def as_dict(self) -> dict[str, Any]:
        """All of it in plain values."""
        return {
            "operations": [asdict(o) | {"mean": o.mean} for o in self.operations],
            "faults": [asdict(fault) for fault in self.faults],
        }

    def markdown(self) -> str:
        """Two tables."""
        rows = [_cells(operation) for operation in self.operations]
        text = markdown.table(HEADER, rows)
        if self.faults:
            found = [(f.kind, f"{f.count:,}", f.message) for f in self.faults]
            text += "\n\n" + markdown.table(("fault", "times", "what"), found)
        return text + "\n"

    def __str__(self) -> str:
        rows = [HEADER, *(_cells(operation) for operation in self.operations)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
        lines = [
            "  ".join(
                cell.rjust(width) if i else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        lines += [f"{f.kind} ({f.count:,}×): {f.message}" for f in self.faults]
        return "\n".join(lines)


HEADER = ("operation", "calls", "seconds", "mean, ms", "longest, ms", "failed", "not finite", "MiB")


def _cells(operation: Operation) -> tuple[str, ...]:
    return (
        operation.name,
        f"{operation.calls:,}",
        f"{operation.seconds:.3f}",
        f"{operation.mean * 1e3:.3f}",
        f"{operation.longest * 1e3:.3f}",
        f"{operation.failures:,}",
        f"{operation.not_finite:,}",
        f"{operation.memory / MIB:+.1f}",
    )
