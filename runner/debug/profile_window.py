"""A few steps under torch.profiler: where they are placed, and their operators."""

from __future__ import annotations

import re
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch._C._autograd import DeviceType

from runner.debug.config import ProfileConfig
from runner.debug.sections import Totals
from runner.debug.tool import Tool
from runner.training.run import Run
from runner.training.step import overrides_event

AHEAD = 1000  # steps in which a place for the window is looked for
GRAPH = "compiled graph"


class Window:
    """Steps under torch.profiler; made between two steps, and asked after each of them."""

    def __init__(self, run: Run, config: ProfileConfig, totals: Totals, steps: int) -> None:
        """Start, to keep so many steps; raises RuntimeError where another profiler is at work."""
        if torch._C._autograd._profiler_enabled():
            raise RuntimeError("another profiler is at work already")
        self.run, self.totals, self.steps = run, totals, steps
        self.first = run.progress.step + config.warmup + 1  # step in the trace
        self.left = config.warmup + steps
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
        self.start = perf_counter()
        self.seconds = 0.0  # wall time of the steps in the trace
        totals.tracing = True

    @property
    def recorded(self) -> int:
        """Steps that are in the trace so far."""
        return max(0, self.steps - self.left)

    def step(self) -> bool:
        """A step has ended; says whether it was the last."""
        self.left -= 1
        if self.left == 0:
            self.run.device.synchronize()  # waits: kernels still under way belong to the window
        self.seconds = perf_counter() - self.start if self.recorded else 0.0
        if self.left == 0:
            return True
        self.profiler.step()
        if not self.recorded:
            self.start = perf_counter()
        return False

    def stop(self) -> None:
        """End it, early if need be."""
        self.totals.tracing = False
        self.profiler.stop()

    def rows(self) -> tuple[list[dict[str, Any]], float | None]:
        """Operators by the time in them alone, and the share of time in which a GPU computed."""
        on_gpu = self.run.device.kind == "cuda"
        spent = "self_device_time_total" if on_gpu else "self_cpu_time_total"  # µs
        events = [e for e in self.profiler.key_averages() if not e.is_user_annotation]
        kernels = [e for e in events if e.device_type != DeviceType.CPU]
        operators = [
            {"name": operator_name(e.key), "calls": e.count, "seconds": getattr(e, spent) / 1e6}
            for e in events
            if e.device_type == DeviceType.CPU
            and not e.key.startswith(("cuda", "hip", "ProfilerStep"))
        ]
        operators.sort(key=lambda row: -row["seconds"])
        computed = sum(e.self_device_time_total for e in kernels) / 1e6
        return operators, min(1.0, computed / self.seconds) if kernels and self.seconds else None

    def store(self, path: Path) -> None:
        """Write the trace, compressed. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.profiler.export_chrome_trace(str(path))


def operator_name(key: str) -> str:
    """An operator's name: a graph's without the marks of the trace, its hash short."""
    call = re.match(r"^## Call CompiledFxGraph (\S+) ##$", key)
    return f"{GRAPH} {call[1][:8]}" if call else key


def place_window(run: Run, step: int, warmup: int, steps: int) -> tuple[int, int]:
    """How many steps to keep, and the first step, from this one on, to begin after.

    Validations, checkpoints and other tools' looks do not belong in a window: it is moved, or made
    smaller, to lie between two of them. Where there is no such place, they are in it.
    """
    looks = [
        hook.every
        for hook in run.hooks
        if isinstance(hook, Tool) and overrides_event(hook, "around") and hook.every > 2
    ]
    ends = [run.validate_every, run.checkpoint_every]  # after a step of these there is a pause
    room = [pace - 1 - warmup for pace in (*ends, *looks)]
    steps = min([steps, *(most for most in room if most > 0)])
    for first in range(step, min(step + AHEAD, run.total_steps - warmup - steps) + 1):
        made = range(first, first + warmup + steps)
        after = any(number % pace == 0 for number in made for pace in ends)
        if not after and not any((number + 1) % pace == 0 for number in made for pace in looks):
            return steps, first
    return steps, step
