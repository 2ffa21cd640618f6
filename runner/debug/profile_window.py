"""A few steps under torch.profiler, started for them and gone afterwards."""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import thread_time
from typing import Any

import torch
from torch import nn

from runner.debug.config import ProfileConfig
from runner.debug.profile_trace import CALIBRATION, MODULE
from runner.debug.sections import Totals
from runner.models import modes
from runner.training.run import Run

TRACES = "debug/traces"
QUIET = "KINETO_LOG_LEVEL"


class Window:
    """Steps being profiled; made between two steps, and asked after each of them."""

    def __init__(
        self, run: Run, config: ProfileConfig, totals: Totals, steps: int, eager: bool = False
    ) -> None:
        """Start, to keep so many steps; with `eager` they run uncompiled.

        Raises RuntimeError where another profiler is at work.
        """
        self.run, self.config, self.steps, self.eager = run, config, steps, eager
        self.first = run.progress.step + config.warmup + 1  # step in the trace
        self.left = config.warmup + steps
        self.scope = ExitStack()
        self.began = 0.0  # CPU time of this thread
        self.calibrations: list[float] = []  # CPU time of small operators, of that of each step
        self.without_modules = ""  # why there are no times by module, if so
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if run.device.kind == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self.profiler = torch.profiler.profile(
            activities=kinds,
            schedule=torch.profiler.schedule(wait=0, warmup=config.warmup, active=steps, repeat=1),
            record_shapes=config.shapes,
            profile_memory=config.memory,
            with_stack=config.stacks,
        )
        if torch._C._autograd._profiler_enabled():
            raise RuntimeError("another profiler is at work already")
        run.device.synchronize()  # waits: else kernels of earlier steps would be in the window
        with _quiet():
            self.profiler.start()
        if eager:
            self.scope.callback(setattr, run, "whole", run.whole)
            run.whole = None
            self.scope.enter_context(torch.compiler.set_stance("force_eager"))
        if config.modules:
            self.without_modules = "" if eager else _why_no_modules(run)
            if not self.without_modules:
                self.scope.enter_context(_module_ranges(run.model))
        totals.tracing = True
        self.scope.callback(setattr, totals, "tracing", False)

    @property
    def made(self) -> int:
        """Steps since it was started."""
        return self.config.warmup + self.steps - self.left

    @property
    def recorded(self) -> int:
        """Steps that are in the trace so far."""
        return max(0, self.steps - self.left)

    def step(self) -> bool:
        """A step has ended; says whether it was the last."""
        self.left -= 1
        if self.recorded and (took := thread_time() - self.began):
            self.calibrations.append(_calibrate() / took)
        if self.left == 0:
            self.run.device.synchronize()  # waits: kernels still under way belong to the window
            return True
        with _quiet():
            self.profiler.step()
        self.began = thread_time()
        return False

    def stop(self) -> Path | None:
        """End it, early if need be; the trace is in a file that is the caller's to remove.

        None if there is no whole step in it. Raises OSError.
        """
        self.scope.close()
        with _quiet():
            self.profiler.stop()
        if not self.recorded:
            return None
        handle, name = tempfile.mkstemp(".json")
        os.close(handle)
        path = Path(name)
        try:
            with _quiet():
                self.profiler.export_chrome_trace(name)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return path


def _calibrate() -> float:
    """CPU seconds of some operators that have next to nothing to compute, forward and backward."""
    x = torch.zeros(4, 4, requires_grad=True)
    start = thread_time()
    with torch.profiler.record_function(CALIBRATION):
        for _ in range(4):
            (nn.functional.linear(x, x).tanh() * 0.5).sum().backward()  # type: ignore[no-untyped-call]
    return thread_time() - start


def store_trace(path: Path, folder: Path, name: str, most_bytes: float) -> str | None:
    """Store a trace, compressed, and drop the oldest for which there is no room.

    Returns its path below `folder`; None if it is larger than all that may be kept. Raises OSError.
    """
    place = folder / TRACES
    place.mkdir(parents=True, exist_ok=True)
    temporary = place / f".{name}.tmp"
    try:
        with path.open("rb") as file, gzip.open(temporary, "wb", compresslevel=3) as packed:
            shutil.copyfileobj(file, packed)
        room = most_bytes - temporary.stat().st_size
        if room < 0:
            return None
        stored = sorted(place.glob("step_*.json.gz"), key=lambda p: p.stat().st_mtime, reverse=True)
        for older in (p for p in stored if p.name != name):
            room -= older.stat().st_size
            if room < 0:
                older.unlink()
        os.replace(temporary, place / name)
    finally:
        temporary.unlink(missing_ok=True)
    return f"{TRACES}/{name}"


def _why_no_modules(run: Run) -> str:
    """Why modules cannot be told apart, or nothing."""
    if run.whole is not None:
        return "the step is one graph, in which there are no modules"
    compiled = any(module._compiled_call_impl is not None for module in run.model.modules())
    if compiled or run.compilation is not None:
        return "the model is compiled, and hooks on its modules would compile it anew"
    return ""


@contextmanager
def _module_ranges(model: nn.Module) -> Iterator[None]:
    """The forward of each module is a range in the trace meanwhile."""
    local = threading.local()

    def open_ranges() -> list[Any]:
        return local.__dict__.setdefault("stack", [])  # type: ignore[no-any-return]

    with ExitStack() as scope:
        for name, module in modes.hookable(model):
            label = MODULE + (name or type(model).__name__)

            def enter(module: nn.Module, inputs: Any, label: str = label) -> None:
                range_ = torch.autograd.profiler.record_function(label)
                range_.__enter__()  # type: ignore[no-untyped-call]
                open_ranges().append(range_)

            def leave(module: nn.Module, inputs: Any, output: Any) -> None:
                if open_ranges():
                    open_ranges().pop().__exit__(None, None, None)

            scope.callback(module.register_forward_pre_hook(enter).remove)
            # always: a forward that raises must not leave its range open
            scope.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Kineto from saying on stderr that it starts and stops.

    It reads the variable when it is first started, so this holds for the whole process.
    """
    before = os.environ.get(QUIET)
    os.environ.setdefault(QUIET, "6")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(QUIET, None)
