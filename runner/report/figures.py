"""The figures of a comparison: the numbers that are drawn, and what is written above each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from runner.benchmark.result import Effect
from runner.report import format, verdicts
from runner.report.charts import Bar, draw_bars, draw_curves, draw_points
from runner.report.comparison import Comparison, Row, number
from runner.report.curves import POINTS, Curve, read_curves, thin_curve
from runner.report.replicates import by_configuration, configuration
from runner.report.svg import Series

DIVERGED = 100  # times as high as where the runs begin
MOST_CURVES = 12  # at once: more cannot be told apart
ALIKE = 1.05  # peaks of memory that differ by less say nothing
MOST_BARS = 40  # of a chart of rows: the fastest and the slowest
KINDS = {
    "reference": "reference",
    "faster": "faster",
    "slower": "slower",
    "": "hint",
    "PARITY FAIL": "fail",
    "does not train": "fail",
}
"""How a bar is filled, by the row's verdict."""


@dataclass(frozen=True)
class Figure:
    """A section of the page: a heading, what it shows, and charts below headings of their own."""

    heading: str
    about: str
    charts: list[tuple[str, str, Markup]]  # heading, note, drawing


def figures(comparison: Comparison) -> dict[str, list[Figure]]:
    """By section name, the figures that there are numbers for."""
    floor = (comparison.benchmark.unclaimed or 0.0) if comparison.benchmark else 0.0
    return {
        "speed": list(_speed(comparison, floor)),
        "attribution": list(_attribution(comparison, floor)),
        "memory": list(_memory(comparison)),
        "validation": list(_validation(comparison)),
        "losses": list(_losses(comparison)),
    }


