"""The hook that reports a run which becomes slower, and what takes the time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from runner.core.device.load import LoadMonitor
from runner.core.interfaces.hook import Hook, Report
from runner.core.interfaces.run import Run
from runner.core.schemas.stability import WatchConfig

STRETCH_STEPS, STRETCH_S = 50, 10.0  # a stretch has at least as many steps and seconds,
STRETCH_SHARE = 0.1  # or this share of the run's steps if that is less
IN_A_ROW = 2  # stretches before anything is reported
LEAST_LOST_S = 1.0  # that these stretches took longer: less is noise, or no matter
LEAST_LOAD_S = 1.0  # of a stretch for the load of the CPUs, which is counted in 1/100 s
LEAST_GROWTH = 0.1  # of the share of waiting in a step
WAITS = {"data": "for data", "waiting": "for other processes"}
KEY = "stability.watch"


@dataclass(frozen=True)
class Stretch:
    """Consecutive steps, without validations, saves and steps that a debug tool inspected."""

    first: int  # number of the first step, from 1
    last: int
    step_s: float  # median
    phase_s: dict[str, float]  # of the median step, by its share of the time
    other_cpu_share: float | None  # of the CPUs, used by other processes; None: unknown

    def waiting_share(self, phase: str) -> float:
        """Return the share of a step that is spent in a phase."""
        return self.phase_s.get(phase, 0.0) / self.step_s


class Slowdown(Hook):
    """Reports once if steps become slower, wait longer, or other processes keep the CPUs busy.

    The first stretch of steps is the measure of later ones; two in a row are needed. Slower steps
    are no fault while other processes take the CPUs. Costs 300 µs a stretch; never ends a run.
    """

    monitors = True

    def __init__(self, config: WatchConfig) -> None:
        self.config = config
        self.reference: Stretch | None = None
        self.kind_of_step: tuple[Any, ...] = ()  # changed by out of memory, or a failed compiler
        self.in_a_row: Counter[str] = Counter()  # stretches, by kind of fault
        self.reported: set[str] = set()
        self._begin_stretch(-1, {}, 0.0)

    def on_report(self, run: Run, report: Report) -> None:
        """Close the stretch if it is long enough, and compare it."""
        stopwatch = run.stopwatch
        phases = stopwatch.phase_totals()
        if self.start < 0 or stopwatch.count < self.start:
            if stopwatch.is_settled:
                self._begin_stretch(stopwatch.count, phases, stopwatch.settled_seconds)
            return
        steps, seconds = stopwatch.count - self.start, stopwatch.settled_seconds - self.seconds
        is_long = steps >= STRETCH_STEPS and seconds >= STRETCH_S
        if not (is_long or steps >= STRETCH_SHARE * run.total_steps):
            return
        durations = stopwatch.uninspected_step_seconds(self.start)
        # host sync: none, of NumPy
        if len(durations) and (step_s := float(np.median(durations))) > 0:
            grown = {name: total - self.phases.get(name, 0.0) for name, total in phases.items()}
            scale = step_s / (sum(grown.values()) or 1.0)
            phase_s = {name: value * scale for name, value in grown.items()}
            first = run.progress.step - steps + 1
            # the run's other ranks are no children of this process
            measurable = seconds >= LEAST_LOAD_S and not run.is_shared
            share = self.load.other_cpu_share() if measurable else None
            self._compare(run, Stretch(first, run.progress.step, step_s, phase_s, share))
        self._begin_stretch(stopwatch.count, phases, stopwatch.settled_seconds)

    def _begin_stretch(self, count: int, phases: dict[str, float], seconds: float) -> None:
        self.start, self.phases, self.seconds = count, phases, seconds  # of the stopwatch
        self.load = LoadMonitor()

    def _compare(self, run: Run, stretch: Stretch) -> None:
        """Count what is worse than in the first stretch, and report what is so again."""
        kind_of_step = run.micro_batch, *run.fallback_reasons
        if self.reference is None or kind_of_step != self.kind_of_step:
            self.reference, self.kind_of_step = stretch, kind_of_step
        found = dict(self._findings(stretch, self.reference))
        self.in_a_row = Counter({kind: self.in_a_row[kind] + 1 for kind in found})
        for kind, message in found.items():
            if self.in_a_row[kind] >= IN_A_ROW and kind not in self.reported:
                self.reported.add(kind)
                run.history.add(kind, message, step=stretch.last, category="performance")

    def _findings(self, now: Stretch, then: Stretch) -> list[tuple[str, str]]:
        """Return kind and message of each finding about a stretch."""
        found, busy, slower = [], now.other_cpu_share, self.config.slower
        limit = self.config.cpu_above
        if limit is not None and busy is not None and busy > limit:
            text = f"other processes use {busy:.0%} of the CPUs ({KEY}.cpu_above={limit:g})"
            found.append(("cpu_busy", text))
        if slower is None:
            return found
        steps = f"in steps {then.first:,} to {then.last:,}"
        counted = IN_A_ROW * (now.last - now.first + 1)
        lost = (now.step_s - then.step_s) * counted
        if now.step_s > slower * then.step_s and lost > LEAST_LOST_S and not found:
            name = max(now.phase_s, key=lambda x: now.phase_s[x] - then.phase_s.get(x, 0.0))
            part = f"{name.replace('_', ' ')} grew most, from {_ms(then.phase_s.get(name, 0.0))}"
            text = f"a step takes {_ms(now.step_s)}, {_ms(then.step_s)} {steps}"
            found.append(("slower", f"{text}; {part} to {_ms(now.phase_s[name])}"))
        for phase, what in WAITS.items():
            share, before = now.waiting_share(phase), then.waiting_share(phase)
            lost = (share * now.step_s - before * then.step_s) * counted
            if share > max(slower * before, before + LEAST_GROWTH) and lost > LEAST_LOST_S:
                text = f"{share:.0%} of a step waits {what}, {before:.0%} {steps}"
                found.append(("waiting_more", text))
        return found


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
