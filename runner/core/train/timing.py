"""Time of a step by phase: data, forward, backward, optimizer, and the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

import numpy as np
import torch

from runner.core.device.load import LoadMonitor
from runner.core.record.summary import StepTime, Throughput

PHASES = ("data", "forward", "backward", "optimizer", "whole_step", "waiting", "other")
OPTIONAL_PHASES = ("whole_step", "waiting")  # shown only if nonzero
SETTLING = 3  # first steps: allocations, lazy initialisation, kernel selection
MAX_DURATIONS = 2**14  # newest steps with durations kept, so that memory is bounded


class Stopwatch:
    """Timer of steps and their phases, a third of a microsecond a step; see `DeviceStopwatch`."""

    on_accelerator = False

    def __new__(cls, device: torch.device) -> Stopwatch:
        """Return a stopwatch for this kind of device."""
        if device.type == "cpu":
            return super().__new__(cls)
        from runner.core.train.device_timing import DeviceStopwatch  # most runs need none

        return super().__new__(DeviceStopwatch)

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.phase_seconds = dict.fromkeys(PHASES, 0.0)  # on the host
        self.count = 0  # steps timed so far
        # ring buffer, in seconds; negative: inspected by a debug tool
        self.durations = np.zeros(MAX_DURATIONS, np.float32)
        self.total_seconds = 0.0
        self.settled_seconds = 0.0  # the total without the first few steps
        self.samples = 0  # in settled_seconds
        self.inspected_seconds = 0.0  # of settled steps that a debug tool inspected
        self.inspected_samples = 0
        self.now = 0.0
        self.started = 0.0
        self.device_seconds: dict[str, float] = {}  # by phase, of sampled steps
        self.exposed_share = 0.0  # share of a step in which its backward waits for other processes
        self.running = False  # between start and stop
        self.inspected = False  # whether a debug tool inspects the current step
        self.inspects_next = False  # whether the next steps are inspected
        self.load: LoadMonitor | None = None  # from the first settled step on

    def start(self) -> None:
        """Start a step, which begins with the wait for its batch."""
        if self.count == SETTLING:
            self.phase_seconds = dict.fromkeys(PHASES, 0.0)
            self.load = LoadMonitor()
        self.started = self.now = perf_counter()
        self.running = True
        self.inspected = self.inspects_next

    def split(self, phase: str) -> None:
        """Add the time since the last split to `phase`; a phase may be split several times."""
        now = perf_counter()
        self.phase_seconds[phase] += now - self.now
        self.now = now

    def mark_wait(self, phase: str) -> None:
        """Note the start or end of a wait within a phase, for the device's own time."""

    def stop(self, samples: int) -> None:
        """End the step; `samples` is the size of its batch."""
        now = perf_counter()
        self.running = False
        self.phase_seconds["other"] += now - self.now
        self.count += 1
        seconds = now - self.started
        self.durations[(self.count - 1) % MAX_DURATIONS] = -seconds if self.inspected else seconds
        self.total_seconds += seconds
        if self.count > SETTLING:
            self.settled_seconds += seconds
            self.samples += samples
            if self.inspected:
                self.inspected_seconds += seconds
                self.inspected_samples += samples

    def pause(self, wait: bool = True) -> None:
        """End the last step before other work; on an accelerator `wait` for it."""

    def inspect_step(self) -> None:
        """Exclude the current step from the speed, as a debug tool slows it down."""
        self.inspected = True

    @contextmanager
    def exclude_time(self, keep_phase: bool = False) -> Iterator[None]:
        """Exclude the time inside from the step; with `keep_phase`, not from its phase."""
        start = perf_counter()
        try:
            yield
        finally:
            excluded = perf_counter() - start
            self.started += excluded
            if not keep_phase:
                self.now += excluded

    def elapsed(self) -> float | Callable[[], float]:
        """Return seconds in steps so far; on an accelerator a function that may wait for them."""
        return self.total_seconds + (perf_counter() - self.started if self.running else 0.0)

    def step_seconds(self, first: int = 0) -> np.ndarray:
        """Return the seconds of each kept step from number `first`, counted from 0; on a CPU."""
        first = max(first, self.count - MAX_DURATIONS)
        return np.abs(self.durations[np.arange(first, self.count) % MAX_DURATIONS])

    def settled_step_seconds(self) -> np.ndarray:
        """Return the seconds of steps after SETTLING, if any, uninspected ones, if any."""
        steps = self._signed_step_seconds(SETTLING)
        if not len(steps):
            steps = self._signed_step_seconds(0)
        plain = steps[steps > 0]
        return plain if len(plain) else np.abs(steps)

    def uninspected_step_seconds(self, first: int) -> np.ndarray:
        """Return the seconds of kept steps from `first`, from 0, that no debug tool inspected."""
        steps = self._signed_step_seconds(first)
        return steps[steps > 0]

    @property
    def is_settled(self) -> bool:
        """Whether the first steps, which are slower, are over."""
        return self.count > SETTLING

    def phase_totals(self) -> dict[str, float]:
        """Return the seconds by phase so far; on an accelerator, of the sampled steps there."""
        has_device = any(self.device_seconds.values())
        return dict(self.device_seconds if has_device else self.phase_seconds)

    def _signed_step_seconds(self, first: int) -> np.ndarray:
        """Return the seconds of the steps from `first`, negative for those inspected."""
        first = max(first, self.count - MAX_DURATIONS)
        return self.durations[np.arange(first, self.count) % MAX_DURATIONS]

    def throughput(self, tokens_per_sample: int | None) -> Throughput:
        """Return rates and phase shares of the settled steps, percentiles of the newest 16,384.

        On an accelerator of steps that were read. Inspected steps count only if all were.
        """
        steps = self.settled_step_seconds()
        p50 = p95 = 0.0
        if len(steps):
            p50, p95 = np.percentile(steps, [50, 95]).tolist()  # host sync: none, of NumPy
        seconds, samples = self.settled_seconds, self.samples
        if self.inspected_samples < samples:
            seconds -= self.inspected_seconds
            samples -= self.inspected_samples
        rate = samples / seconds if seconds > 0 else 0.0
        phases = self.phase_totals()
        total = sum(phases.values())
        shares = {phase: value / total if total else 0.0 for phase, value in phases.items()}
        exposed = min(self.exposed_share, shares["backward"])
        shares["backward"] -= exposed
        shares["waiting"] += exposed
        return Throughput(
            samples_per_second=rate,
            tokens_per_second=rate * tokens_per_sample if tokens_per_sample else None,
            step_ms=StepTime(p50 * 1e3, p95 * 1e3, len(steps)),
            split={x: share for x, share in shares.items() if share or x not in OPTIONAL_PHASES},
            seconds=seconds,
            samples=samples,
            other_cpu_share=self.load.other_cpu_share() if self.load else None,
        )
