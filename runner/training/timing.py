"""Time of a step by phase: data, forward, backward, optimizer, and the rest."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from time import perf_counter

import numpy as np
import torch

from runner.training.summary import StepTime, Throughput

PHASES = ("data", "forward", "backward", "optimizer", "whole_step", "waiting", "other")
OPTIONAL_PHASES = ("whole_step", "waiting")  # shown only if nonzero
SETTLING = 3  # first steps: allocations, lazy initialisation, kernel selection
MAX_DURATIONS = 2**14  # newest steps with durations kept, so that memory is bounded
MAX_SAMPLED_STEPS = 2**10  # newest steps with device events kept
SAMPLE_EVERY = 50  # on an accelerator, each n-th step is timed on the device as well
MIN_MARKS, MAX_MARKS = 5, 11  # marks of a step that is not one graph; more mean many micro-batches


class Stopwatch:
    """Timer of steps and their phases; five clock readings a step, a third of a microsecond in all.

    On an accelerator the host only queues work, so host times mean little: there, sampled steps
    record events in the device's stream, which are read once, at the end.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.phase_seconds = dict.fromkeys(PHASES, 0.0)
        self.count = 0  # steps timed so far
        self.durations = np.zeros(MAX_DURATIONS, np.float32)  # ring buffer, in seconds
        self.total_seconds = 0.0
        self.settled_seconds = 0.0  # the total without the first few steps
        self.samples = 0
        self.now = 0.0
        self.started = 0.0
        self.events: deque[list[tuple[str, torch.Event]]] = deque(maxlen=MAX_SAMPLED_STEPS)
        self.marks: list[tuple[str, torch.Event]] = []  # (phase, mark at its end)
        self.exposed_share = 0.0  # share of a step in which its backward waits for other processes
        self.running = False  # between start and stop
        self.sampling = False

    def start(self) -> None:
        """Start a step, which begins with the wait for its batch."""
        if self.count == SETTLING:
            self.phase_seconds = dict.fromkeys(PHASES, 0.0)
        self.started = self.now = perf_counter()
        self.running = True
        self.sampling = self.device.type != "cpu" and self.count % SAMPLE_EVERY == SAMPLE_EVERY - 1
        if self.sampling:
            self.marks = [("", self.mark())]

    def split(self, phase: str) -> None:
        """Add the time since the last split to `phase`; a phase may be split several times."""
        now = perf_counter()
        self.phase_seconds[phase] += now - self.now
        self.now = now
        if self.sampling:  # marks before a wait within this phase have no name yet
            self.marks = [(name or phase, mark) for name, mark in self.marks]
            self.marks.append((phase, self.mark()))

    def stop(self, samples: int) -> None:
        """End the step; `samples` is the size of its batch."""
        now = perf_counter()
        self.running = False
        seconds = now - self.started
        self.durations[self.count % MAX_DURATIONS] = seconds
        self.count += 1
        self.total_seconds += seconds
        self.phase_seconds["other"] += now - self.now
        if self.count > SETTLING:
            self.settled_seconds += seconds
            self.samples += samples
        if self.sampling and MIN_MARKS <= len(self.marks) <= MAX_MARKS:
            self.events.append([(name or "other", mark) for name, mark in self.marks])

    def step_seconds(self, first: int = 0) -> np.ndarray:
        """Return the seconds of each kept step from number `first`, counted from 0."""
        first = max(first, self.count - MAX_DURATIONS)
        return self.durations[np.arange(first, self.count) % MAX_DURATIONS]

    def settled_step_seconds(self) -> np.ndarray:
        """Return the seconds of the steps after the first SETTLING, or of all if there are none."""
        return self.step_seconds(SETTLING if self.count > SETTLING else 0)

    @contextmanager
    def exclude_time(self) -> Iterator[None]:
        """Exclude the time inside from the step."""
        start = perf_counter()
        try:
            yield
        finally:
            excluded = perf_counter() - start
            self.now += excluded
            self.started += excluded

    def elapsed(self) -> float:
        """Return the seconds spent in steps so far, including the current one."""
        return self.total_seconds + (perf_counter() - self.started if self.running else 0.0)

    def mark(self) -> torch.Event:
        """Record and return an event in the device's stream."""
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def throughput(self, tokens_per_sample: int | None) -> Throughput:
        """Return rates and phase shares of the settled steps, percentiles of the newest 16,384."""
        if not self.count:
            return Throughput()
        p50, p95 = np.percentile(self.settled_step_seconds(), [50, 95]).tolist()
        total = self.settled_seconds or self.total_seconds
        rate = self.samples / total if self.count > SETTLING else 0.0
        shares = self._device_split() or {x: s / total for x, s in self.phase_seconds.items()}
        exposed = min(self.exposed_share, shares["backward"])
        shares["backward"] -= exposed
        shares["waiting"] += exposed
        return Throughput(
            samples_per_second=rate,
            tokens_per_second=rate * tokens_per_sample if tokens_per_sample else None,
            step_ms=StepTime(p50 * 1e3, p95 * 1e3),
            split={x: share for x, share in shares.items() if share or x not in OPTIONAL_PHASES},
        )

    def _device_split(self) -> dict[str, float]:
        """Return phase shares from the device events of sampled steps; host sync."""
        sums = dict.fromkeys(PHASES, 0.0)
        for marks in self.events:
            marks[-1][1].synchronize()
            for (_, start), (phase, end) in pairwise(marks):
                sums[phase] += start.elapsed_time(end)
        total = sum(sums.values())
        return {phase: value / total for phase, value in sums.items()} if total else {}
