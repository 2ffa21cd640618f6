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
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar, cast

from runner.core.device.memory import MemoryPeak, peak_memory
from runner.core.errors import RunnerError, StorageError, UsageError, error_text
from runner.core.format import join_names, size
from runner.core.record.history import Fault, History
from runner.core.record.storage import make_folder, write_json
from runner.diagnose.debug.sections import SectionTotal, SectionTotals, profile

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from runner.diagnose.debug.gradient_layers import GradientReport
    from runner.diagnose.memory import Memory

__all__ = [
    "DebugSummary", "Debugger", "NotFinite", "OperationTotal", "debug_operation", "debugger",
    "profile",
]  # fmt: skip

log = logging.getLogger("runner")

T = TypeVar("T")


class NotFinite(RunnerError):
    """An operation's output contains NaN or Inf."""


@dataclass
class OperationTotal(SectionTotal):
    """All calls of one operation."""

    longest: float = 0.0  # seconds of the longest call
    failures: int = 0  # calls that an exception ended
    not_finite: int = 0  # checks and backwards inside with NaN or Inf
    memory: int | None = None  # bytes above its start, in the largest call; None: not measured

    def cells(self) -> tuple[str, ...]:
        """Return a table row in the order of `HEADER`."""
        times = f"{self.seconds:.3f}", f"{self.mean * 1e3:.3f}", f"{self.longest * 1e3:.3f}"
        memory = "–" if self.memory is None else size(self.memory)
        counts = str(self.failures), str(self.not_finite)
        return self.name, f"{self.calls:,}", *times, *counts, memory


HEADER = ("operation", "calls", "s", "ms a call", "longest, ms", "failures", "not finite", "memory")


@dataclass(frozen=True)
class DebugSummary:
    """Operations and faults; `print` shows a table."""

    operations: list[OperationTotal]  # slowest first
    faults: list[Fault]

    def as_dict(self) -> dict[str, Any]:
        """Return operations and faults as plain values; times in seconds, memory in bytes."""
        operations = [asdict(row) | {"mean": row.mean} for row in self.operations]
        return {"operations": operations, "faults": [asdict(fault) for fault in self.faults]}

    def __str__(self) -> str:
        from runner.diagnose.memory import table_text

        faults = [f"{f.kind} ({f.count:,}×): {f.message}" for f in self.faults]
        return "\n".join([table_text([HEADER, *(r.cells() for r in self.operations)]), *faults])


