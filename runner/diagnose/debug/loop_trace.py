"""`debugger.trace(folder)`: torch.profiler around a part of a training loop of the user's own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from runner.core.build.arguments import check_folder
from runner.core.errors import StorageError, UsageError
from runner.core.record.library_files import private_folder
from runner.core.record.storage import make_folder, replace_text
from runner.diagnose.debug.module_times import (
    MODULES_NOTE,
    ModuleRanges,
    module_table,
    quiet_profiler,
    read_trace,
)
from runner.diagnose.debug.profile import (
    LARGE_MODULE_SHARE,
    LARGE_OPERATOR_SHARE,
    StepMeasurements,
    operator_table,
    operator_totals,
    report_page,
)
from runner.diagnose.debug.sections import SectionTotals

TRACE_FILE, REPORT_FILE = "trace.json", "profile.md"


@contextmanager
def trace_loop(folder: str | os.PathLike[str], totals: SectionTotals) -> Iterator[None]:
    """Trace what runs inside, and write trace.json and profile.md; see `Debugger.trace`."""
    target = _make_target(folder)
    if torch._C._autograd._profiler_enabled():
        raise UsageError("debugger.trace: another profiler is already active; end it first")
    was_tracing, totals.tracing = totals.tracing, True
    ranges = ModuleRanges()
    profiler: Any = torch.profiler.profile()
    _wait_for_gpu()
    with quiet_profiler():
        profiler.start()
        start = perf_counter()
        try:
            with ranges.record():
                yield
        finally:
            _wait_for_gpu()
            seconds = perf_counter() - start
            totals.tracing = was_tracing
            profiler.stop()
            _write(target, profiler, seconds)


def _make_target(folder: str | os.PathLike[str]) -> Path:
    """Return the folder, which is made if it is missing."""
    target = check_folder("debugger.trace", folder)
    if target.is_symlink():
        raise UsageError(f"debugger.trace: {target} is a link; name a folder")
    try:
        make_folder(target)
    except OSError as error:
        raise StorageError(f"debugger.trace: {target}: {error.strerror or error}") from error
    return target


def _wait_for_gpu() -> None:
    """Wait for kernels that were queued before, or belong to the trace."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _write(target: Path, profiler: Any, seconds: float) -> None:
    try:
        with private_folder(target, owned=True) as temporary:
            profiler.export_chrome_trace(str(temporary / TRACE_FILE))
        replace_text(target / REPORT_FILE, _report(profiler, seconds))
    except OSError as error:
        raise StorageError(f"debugger.trace: {target}: {error.strerror or error}") from error


def _report(profiler: Any, seconds: float) -> str:
    """Return profile.md; all times are those of the whole trace."""
    trace = read_trace(profiler, steps=1)
    totals = operator_totals(trace.operators, trace.modules, steps=1)
    measured = StepMeasurements(step_ms=seconds * 1e3, **totals)
    texts = [f"{measured.step_ms:,.4g} ms, of which {measured.operators_ms:,.4g} ms in operators"]
    if max(measured.python_share, measured.stall_share) > LARGE_OPERATOR_SHARE:
        texts.append(measured.python_text("the time"))
    if measured.module_share > LARGE_MODULE_SHARE:
        texts.append(measured.module_text())
    parts = []
    if trace.operators:
        parts += ["## Operators", operator_table(trace.operators, steps=1)]
    if trace.modules:
        parts += ["## Modules", module_table(trace.modules)]
        parts.append(MODULES_NOTE.replace(" in a step", ""))
    return report_page(texts, parts, TRACE_FILE)
