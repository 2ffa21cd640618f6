"""What is drawn of a comparison for TensorBoard's Images tab, and the numbers it is drawn from."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from runner.record.text import escape_control_chars
from runner.report import curves, format, row_fields
from runner.report.comparison import Comparison, Row

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MOST = 12  # rows of one picture; more could not be read
MOST_CURVES = 8
MIB = 2**20


@dataclass(frozen=True)
class Bar:
    """A ratio and its interval; without a value, why there is none."""

    name: str
    value: float | None
    low: float | None = None
    high: float | None = None
    told: str = ""  # the numbers, or the reason
    second: bool = False  # of a pair: what a technique is worth within the level, not alone


@dataclass(frozen=True)
class Point:
    """A row's speed and the memory that it took."""

    name: str
    speed: float
    mib: float


def pictures(comparison: Comparison) -> dict[str, NDArray[np.uint8]]:
    """By name, [height, 640, 3] of all that there is something to show for."""
    from runner.report import drawing  # needs Pillow and numpy

    made = {}
    # a name over two lines cannot be drawn
    rows = [replace(row, name=escape_control_chars(row.name)) for row in comparison.rows]
    comparison = replace(
        comparison, rows=rows, reference=escape_control_chars(comparison.reference)
    )
    ratios = speeds(comparison)
    if any(bar.value is not None for bar in ratios):
        floor = (comparison.benchmark.unclaimed or 0.0) if comparison.benchmark else 0.0
        title = f"speed-up over {comparison.reference}" if comparison.reference else "speed-up"
        made["speed"] = drawing.bars(title, _most(ratios), floor, len(ratios))
    if points := memory(comparison):
        unit = "× as fast" if _ratio(comparison) else "samples/s"
        made["memory"] = drawing.scatter(points[:MOST], unit, len(points))
    worth = effects(comparison)
    if any(bar.value is not None for bar in worth):
        made["attribution"] = drawing.bars(
            "what each technique is worth", worth[: 2 * MOST], 0.0, len(worth), level_of(comparison)
        )
    if losses := curves.read_losses(comparison):
        shown = dict(list(losses.items())[:MOST_CURVES])
        reach = curves.axis_top(comparison, shown)
        made["loss"] = drawing.lines("training loss", shown, len(losses), reach)
    return made


def speeds(comparison: Comparison) -> list[Bar]:
    """Every row's speed-up with its 95 % interval, where it has one; failures with their status."""
    return [_speed(row) for row in comparison.rows]


def _speed(row: Row) -> Bar:
    if row.speedup is None or not math.isfinite(row.speedup):
        return Bar(row.name, None, told="not measured" if row.finished else row.status)
    bar = Bar(row.name, row.speedup, told=format.times(row.speedup))
    if not row.finished:
        bar = replace(bar, told=f"{bar.told} {row.status}")
    return _with_interval(bar, row.speedup_interval)


def _with_interval(bar: Bar, ends: tuple[float, float] | None) -> Bar:
    if ends is None:
        return bar
    low, high = ends
    told = f"{bar.told} ({format.interval(ends)})"
    if not math.isfinite(high):  # so few blocks say nothing: no whisker
        return replace(bar, told=told)
    return replace(bar, low=low, high=high, told=told)


def _most(bars: list[Bar]) -> list[Bar]:
    """All of them in their order, or the fastest of many."""
    if len(bars) <= MOST:
        return bars
    return sorted(bars, key=lambda bar: -(bar.value or 0.0))[:MOST]


def memory(comparison: Comparison) -> list[Point]:
    """Speed and peak memory of the rows that have both."""
    peak, by_ratio, points = peak_of(comparison), _ratio(comparison), []
    for row in comparison.rows:
        speed = row.speedup if by_ratio else row_fields.samples_per_second(row)
        if speed is not None and math.isfinite(speed) and (held := peak(row)):
            points.append(Point(row.name, speed, held / MIB))
    return points


def peak_of(comparison: Comparison) -> Callable[[Row], float | None]:
    """What says a row's peak memory in bytes: the device's, where any row has one."""
    on_device = any(row_fields.device_bytes(row) for row in comparison.rows)
    return row_fields.device_bytes if on_device else row_fields.process_bytes


def _ratio(comparison: Comparison) -> bool:
    return any(row.speedup is not None for row in comparison.rows)


def level_of(comparison: Comparison) -> str:
    """The level whose techniques were taken apart."""
    found = comparison.benchmark.attribution if comparison.benchmark else None
    return escape_control_chars(found.level) if found else ""


def effects(comparison: Comparison) -> list[Bar]:
    """What each technique is worth: two bars, added alone and as a part of the level."""
    found = comparison.benchmark.attribution if comparison.benchmark else None
    bars = []
    for effect in found.effects if found else []:
        for second, value, ends in (
            (False, effect.added, effect.added_interval),
            (True, effect.removed, effect.removed_interval),
        ):
            if value is None or not 0 < value < math.inf:
                bars.append(Bar(effect.name, None, told=effect.note or "–", second=second))
            else:
                bar = Bar(effect.name, value, told=format.times(value), second=second)
                bars.append(_with_interval(bar, ends))
    return bars
