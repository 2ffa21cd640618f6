"""The one check of times: a GPT of 124 million weights, with nothing else on the machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch

from gpu_checks.base import Workplace, require
from gpu_checks.training import MEASURED, PLAIN, built
from runner import train
from runner.core.interfaces.run import Run
from runner.core.techniques.flops import peak_flops
from runner.core.train.timing import SETTLING

MODEL = (
    *PLAIN, "model=gpt", "model.width=768", "model.depth=12", "model.heads=12", "data=synthetic",
    "data.form=tokens", "data.sequence=1024", "data.vocab=50304", "data.samples=512",
    "data.drop_last=true", "training.batch_size=32", "training.validate_every=20",
)  # fmt: skip
LEVELS = {  # in the order of their worth, should time run out
    "ultra": (*MEASURED, "training.steps=80"),
    "none": ("optimization=none", "training.steps=16"),
    "advanced": ("optimization=advanced", "optimization.measure=false", "training.steps=80"),
}
SPEED = tuple((*MODEL, *level) for level in LEVELS.values())
CLOCK_TOLERANCE = 0.03
SPEEDUP, MFU = 5.0, 0.5


class WallClock:
    """Times a run's settled steps beside its own stopwatch, which it does not change.

    The device is synchronised after the last step before a validation, and before the first step
    after it, outside of the run's own step time. So work that the run does not count is seen here.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.seconds, self.samples, self.steps = run, 0.0, 0, 0
        self.started: float | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the stopwatch's start and stop by ones that call them, and read this clock."""
        stopwatch: Any = self.run.stopwatch
        start, stop = stopwatch.start, stopwatch.stop

        def timed_start(*args: Any, **kwargs: Any) -> Any:
            if self.started is None and stopwatch.count >= SETTLING:
                self.run.device.synchronize()
                self.started = perf_counter()
            return start(*args, **kwargs)

        def timed_stop(samples: int, *args: Any, **kwargs: Any) -> Any:
            result = stop(samples, *args, **kwargs)
            if self.started is not None:
                self.samples += samples
                self.steps += 1
                self._pause_if_due()
            return result

        stopwatch.start, stopwatch.stop = timed_start, timed_stop
        try:
            yield
        finally:
            del stopwatch.start, stopwatch.stop

    def _pause_if_due(self) -> None:
        step = self.run.progress.step
        if self.started is not None and (
            step % self.run.validate_every == 0 or step >= self.run.total_steps
        ):
            self.run.device.synchronize()
            self.seconds += perf_counter() - self.started
            self.started = None


@dataclass
class Speed:
    """A level's speed as it reports it, and by the wall clock."""

    reported: float  # samples a second
    measured: float  # samples a second
    steps: int
    step_ms: dict[str, Any]
    split: dict[str, float]
    wall_seconds: float  # of the whole run
    peak_bytes: int
    faults: dict[str, int]
    techniques: dict[str, str]  # those requested: status or reason
    flops_per_sample: float
    mfu: float | None = None

    @property
    def error(self) -> float:
        """The relative error of the reported rate."""
        return self.reported / self.measured - 1 if self.measured else float("inf")


def measure_speed(device: str, *overrides: str) -> Speed:
    """Train and return both rates."""
    with built(device, *overrides) as run:
        clock = WallClock(run)
        with clock.installed():
            summary = train(run)
        throughput = summary.throughput
        flops = flops_per_sample(run)
        peak = peak_flops(run.device, torch.bfloat16, measure=False)
        measured = clock.samples / clock.seconds if clock.seconds else 0.0
        rows = [row for row in summary.techniques if row.requested]
        return Speed(
            reported=throughput.samples_per_second,
            measured=measured,
            steps=clock.steps,
            step_ms=asdict(throughput.step_ms),
            split=dict(throughput.split),
            wall_seconds=summary.wall_seconds,
            peak_bytes=summary.memory.peak_device_bytes,
            faults=dict(summary.faults),
            techniques={r.name: "engaged" if r.engaged else r.reason for r in rows},
            flops_per_sample=flops,
            mfu=None if peak is None else measured * flops / peak.flops_per_second,
        )


def flops_per_sample(run: Run) -> float:
    """Return forward and backward FLOPs of a transformer's sample: 6 a weight and token.

    Attention adds 12 times depth, width and length of the sequence a token (Chowdhery et al. 2022,
    PaLM, appendix B).
    """
    weights = sum(p.numel() for p in run.model.parameters())
    depth, width = run.settings["model.depth"], run.settings["model.width"]
    length = run.sizes.sequence or 1
    return float(length * (6 * weights + 12 * depth * width * length))


def speed(place: Workplace) -> None:
    """Reported rates are those of a synchronised clock; `ultra` is 5 times as fast as `none`."""
    for name, level in LEVELS.items():
        result = measure_speed(place.device, *MODEL, *level)
        place.record(**{name: {**asdict(result), "error": result.error}})
        if place.device == "cuda":
            torch.cuda.empty_cache()
    problems = speed_problems(place.facts)
    require(not problems, "; ".join(problems))


def speed_problems(facts: dict[str, Any]) -> list[str]:
    """Return what is wrong with the measured speeds."""
    problems = [
        f"{name}: reports {facts[name]['reported']:.1f} samples/s, "
        f"the wall clock says {facts[name]['measured']:.1f}"
        for name in LEVELS
        if not abs(facts[name]["error"]) <= CLOCK_TOLERANCE
    ]
    ratio = facts["ultra"]["measured"] / facts["none"]["measured"]
    if not ratio >= SPEEDUP:
        problems.append(f"ultra is {ratio:.2f} times as fast as none, not {SPEEDUP}")
    mfu = facts["ultra"]["mfu"]
    if mfu is None or not mfu >= MFU:
        problems.append(f"MFU of ultra: {mfu}, not {MFU}")
    return problems
