"""Several benchmarks of one experiment: how each arm changed over time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from runner.benchmark.result import ArmResult, BenchmarkResult

Point = tuple[int, float, tuple[float, float] | None]
"""Which benchmark, the value, its interval."""


@dataclass
class Trend:
    """Benchmarks of one name on one kind of machine, oldest first."""

    name: str
    results: list[BenchmarkResult]
    per_sample: dict[str, list[Point]] = field(default_factory=dict)  # by arm, microseconds
    speedup: dict[str, list[Point]] = field(default_factory=dict)  # by arm; not of references

    def changes(self) -> list[str]:
        """What changed from the first to the last by more than the intervals allow."""
        said = []
        for name, points in self.per_sample.items():
            (first, a, before), (last, b, after) = points[0], points[-1]
            if first == last or before is None or after is None:
                continue
            if before[0] > after[1] or after[0] > before[1]:
                word = "faster" if b < a else "slower"
                ratio = max(a, b) / min(a, b)
                said.append(
                    f"{name} became {word}: {a:.4g} to {b:.4g} µs per sample ({ratio:.2f}×), and "
                    "the intervals do not touch; they were not measured side by side"
                )
        return said


def trends_of(results: Sequence[BenchmarkResult]) -> list[Trend]:
    """The trends in some results; machines that differ are not laid over one another."""
    groups: dict[tuple[str, str], list[BenchmarkResult]] = {}
    for result in sorted(results, key=lambda one: one.started):
        machine = json.dumps(result.machine, sort_keys=True, default=str)
        groups.setdefault((result.name, machine), []).append(result)
    return [_trend(name, group) for (name, _), group in groups.items() if len(group) > 1]


def _trend(name: str, results: list[BenchmarkResult]) -> Trend:
    trend = Trend(name, results)
    for number, result in enumerate(results):
        for arm in result.arms:
            if arm.status != "done" or not arm.step_ms or not arm.samples_per_step:
                continue
            value, ends = _per_sample(arm)
            trend.per_sample.setdefault(arm.name, []).append((number, value, ends))
            if arm.name != result.reference and arm.speedup is not None:
                point = (number, arm.speedup, arm.speedup_interval)
                trend.speedup.setdefault(arm.name, []).append(point)
    return trend


def _per_sample(arm: ArmResult) -> tuple[float, tuple[float, float] | None]:
    scale = 1000 / arm.samples_per_step
    ends = arm.step_ms_interval
    value = (arm.step_ms or 0.0) * scale
    return value, None if ends is None else (ends[0] * scale, ends[1] * scale)
