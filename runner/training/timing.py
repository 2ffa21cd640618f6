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
UNUSUAL = ("whole_step", "waiting")  # shown where there are any
SETTLING = 3  # first steps: allocations, lazy initialisation, kernel selection
KEPT = 2**14  # steps whose length is kept, the newest ones: a long run needs no more memory
TIMED = 2**10  # steps whose events on the device are kept, the newest ones
SAMPLED = 50  # on an accelerator, each n-th step is timed on the device as well
FEWEST, MOST = 5, 11  # marks of a step that is not one graph; more are many micro-batches


class Stopwatch:
    """Laps of each step; five readings of the clock a step, a third of a microsecond in all.

    On an accelerator the host only queues work, so its laps say little: there, sampled steps
    leave events in the device's stream, and those are read once, at the end.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.spent = dict.fromkeys(PHASES, 0.0)
        self.count = 0  # steps timed so far
        self.lengths = np.zeros(KEPT, np.float32)  # seconds of step n at n % KEPT
        self.total = 0.0
        self.settled = 0.0  # the total without the first few steps
        self.samples = 0
        self.now = 0.0
        self.started = 0.0
        self.events: deque[list[tuple[str, torch.Event]]] = deque(maxlen=TIMED)
        self.marks: list[tuple[str, torch.Event]] = []  # at the end of which phase
        self.exposed = 0.0  # share of a step in which its backward waits for other processes
        self.running = False  # between start and stop
        self.sampling = False

    def start(self) -> None:
        """A step begins: with the wait for its batch."""
        if self.count == SETTLING:
            self.spent = dict.fromkeys(PHASES, 0.0)
        self.started = self.now = perf_counter()
        self.running = True
        self.sampling = self.device.type != "cpu" and self.count % SAMPLED == SAMPLED - 1
        if self.sampling:
            self.marks = [("", self.mark())]

    def split(self, phase: str) -> None:
        """Add the time since the last call to `phase`; a phase may end several times."""
        now = perf_counter()
        self.spent[phase] += now - self.now
        self.now = now
        if self.sampling:  # what came before a wait in this phase has no name yet
            self.marks = [(name or phase, mark) for name, mark in self.marks]
            self.marks.append((phase, self.mark()))

    def stop(self, samples: int) -> None:
        """The step has ended; `samples` were in its batch."""
        now = perf_counter()
        self.running = False
        seconds = now - self.started
        self.lengths[self.count % KEPT] = seconds
        self.count += 1
        self.total += seconds
        self.spent["other"] += now - self.now
        if self.count > SETTLING:
            self.settled += seconds
            self.samples += samples
        if self.sampling and FEWEST <= len(self.marks) <= MOST:
            self.events.append([(name or "other", mark) for name, mark in self.marks])

    def laps(self, first: int = 0) -> np.ndarray:
        """Seconds of each step from number `first`, counted from 0, of those that are kept."""
        first = max(first, self.count - KEPT)
        return self.lengths[np.arange(first, self.count) % KEPT]

    def settled_laps(self) -> np.ndarray:
        """Of the steps after the first few, where there are any."""
        return self.laps(SETTLING if self.count > SETTLING else 0)

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Time inside is not part of the step."""
        start = perf_counter()
        try:
            yield
        finally:
            excluded = perf_counter() - start
            self.now += excluded
            self.started += excluded

    def elapsed(self) -> float:
        """Seconds spent in steps so far, including the current one."""
        return self.total + (perf_counter() - self.started if self.running else 0.0)

    def mark(self) -> torch.Event:
        """An event in the device's stream."""
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def throughput(self, tokens_per_sample: int | None) -> Throughput:
        """Rates and shares over the steps after the first few, percentiles of the newest 16,384."""
        if not self.count:
            return Throughput()
        p50, p95 = np.percentile(self.settled_laps(), [50, 95]).tolist()
        total = self.settled or self.total
        rate = self.samples / total if self.count > SETTLING else 0.0
        spent = self._device_split() or {x: seconds / total for x, seconds in self.spent.items()}
        exposed = min(self.exposed, spent["backward"])
        spent["backward"] -= exposed
        spent["waiting"] += exposed
        return Throughput(
            samples_per_second=rate,
            tokens_per_second=rate * tokens_per_sample if tokens_per_sample else None,
            step_ms=StepTime(p50 * 1e3, p95 * 1e3),
            split={x: share for x, share in spent.items() if share or x not in UNUSUAL},
        )

    def _device_split(self) -> dict[str, float]:
        """Shares measured on the device, from the sampled steps; waits for it to finish."""
        sums = dict.fromkeys(PHASES, 0.0)
        for marks in self.events:
            marks[-1][1].synchronize()
            for (_, start), (phase, end) in pairwise(marks):
                sums[phase] += start.elapsed_time(end)
        total = sum(sums.values())
        return {phase: value / total for phase, value in sums.items()} if total else {}