class Debugger:
    """Counts operations and faults; thread-safe, with bounded memory."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.memory: Memory | None = None  # from the first context that measures it
        self.reset()

    def __repr__(self) -> str:
        return f"<Debugger: {len(self.totals.rows)} operations, {len(self.history.faults)} faults>"

    def reset(self) -> None:
        """Discard all counts and faults."""
        self.totals, self.history = SectionTotals(OperationTotal), History(None)

    @contextmanager
    def context(
        self, name: str, *, memory: bool = False, anomaly: bool = False, on: str = "record"
    ) -> Iterator[None]:
        """Time what happens inside, and record an exception.

        Names nest: `forward` inside `step` is counted as `step/forward`. With `memory` the peak of
        process and device above their start is measured (100 µs). With `anomaly` each backward
        inside is searched for NaN, and the operation, module and line that made it are recorded, or
        raised as NotFinite after that backward (`on="raise"`); this is slow, and waits for an
        accelerator at each operation.
        """
        _check_on("debugger.context", on)
        if not isinstance(name, str) or not all(type(x) is bool for x in (memory, anomaly)):
            problem = f"name must be a text, memory and anomaly True or False, got {name!r}"
            raise UsageError(f"debugger.context: {problem}, {memory!r}, {anomaly!r}")
        path, failed, peak = self._path(name), False, None
        if memory and self.memory is None:
            from runner.diagnose.memory import Memory

            self.memory = Memory()
        measured = peak_memory(self.memory.device) if memory and self.memory else nullcontext()
        self.totals.enter(path, "")
        try:
            with ExitStack() as scope:
                if anomaly:
                    from runner.diagnose.debug.backward_check import check_backwards

                    scope.enter_context(check_backwards(lambda text: self._report_nan(text, on)))
                peak = scope.enter_context(measured)
                yield
        except Exception as error:
            failed = True
            self._record_fault("exception", f"{path}: {error_text(error)}", error)
            raise
        finally:
            self._add_call(path, self.totals.leave(), failed, peak)

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
        _check_on("debugger.check", on)
        label: Any = name
        if not isinstance(label, str):
            got = f"got a {type(label).__name__}; write check(value, name)"
            raise UsageError(f"debugger.check: name must be a string, {got}")
        from runner.loops.inference import count_non_finite

        if lines := count_non_finite(value, self._path(name))[1]:
            message = "; ".join(lines[:3])
            self._count_not_finite(len(lines))
            self._record_fault("non_finite", message)
            if on == "raise":
                raise NotFinite(message)
        return value

    def operation(
        self,
        name: Any = None,
        /,
        *,
        check_finite: bool | str = True,
        memory: bool = False,
        anomaly: bool = False,
        on: str = "record",
    ) -> Any:
        """Decorator that runs each call in a `context` of the given name or the function's.

        `check_finite` checks the output for NaN and Inf: as `on` says (True), raise ("raise"), or
        skip (False). The other options are those of `context`.
        """
        if callable(name):
            return self.operation()(name)
        if check_finite not in (True, False, "raise"):
            problem = f"must be True, False or 'raise', got {check_finite!r}"
            raise UsageError(f"debug_operation: check_finite {problem}")
        _check_on("debug_operation", on)
        output_on = "raise" if check_finite == "raise" else on
        options: Any = {"memory": memory, "anomaly": anomaly, "on": on}

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                with self.context(name or function.__name__, **options):
                    result = function(*args, **kwargs)
                    return self.check(result, "output", on=output_on) if check_finite else result

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
            if state is layers.LayerState.NOT_FINITE:
                self._count_not_finite(len(names))
            message = f"{self._path('gradients')}: {state}: {join_names(names)}"
            self._record_fault(layers.FAULTS[state], message)
        return report

    def summary(self) -> DebugSummary:
        """Return operations and faults so far."""
        with self.lock:
            rows = [replace(cast(OperationTotal, row)) for row in self.totals.by_time()]
            return DebugSummary(rows, list(self.history.faults.values()))

    def export(self, path: str | Path) -> Path:
        """Write the summary as JSON, create missing folders, and return the path.

        Raises UsageError for a folder, a link, or a name that does not end in `.json`.
        """
        if not isinstance(path, str | os.PathLike):
            raise UsageError(f"debugger.export: path must be a path, got {path!r}")
        path = Path(path)
        problem = "is a folder" if path.is_dir() else ""
        problem = "is a link" if path.is_symlink() else problem
        if not problem and path.suffix.lower() != ".json":
            problem = "must end in .json"
        if problem:
            raise UsageError(f"debugger.export: path {problem}: {path}")
        try:
            make_folder(path.parent)
            write_json(path, self.summary().as_dict())
        except (OSError, StorageError) as error:
            raise UsageError(f"debugger.export: {path} cannot be written: {error}") from error
        return path

    def _add_call(
        self, path: str, seconds: float | None, failed: bool, peak: MemoryPeak | None
    ) -> None:
        if seconds is None:  # `reset` was called inside
            return
        with self.totals.lock:
            row = cast(OperationTotal, self.totals.row(path, ""))
            row.longest, row.failures = max(row.longest, seconds), row.failures + failed
            if peak is not None:
                added = peak.process - peak.process_before + peak.on_device - peak.on_device_before
                row.memory = max(row.memory or 0, added)

    def _count_not_finite(self, count: int) -> None:
        """Count tensors with NaN or Inf for the operation that this thread is in, if any."""
        for name in self.totals.open_names()[-1:]:
            with self.totals.lock:
                cast(OperationTotal, self.totals.row(name, "")).not_finite += count

    def _report_nan(self, text: str, on: str) -> None:
        """Record a NaN that a backward made, or raise it as NotFinite."""
        message = f"{next(reversed(self.totals.open_names()), 'backward')}: {text}"
        self._count_not_finite(1)
        self._record_fault("anomaly", message)
        if on == "raise":
            raise NotFinite(message)

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


def _check_on(call: str, on: Any) -> None:
    if on not in ("record", "raise"):
        raise UsageError(f"{call}: on must be 'record' or 'raise', got {on!r}")


debugger = Debugger()
"""The program's shared instance."""
debug_operation = debugger.operation
