"""Time of a step on an accelerator, from events in the device's stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import cast

import numpy as np
import torch

from runner.core.train.timing import PHASES, SETTLING, Stopwatch

MAX_SAMPLED_STEPS = 2**10  # newest steps timed on the device, and intervals not yet read
# on an accelerator each n-th step is timed; coprime to usual intervals of reports and validations
SAMPLE_EVERY = 7
MAX_MARKS = 11  # marks of a step whose phases are used; more mean many micro-batches


@dataclass(eq=False, slots=True)
class _Interval:
    """Consecutive steps on an accelerator, between two events in the device's stream."""

    start: torch.Event
    is_settled: bool  # counts for the speed
    end: torch.Event | None = None
    samples: int = 0
    ends_window: bool = False  # ends with the current step, as its time is asked for
    elapsed: float | None = None  # seconds in steps until its end, once read


@dataclass(eq=False, slots=True)
class _SampledStep:
    """A step with events in the device's stream, from its first to the next step's first."""

    number: int  # steps before it
    marks: list[tuple[str, torch.Event]]  # (phase, event at its end)
    inspected: bool = False
    samples: int = 0


class DeviceStopwatch(Stopwatch):
    """Timer of the steps of an accelerator, for which the host only queues work.

    The time of steps is the sum of intervals between events in the device's stream, which begin and
    end with steps; sampled steps record an event for each phase. Events are read when the host
    waits anyway, or a window of steps later, so the host does not wait within steps.
    """

    on_accelerator = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.device_seconds = dict.fromkeys(PHASES, 0.0)
        self.interval: _Interval | None = None  # the current one
        self.unread_intervals: deque[_Interval] = deque()
        self.sample: _SampledStep | None = None  # the current step, or the last until the next
        self.unread_samples: deque[_SampledStep] = deque(maxlen=MAX_SAMPLED_STEPS)
        # (steps before it, seconds, whether inspected) of each sampled step
        self.sampled_steps: deque[tuple[int, float, bool]] = deque(maxlen=MAX_SAMPLED_STEPS)

    def start(self) -> None:
        """Start a step; record an event if it is sampled, or the last one is, or begins anew."""
        super().start()
        number, interval = self.count, self.interval
        begins = interval is None or interval.ends_window or number == SETTLING
        due = number <= SETTLING or (number - SETTLING) % SAMPLE_EVERY == 0 or self.inspected
        if not (begins or due or self.sample):
            return
        mark = self.mark()
        self._end_sample(mark)
        if begins:
            self._end_interval(mark)
            self.interval = _Interval(mark, number >= SETTLING)
        if due:
            self.sample = _SampledStep(number, [("", mark)], self.inspected)

    def split(self, phase: str) -> None:
        """Add the time since the last split to `phase`; a phase may be split several times."""
        super().split(phase)
        if self.sample is not None:  # marks before a wait within this phase have no name yet
            self.sample.marks = [(name or phase, mark) for name, mark in self.sample.marks]
            self.sample.marks.append((phase, self.mark()))

    def mark_wait(self, phase: str) -> None:
        """Record an event at the start of a wait, or at its end with the name of its phase."""
        if self.sample is not None:
            self.sample.marks.append((phase, self.mark()))

    def stop(self, samples: int) -> None:
        """End the step on the host; `samples` is the size of its batch."""
        super().split("other")
        self.running = False
        self.count += 1
        if self.interval is not None:
            self.interval.samples += samples
        if self.sample is not None:
            self.sample.samples = samples

    def pause(self, wait: bool = True) -> None:
        """End the last step when the device has finished it; without `wait`, do not wait for it."""
        if (interval := self.interval) is not None:
            mark = self.mark()
            if self.running:  # an unfinished step
                self.sample, interval.is_settled = None, False
            self._end_sample(mark)
            self._end_interval(mark)
        if wait and self.unread_intervals:
            self._read_intervals(self.unread_intervals[-1])

    def inspect_step(self) -> None:
        """Exclude the current step from the speed, as a debug tool slows it down."""
        super().inspect_step()
        if self.running:
            if self.sample is None:  # to know its time
                self.sample = _SampledStep(self.count, [("", self.mark())])
            self.sample.inspected = True

    @contextmanager
    def exclude_time(self, keep_phase: bool = False) -> Iterator[None]:
        """Exclude the time inside from the step, on the device too."""
        excluded_interval = self.interval if self.running and not self.inspected else None
        if excluded_interval is not None:
            self.sample = None  # the gap would be part of it
            self._end_interval(self.mark())
        with super().exclude_time(keep_phase):
            yield
        if excluded_interval is not None and self.interval is None:
            self.interval = _Interval(self.mark(), excluded_interval.is_settled)

    def elapsed(self) -> float | Callable[[], float]:
        """Return a function for the seconds until the end of the current step."""
        if self.interval is None:
            return self.total_seconds
        self.interval.ends_window = True
        return partial(self._elapsed_until, self.interval)

    def _signed_step_seconds(self, first: int) -> np.ndarray:
        rows = [row for row in self.sampled_steps if row[0] >= first]
        return np.array([-s if inspected else s for _, s, inspected in rows], np.float32)

    def _elapsed_until(self, interval: _Interval) -> float:
        if interval.end is None:
            self.pause()
        return self._read_intervals(interval)

    def mark(self) -> torch.Event:
        """Record and return an event in the device's stream."""
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def _end_interval(self, mark: torch.Event) -> None:
        if self.interval is not None:
            self.interval.end = mark
            self.unread_intervals.append(self.interval)
            self.interval = None
            if len(self.unread_intervals) > MAX_SAMPLED_STEPS:
                self._read_intervals(self.unread_intervals[0])

    def _end_sample(self, mark: torch.Event) -> None:
        if self.sample is not None:
            self.sample.marks = [(name or "other", mark) for name, mark in self.sample.marks]
            self.sample.marks.append(("other", mark))
            self.unread_samples.append(self.sample)
            self.sample = None

    def _read_intervals(self, last: _Interval) -> float:
        """Add the intervals up to `last`, and return the seconds in steps until its end."""
        while last.elapsed is None:
            interval = self.unread_intervals.popleft()
            end = cast(torch.Event, interval.end)
            end.synchronize()  # host sync: of a pause, else rarely a wait, as it is one window old
            seconds = interval.start.elapsed_time(end) / 1e3
            self.total_seconds += seconds
            interval.elapsed = self.total_seconds
            if interval.is_settled:
                self.settled_seconds += seconds
                self.samples += interval.samples
        while self.unread_samples and self.unread_samples[0].marks[-1][1].query():
            self._read_sample(self.unread_samples.popleft())
        return last.elapsed

    def _read_sample(self, step: _SampledStep) -> None:
        seconds = step.marks[0][1].elapsed_time(step.marks[-1][1]) / 1e3
        self.sampled_steps.append((step.number, seconds, step.inspected))
        if step.number < SETTLING:
            return
        if step.inspected:
            self.inspected_seconds += seconds
            self.inspected_samples += step.samples
        elif len(step.marks) <= MAX_MARKS:
            for (_, start), (phase, end) in pairwise(step.marks):
                self.device_seconds[phase] += start.elapsed_time(end) / 1e3