def _speed(comparison: Comparison, floor: float) -> Iterator[Figure]:
    comparison = by_configuration(comparison) or comparison
    rows = [row for row in comparison.rows if row.finished and row.speedup is not None]
    if len(rows) < 2 or comparison.search is not None:
        return
    reference = comparison.reference or "its reference"
    about = f"How many times as fast as {reference}; the upright line is as fast."
    if any(row.speedup_interval for row in rows):
        about += " Whiskers are 95 % intervals."
    if floor:
        about += f" Nothing in the hatched strip, ± {format.share(floor)}, is claimed."
    if comparison.kind != "benchmark" and any(row.over for row in rows):
        about = f"Samples per second as a ratio to {reference}: the mean over runs of the same "
        about += "seed or fold, with its 95 % interval."
    elif comparison.kind == "sweep":
        about = f"Samples per second, as a ratio to {reference}: one run each, without intervals."
    if len(rows) > MOST_BARS:
        about += f" The {MOST_BARS // 2} fastest and as many of the slowest of {len(rows)}."
        rows.sort(key=lambda row: row.speedup or 0.0, reverse=True)
        rows = rows[: MOST_BARS // 2] + rows[-MOST_BARS // 2 :]
    said = {row.name: verdicts.verdict(row, comparison) for row in rows}
    if comparison.reference in said:
        said[comparison.reference] = "reference"
    bars = [_speed_bar(row, said[row.name]) for row in rows]
    yield Figure("Speed", about, [("", "", draw_bars(bars, 0.0, "speed-up of each row", floor))])


def _speed_bar(row: Row, verdict: str) -> Bar:
    ratio = format.times_interval(row.speedup, row.speedup_interval)
    text = ", ".join(filter(None, (ratio, verdict)))
    kind = KINDS.get(verdict or ("unclear" if row.speedup_interval else ""), "unclear")
    return Bar(row.name, row.speedup, row.speedup_interval, text, kind)


def _memory(comparison: Comparison) -> Iterator[Figure]:
    if comparison.search is not None:
        return
    comparison = by_configuration(comparison) or comparison
    points = []
    for style, row in enumerate(comparison.rows):
        rate, of_device = row.number("samples_per_second"), row.number("peak_device_bytes")
        peak = of_device or row.number("peak_process_bytes")
        if row.finished and rate is not None and peak is not None:
            values = f"{format.rate(rate)} samples/s, {format.size(peak)}"
            points.append(Series(row.name, [(rate, peak / 2**20)], style, values))
    peaks = [one.points[0][1] for one in points]
    if len(points) < 2 or max(peaks) < ALIKE * min(peaks):
        return
    on_device = any(row.number("peak_device_bytes") for row in comparison.rows)
    about = (
        f"Peak of the {'device' if on_device else 'process'}'s memory against samples per second: "
        "right and low is better. Both axes begin at 0."
    )
    if len(points) > MOST_BARS:
        about += f" The {MOST_BARS} fastest of {len(points)}."
        points = sorted(points, key=lambda one: one.points[0][0], reverse=True)[:MOST_BARS]
    drawing = draw_points(points, "samples per second", "MiB at the peak")
    yield Figure("Memory against speed", about, [("", "", drawing)])


def _validation(comparison: Comparison) -> Iterator[Figure]:
    """The monitored metric by step; of several seeds or folds the mean, and a band around it."""
    monitor, home = comparison.monitor, comparison.home
    if not monitor or home is None:
        return
    curves = {
        row.name: read_curves(home / row.folder, [monitor]).get(monitor, [])
        for row in comparison.rows
        if row.finished and row.folder
    }
    series = _series(comparison, {key: x for key, x in curves.items() if len(x) > 1})
    if series:
        about = f"{monitor} at each validation.{_about_series(series)}"
        drawing = draw_curves(series[:MOST_CURVES], "step", monitor)
        yield Figure("Validation", about, [("", "", drawing)])


def _about_series(series: Sequence[Series]) -> str:
    about = ""
    if any(one.band for one in series):
        about += " A line is the mean of a configuration's runs, its band their lowest and highest."
    if len(series) > MOST_CURVES:
        about += f" The first {MOST_CURVES} of {len(series)} are shown."
    return about


def _series(comparison: Comparison, curves: Mapping[str, Curve]) -> list[Series]:
    """A curve for each row, or for each configuration that ran with several seeds or folds."""
    groups: dict[str, list[Curve]] = {}
    grouped = by_configuration(comparison)
    labels = dict(zip([row.name for row in comparison.rows], _labels(comparison), strict=True))
    for name, curve in curves.items():
        groups.setdefault(labels[name], []).append(curve)
    order = [row.name for row in (grouped or comparison).rows]
    series = []
    for label, members in groups.items():
        points, band = average_curves(members)
        if points:
            text = f"to {format.metric(points[-1][1])}"
            series.append(Series(label, points, order.index(label), text, band))
    return series


def _labels(comparison: Comparison) -> list[str]:
    """For each row the name of its curve."""
    grouped = by_configuration(comparison)
    if grouped is None:
        return [row.name for row in comparison.rows]
    made = {tuple(row.overrides): row.name for row in grouped.rows}
    return [made[configuration(row)] for row in comparison.rows]


def average_curves(curves: Sequence[Curve]) -> tuple[Curve, list[tuple[float, float, float]]]:
    """The mean of curves at the steps that all have, and a band from lowest to highest.

    One curve is itself, without a band. Both are empty where fewer than two steps are shared.
    """
    if len(curves) == 1:
        return thin_curve(curves[0]), []
    values = [dict(curve) for curve in curves]
    shared = sorted(set.intersection(*map(set, values)))
    shared = shared[:: math.ceil(len(shared) / POINTS) or 1]
    if len(shared) < 2:
        return [], []
    at = {step: [of_curve[step] for of_curve in values] for step in shared}
    points = [(step, sum(here) / len(here)) for step, here in at.items()]
    return points, [(step, min(here), max(here)) for step, here in at.items()]


def _losses(comparison: Comparison) -> Iterator[Figure]:
    curves = read_losses(comparison)
    if not curves:
        return
    series = _series(comparison, curves)
    shown = {one.label: list(one.points) for one in series[:MOST_CURVES]}
    top = axis_top(by_configuration(comparison) or comparison, shown)
    about = "Training loss by step, to the last step of each run. "
    about += f"Arms that train the same lie on one another.{_about_series(series)}"
    beyond = [name for name, curve in shown.items() if any(loss > top for _, loss in curve)]
    if beyond:
        about += f" The axis ends where the others do: {format.listed(beyond)} went beyond."
    drawing = draw_curves(series[:MOST_CURVES], "step", "loss", top)
    yield Figure("Training loss", about, [("", "", drawing)])


def _attribution(comparison: Comparison, floor: float) -> Iterator[Figure]:
    attribution = comparison.benchmark.attribution if comparison.benchmark else None
    if attribution is None or not attribution.effects:
        return
    level, charts = attribution.level, []
    for side, heading, note in (
        ("added", "Added alone", "how many times as fast the plain run is with it"),
        ("removed", f"Within {level}", f"how many times as fast {level} is with it as without it"),
    ):
        measured = [e for e in attribution.effects if getattr(e, side) is not None]
        if bars := [_effect_bar(effect, side, floor) for effect in measured]:
            drawing = draw_bars(bars, 1.0, f"{heading}, each technique", floor)
            charts.append((heading, f": {note}", drawing))
    about = "Bars to the right of the upright line gain time, bars to the left lose it."
    if attribution.stopped:
        about += f" Measured until: {attribution.stopped}."
    yield Figure("What each technique is worth", about, charts)


def _effect_bar(effect: Effect, side: str, floor: float) -> Bar:
    """What a technique is worth, `side` being added or removed."""
    value, ends = getattr(effect, side), getattr(effect, f"{side}_interval")
    outside = ends is not None and abs(value - 1) > floor and (ends[0] > 1 or ends[1] < 1)
    kind = "unclear" if not outside else "faster" if value > 1 else "slower"
    text = format.times_interval(value, ends)
    return Bar(effect.name.replace("_", " "), value, ends, text, kind)


def read_losses(comparison: Comparison) -> dict[str, Curve]:
    """The training loss by step, for each row that has one of two steps or more."""
    curves = {row.name: _row_curve(row, comparison.home) for row in comparison.rows}
    return {name: curve for name, curve in curves.items() if len(curve) > 1}


def _row_curve(row: Row, home: Path | None) -> Curve:
    if home is not None and row.folder:
        if curve := read_curves(home / row.folder).get("train/loss"):
            return curve
    first = row.measured.losses if row.measured else []  # of the first steps
    return [(i, loss) for i, loss in enumerate(first, 1) if number(loss) is not None]


def axis_top(comparison: Comparison, curves: Mapping[str, Curve]) -> float:
    """The highest loss of the curves that did not diverge; infinite where none did."""
    sound = {row.name for row in comparison.rows if row.sound}
    starts = sorted(abs(curve[0][1]) for name, curve in curves.items() if name in sound)
    if not starts:
        return math.inf
    limit = DIVERGED * starts[(len(starts) - 1) // 2]
    tops = [max(loss for _, loss in curve) for curve in curves.values()]
    below = [top for top in tops if top <= limit]
    return max(below) if 0 < len(below) < len(tops) else math.inf
