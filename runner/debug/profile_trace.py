"""A few steps under torch.profiler, and what its events say of operators and modules."""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from time import thread_time
from typing import Any

import torch
from torch import nn
from torch._C._autograd import DeviceType

from runner.debug.config import ProfileConfig
from runner.debug.sections import Totals
from runner.models import modes
from runner.training.run import Run

MODULE = "module "  # before a module's name, in the ranges around its forward
OUTSIDE = "(outside the modules)"
BACKWARD = "autograd::engine::evaluate_function: "
CALIBRATION = "runner calibration"  # the range of operators that are no part of a step


@dataclass
class TracedOperator:
    """One kind of operator, without those that it calls."""

    name: str
    calls: int = 0
    seconds: float = 0.0  # on the host; on an accelerator those of the kernels that it started


@dataclass
class Module:
    """One module of the model, without those inside it."""

    name: str
    calls: int = 0
    operators: int = 0  # called in it, both ways
    forward: float = 0.0  # seconds; on an accelerator those of its kernels
    backward: float = 0.0

    @property
    def seconds(self) -> float:
        """Both ways."""
        return self.forward + self.backward


@dataclass
class Trace:
    """The numbers of a window of some steps."""

    steps: int = 0
    seconds: float = 0.0  # wall time of the steps
    operators: list[TracedOperator] = field(default_factory=list)  # the longest first
    modules: list[Module] = field(default_factory=list)
    module_steps: dict[str, list[float]] = field(default_factory=dict)  # seconds in each step
    on_device: bool = False  # times are those of an accelerator's kernels
    busy: float | None = None  # share of the time in which the device computed
    calibration_calls: int = 0  # of small operators, made after each step for comparison
    calibration_share: float = 0.0  # their CPU time, of that of the step

    @cached_property
    def operator_seconds(self) -> float:
        """Seconds of all operators."""
        return sum(operator.seconds for operator in self.operators)

    @cached_property
    def calls(self) -> int:
        """Operators called."""
        return sum(operator.calls for operator in self.operators)

    @property
    def calling(self) -> float:
        """Share of a step's CPU time that calling so many operators takes, were they all small.

        A busy machine lengthens the step and the operators that it is compared with alike.
        """
        return self.calls / (self.calibration_calls or math.inf) * self.calibration_share

    @property
    def inside(self) -> list[Module]:
        """The modules, without the operators outside of all of them."""
        return [module for module in self.modules if module.name != OUTSIDE]

    @property
    def caller(self) -> Module | None:
        """The module that calls the most operators by itself."""
        return max(self.inside, key=lambda module: module.operators, default=None)

    @property
    def hot_spot(self) -> tuple[Module | None, float]:
        """The module that takes the most of a median step, and its share of the operators' time.

        The median, since the scheduler's pauses lengthen single steps.
        """
        typical = {m.name: median(self.module_steps.get(m.name, [0.0])) for m in self.modules}
        if not self.inside:
            return None, 0.0
        most = max(self.inside, key=lambda module: typical[module.name])
        whole = median(map(sum, zip(*self.module_steps.values(), strict=True)))
        return most, typical[most.name] / (whole or 1.0)

    def as_dict(self, most: int = 50) -> dict[str, Any]:
        """For a file: the longest operators and modules."""
        return {
            "steps": self.steps,
            "seconds": self.seconds,
            "operator_seconds": self.operator_seconds,
            "operators": [asdict(operator) for operator in self.operators[:most]],
            "modules": [asdict(module) for module in self.modules[:most]],
        }


def read_events(events: Iterable[Any], steps: int) -> Trace:
    """The numbers of so many steps, from a profiler's events (times in µs), in order of time."""
    events = list(events)
    device = [e for e in events if e.device_type != DeviceType.CPU and not e.is_user_annotation]
    host = [e for e in events if e.device_type == DeviceType.CPU]
    ranges = [e.time_range for e in host if e.name.startswith("ProfilerStep")][:steps]
    trace = Trace(len(ranges), sum(r.elapsed_us() for r in ranges) / 1e6)
    trace.on_device = bool(device)
    reader = _Reader(trace, [r.start for r in ranges])
    for event in host:
        reader.read(event)
    reader.finish()
    if device and trace.seconds:
        trace.busy = min(1.0, _covered([e.time_range for e in device]) / 1e6 / trace.seconds)
    return trace


def _covered(ranges: list[Any]) -> float:
    """Time that lies in any of the ranges: kernels side by side count once."""
    covered, until = 0.0, -math.inf
    for span in sorted(ranges, key=lambda r: r.start):
        covered += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return covered


class _Reader:
    """Adds up events, parents before their children; a backward counts for its forward's module."""

    def __init__(self, trace: Trace, starts: list[float]) -> None:
        self.trace, self.starts = trace, starts  # of the steps, µs
        self.places: dict[int, tuple[str, int | None]] = {}  # module and backward, by event
        self.operators: dict[str, TracedOperator] = {}
        self.modules: dict[str, Module] = {}
        self.owners: dict[int, str] = {}  # module by sequence number
        self.backwards: list[tuple[int, float, int]] = []  # number, seconds, step

    def read(self, event: Any) -> None:
        """Count an event of the host."""
        module, backward = self.places.get(id(event.cpu_parent), (OUTSIDE, None))
        number = event.sequence_nr if event.sequence_nr >= 0 else None
        if event.is_user_annotation:
            if event.name.startswith(MODULE):
                module = event.name.removeprefix(MODULE)
                self._module(module).calls += 1
            elif event.name == CALIBRATION:
                module = CALIBRATION
        elif number is not None and event.name.startswith(BACKWARD):
            backward = number
        elif number is not None and backward is None:
            self.owners[number] = module
        self.places[id(event)] = module, backward
        if module == CALIBRATION:
            self.trace.calibration_calls += not event.is_user_annotation
        elif not event.is_user_annotation and not event.name.startswith(("cuda", "hip")):
            self._count(event, module, backward)

    def _count(self, event: Any, module: str, backward: int | None) -> None:
        on_device = self.trace.on_device
        spent = event.self_device_time_total if on_device else event.self_cpu_time_total
        name = event.name.removeprefix(BACKWARD)
        operator = self.operators.setdefault(name, TracedOperator(name))
        operator.calls += 1
        operator.seconds += spent / 1e6
        step = max(0, bisect_right(self.starts, event.time_range.start) - 1)
        if backward is None:
            self._module(module).forward += spent / 1e6
            self._add(module, spent / 1e6, step)
        else:  # the forward may be read later, on another thread
            self.backwards.append((backward, spent / 1e6, step))

    def _add(self, module: str, seconds: float, step: int) -> None:
        self._module(module).operators += 1
        steps = self.trace.module_steps.setdefault(module, [0.0] * max(1, len(self.starts)))
        steps[step] += seconds

    def finish(self) -> None:
        """Give each backward to its module, and put the longest first."""
        for number, seconds, step in self.backwards:
            module = self.owners.get(number, OUTSIDE)
            self._module(module).backward += seconds
            self._add(module, seconds, step)
        self.trace.operators = sorted(self.operators.values(), key=lambda op: -op.seconds)
        if len(self.modules) > (OUTSIDE in self.modules):
            self.trace.modules = sorted(self.modules.values(), key=lambda module: -module.seconds)

    def _module(self, name: str) -> Module:
        return self.modules.setdefault(name, Module(name))


class Window:
    """Steps being profiled; made between two steps, and asked after each of them."""

    def __init__(self, run: Run, config: ProfileConfig, totals: Totals, steps: int) -> None:
        """Start, to keep so many steps; raises RuntimeError where another profiler is at work."""
        self.run, self.steps = run, steps
        self.first = run.progress.step + config.warmup + 1  # step in the trace
        self.left = config.warmup + steps
        self.scope = ExitStack()
        self.began = 0.0  # CPU time of this thread
        self.calibrations: list[float] = []  # CPU time of small operators, of that of each step
        if torch._C._autograd._profiler_enabled():
            raise RuntimeError("another profiler is at work already")
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
        run.device.synchronize()  # waits: else kernels of earlier steps would be in the window
        self.profiler.start()
        compiled = any(m._compiled_call_impl is not None for m in run.model.modules())
        self.compiled = compiled or run.whole is not None or run.compilation is not None
        if not self.compiled:
            self.scope.enter_context(_module_ranges(run.model))
        totals.tracing = True
        self.scope.callback(setattr, totals, "tracing", False)

    @property
    def recorded(self) -> int:
        """Steps that are in the trace so far."""
        return max(0, self.steps - self.left)

    def step(self) -> bool:
        """A step has ended; says whether it was the last."""
        self.left -= 1
        if self.recorded and (spent := thread_time() - self.began):
            self.calibrations.append(_calibrate() / spent)
        if self.left == 0:
            self.run.device.synchronize()  # waits: kernels still under way belong to the window
            return True
        self.profiler.step()
        self.began = thread_time()
        return False

    def stop(self) -> None:
        """End it, early if need be."""
        self.scope.close()
        self.profiler.stop()

    def read(self) -> Trace:
        """The numbers of its steps; some 50 µs an operator."""
        events = self.profiler.events()  # type: ignore[no-untyped-call]
        trace = read_events(events or (), self.recorded)
        trace.calibration_share = median(self.calibrations or [0.0])
        return trace

    def store(self, path: Path) -> None:
        """Write the trace, compressed. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.profiler.export_chrome_trace(str(path))


def _calibrate() -> float:
    """CPU seconds of some operators that have next to nothing to compute, forward and backward."""
    x = torch.zeros(4, 4, requires_grad=True)
    start = thread_time()
    with torch.profiler.record_function(CALIBRATION):
        for _ in range(4):
            (nn.functional.linear(x, x).tanh() * 0.5).sum().backward()  # type: ignore[no-untyped-call]
    return thread_time() - start


@contextmanager
def _module_ranges(model: nn.Module) -> Iterator[None]:
    """The forward of each module is a range in the trace meanwhile."""
    local = threading.local()

    with ExitStack() as scope:
        for name, module in modes.hookable(model):
            label = MODULE + (name or type(model).__name__)

            def enter(module: nn.Module, inputs: Any, label: str = label) -> None:
                range_ = torch.autograd.profiler.record_function(label)
                range_.__enter__()  # type: ignore[no-untyped-call]
                local.__dict__.setdefault("stack", []).append(range_)

            def leave(module: nn.Module, inputs: Any, output: Any) -> None:
                if local.__dict__.get("stack"):
                    local.stack.pop().__exit__(None, None, None)

            scope.callback(module.register_forward_pre_hook(enter).remove)
            # always: a forward that raises must not leave its range open
            scope.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield
