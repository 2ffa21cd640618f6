"""The figures of a comparison: bars with intervals, points and curves, with descriptions.

All numbers are given as text too, so nothing depends on colour or length alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from runner.core import format
from runner.measure import verdicts
from runner.measure.benchmark.result import Effect
from runner.measure.comparison import Comparison
from runner.measure.comparison_row import ComparisonRow
from runner.measure.curves import MAX_POINTS, Curve, downsample_curve, read_curves
from runner.measure.svg import (
    Scale,
    Series,
    curve_scales,
    draw_marker,
    draw_plot,
    join,
    line_style,
    tag,
    tick_label,
)

DIVERGENCE_FACTOR = 100  # times the usual initial loss, above which a curve diverged
MAX_CURVES = 12  # per plot: more cannot be distinguished
MIN_MEMORY_RATIO = 1.05  # smaller ratios of peak memory are not plotted
MAX_BARS = 40  # of a chart; the fastest and the slowest are kept
BAR_HEIGHT = 34  # pixels, including margins
MAX_REACH = 2.0  # times the highest ratio, and below the lowest: where an axis ends
MIN_AXIS = 1.1  # ratio of an axis' ends, at least
MIN_FLOOR = 0.1  # lowest end of the strip in which no difference is claimed
HIDDEN_ATTRIBUTES = {"aria_hidden": "true", "focusable": "false"}
BAR_KINDS = {
    "reference": "reference",
    "faster": "faster",
    "slower": "slower",
    "": "hint",
    "PARITY FAIL": "fail",
    "does not train": "fail",
}
"""A bar's fill, by verdict."""


@dataclass(frozen=True)
class Figure:
    """A section of the page: a heading, a description, and charts with their own headings."""

    heading: str
    about: str
    charts: list[tuple[str, str, Markup]]  # heading, note, drawing


@dataclass(frozen=True)
class Bar:
    """A bar: its end, the interval around it, and the text beside it."""

    label: str
    value: float | None
    interval: tuple[float, float] | None
    text: str
    kind: str = "plain"  # fill: reference | faster | slower | plain | hint | unclear | fail


def build_figures(comparison: Comparison) -> dict[str, list[Figure]]:
    """Return the figures that there are data for, by section name."""
    floor = (comparison.benchmark.claim_threshold or 0.0) if comparison.benchmark else 0.0
    search = comparison.search  # whose trials differ in what they train
    return {
        "speed": [] if search else list(_speed_figure(comparison.by_configuration, floor)),
        "attribution": list(_attribution_figure(comparison, floor)),
        "memory": [] if search else list(_memory_figure(comparison.by_configuration)),
        "validation": list(_validation_figure(comparison)),
        "losses": list(_loss_figure(comparison)),
    }


def draw_bars(bars: Sequence[Bar], description: str, floor: float = 0.0) -> Markup:
    """Draw ratios as bars from 1 on a logarithmic axis, with intervals, and 1 ± `floor` shaded.

    The axis fits the ratios; an interval goes at most `MAX_REACH` times beyond them on it, and has
    no end mark where it is wider. Positions are percentages, so that charts stretch with the page.
    """
    ratios = [bar.value for bar in bars if bar.value is not None and 1e-6 < bar.value < 1e6]
    ratios += [1 + floor, max(1 - floor, MIN_FLOOR)]
    ends = [end for bar in bars for end in bar.interval or () if not math.isnan(end)]
    low, high = min(ratios), max(ratios)
    low = min([low, *(max(end, low / MAX_REACH) for end in ends)])
    high = max([high, *(min(end, high * MAX_REACH) for end in ends)])
    margin = max(high / low, MIN_AXIS) ** 0.04
    scale = Scale(low / margin, high * margin, log=True)
    items, tick_labels = [], []
    for bar in bars:
        label, value = tag("span", bar.label, class_="label"), tag("span", bar.text, class_="value")
        drawing = _draw_bar(bar, floor, scale)
        items.append(tag("li", label, value, drawing, class_=f"bar {bar.kind}"))
    for tick in scale.ticks():
        position = scale(tick)
        anchor = "start" if position < 0.06 else "end" if position > 0.94 else "middle"
        place = {"x": f"{position:.3%}", "y": 15, "text_anchor": anchor}
        tick_labels.append(tag("text", f"{tick_label(tick)}×", **place))
    axis = tag("svg", *tick_labels, class_="axis", height=22, **HIDDEN_ATTRIBUTES)
    bar_list = tag("ul", *items, class_="bars", aria_label=description)
    return join(bar_list, tag("div", axis, class_="bar-axis"))


def _draw_bar(bar: Bar, floor: float, scale: Scale) -> Markup:
    center, value = BAR_HEIGHT / 2, 1.0 if bar.value is None else bar.value

    def line(kind: str, x1: float, x2: float, y1: float = 0, y2: float = BAR_HEIGHT) -> Markup:
        return tag("line", x1=f"{scale(x1):.3%}", x2=f"{scale(x2):.3%}", y1=y1, y2=y2, class_=kind)

    def box(kind: str, x1: float, x2: float, margin: float) -> Markup:
        left, right = sorted((scale(x1), scale(x2)))
        size = {"x": f"{left:.3%}", "width": f"{right - left:.3%}", "y": margin}
        return tag("rect", **size, height=BAR_HEIGHT - 2 * margin, class_=kind)

    parts = [line("grid", tick, tick) for tick in scale.ticks()]
    parts += [box("floor", 1 - floor, 1 + floor, 0)] if floor else []
    parts += [box("fill", 1.0, value, 9), line("one", 1.0, 1.0)]
    if bar.interval is not None:
        parts.append(line("whisker", *bar.interval, center, center))
        marked = [end for end in bar.interval if scale.low <= end <= scale.high]
        parts += [line("whisker", end, end, center - 6, center + 6) for end in marked]
    return tag("svg", *parts, height=BAR_HEIGHT, **HIDDEN_ATTRIBUTES)


def draw_series(
    series: Sequence[Series], x_title: str, y_title: str, scales: tuple[Scale, Scale]
) -> Markup:
    """Draw curves and points, distinguished by colour, dashes and shape, with a legend."""
    description = "; ".join(f"{item.label}: {item.text}" for item in series)
    attributes = {"role": "img", "aria_label": description}
    plot = tag("div", draw_plot(series, scales, (y_title, x_title), **attributes), class_="plot")
    legend, size = [], {"width": 36, "height": 18, "viewBox": "-18 -9 36 18"}
    for item in series:
        line = tag("line", x1=-18, x2=18, **line_style(item))
        marker = draw_marker(item) if item.scattered else line
        sample = tag("svg", marker, **size, **item.colour, **HIDDEN_ATTRIBUTES)
        texts = tag("span", item.label), tag("span", item.text, class_="value")
        legend.append(tag("li", sample, *texts))
    return join(plot, tag("ul", *legend, class_="legend"))


def _speed_figure(comparison: Comparison, floor: float) -> Iterator[Figure]:
    rows = [row for row in comparison.rows if row.finished and row.speedup is not None]
    if len(rows) < 2:
        return
    reference = comparison.reference or "its reference"
    about = f"Speed-up over {reference}, on a logarithmic axis; the vertical line is equal speed."
    if any(row.speedup_interval for row in rows):
        about += " Whiskers are 95 % intervals; one without an end mark goes on beyond the axis."
    if floor:
        about += f" No difference in the hatched strip, ± {format.share(floor)}, is claimed."
    if comparison.kind == "sweep":
        about += " Measured in turns, after the sweep."
    if len(rows) > MAX_BARS:
        about += f" The {MAX_BARS // 2} fastest and as many of the slowest of {len(rows)}."
        rows.sort(key=lambda row: row.speedup or 0.0, reverse=True)
        rows = rows[: MAX_BARS // 2] + rows[-MAX_BARS // 2 :]
    bars = []
    for row in rows:
        is_reference, interval = row.name == comparison.reference, row.speedup_interval
        verdict = "reference" if is_reference else verdicts.verdict(row, comparison)
        text = ", ".join(filter(None, (format.times_interval(row.speedup, interval), verdict)))
        kind = BAR_KINDS.get(verdict or ("unclear" if interval else ""), "unclear")
        bars.append(Bar(row.name, row.speedup, interval, text, kind))
    yield Figure("Speed", about, [("", "", draw_bars(bars, "speed-up of each row", floor))])


def _memory_figure(comparison: Comparison) -> Iterator[Figure]:
    points = []
    for style, row in enumerate(comparison.rows):
        rate, device_peak = row.number("samples_per_second"), row.number("peak_device_bytes")
        peak = device_peak or row.number("peak_process_bytes")
        if row.finished and rate is not None and peak is not None:
            values = f"{format.rate(rate)} samples/s, {format.size(peak)}"
            points.append(Series(row.name, [(rate, peak / 2**20)], style, values, scattered=True))
    peaks = [series.points[0][1] for series in points]
    if len(points) < 2 or max(peaks) < MIN_MEMORY_RATIO * min(peaks):
        return
    on_device = any(row.number("peak_device_bytes") for row in comparison.rows)
    about = f"Peak memory of the {'device' if on_device else 'process'} against samples per second"
    about += ": lower right is better. Both axes begin at 0."
    if len(points) > MAX_BARS:
        about += f" The {MAX_BARS} fastest of {len(points)}."
        points = sorted(points, key=lambda series: series.points[0][0], reverse=True)[:MAX_BARS]
    xs, ys = zip(*(series.points[0] for series in points), strict=True)
    scales = Scale(0.0, 1.08 * max(xs)), Scale(0.0, 1.15 * max(ys))
    drawing = draw_series(points, "samples per second", "MiB at the peak", scales)
    yield Figure("Memory against speed", about, [("", "", drawing)])


def _validation_figure(comparison: Comparison) -> Iterator[Figure]:
    """Yield the monitored metric by step; of replicates the mean, with a band."""
    monitor, root = comparison.monitor, comparison.root
    if not monitor or root is None:
        return
    rows = [row for row in comparison.rows if row.finished and row.folder]
    read = {row.name: read_curves(root / row.folder, [monitor]).get(monitor, []) for row in rows}
    curves = {name: curve for name, curve in read.items() if len(curve) > 1}
    if series := _build_series(comparison, curves):
        yield _curve_figure("Validation", f"{monitor} at each validation.", series, monitor)


def _loss_figure(comparison: Comparison) -> Iterator[Figure]:
    if not (series := _build_series(comparison, read_losses(comparison))):
        return
    curves = {one.label: list(one.points) for one in series[:MAX_CURVES]}
    top = loss_axis_limit(comparison.by_configuration, curves)
    about = "Training loss by step, to the last step of each run. "
    about += "Curves of runs that train the same overlap."
    off_axis = [name for name, curve in curves.items() if any(loss > top for _, loss in curve)]
    if off_axis:
        about += f" The axis fits the other curves; off the axis: {format.join_names(off_axis)}."
    yield _curve_figure("Training loss", about, series, "loss", top)


def _curve_figure(
    heading: str, about: str, series: Sequence[Series], title: str, top: float = math.inf
) -> Figure:
    """Return the figure of the first curves; y values above `top` are off the axis."""
    visible = series[:MAX_CURVES]
    if any(one.band for one in series):
        about += " A line is the mean of a configuration's runs, its band their range."
    if len(series) > MAX_CURVES:
        about += f" The first {MAX_CURVES} of {len(series)} are shown."
    drawing = draw_series(visible, "step", title, curve_scales(visible, top))
    return Figure(heading, about, [("", "", drawing)])


def _build_series(comparison: Comparison, curves: Mapping[str, Curve]) -> list[Series]:
    """Return a curve per row, or per configuration if it ran with several seeds or folds."""
    series = []
    for style, row in enumerate(comparison.by_configuration.rows):
        own_curves = [curves[x] for x in row.run_names or [row.name] if x in curves]
        points, band = average_curves(own_curves)
        if points:
            text = f"to {format.metric(points[-1][1])}"
            series.append(Series(row.name, points, style, text, band))
    return series


def average_curves(curves: Sequence[Curve]) -> tuple[Curve, list[tuple[float, float, float]]]:
    """Return the mean of the curves at shared steps, and a band from lowest to highest.

    A single curve is returned without a band. Both are empty if fewer than two steps are shared.
    """
    if len(curves) == 1:
        return downsample_curve(curves[0]), []
    values = [dict(curve) for curve in curves]
    shared = sorted(set.intersection(*map(set, values))) if values else []
    shared = shared[:: math.ceil(len(shared) / MAX_POINTS) or 1]
    if len(shared) < 2:
        return [], []
    values_by_step = {step: [points_by_step[step] for points_by_step in values] for step in shared}
    points = [(step, sum(values) / len(values)) for step, values in values_by_step.items()]
    return points, [(step, min(values), max(values)) for step, values in values_by_step.items()]


def read_losses(comparison: Comparison) -> dict[str, Curve]:
    """Return the training loss by step of each row that has two points or more."""
    curves = {row.name: _loss_curve(row, comparison.root) for row in comparison.rows}
    return {name: curve for name, curve in curves.items() if len(curve) > 1}


def _loss_curve(row: ComparisonRow, root: Path | None) -> Curve:
    recorded = read_curves(root / row.folder) if root is not None and row.folder else {}
    if curve := recorded.get("train/loss"):
        return curve
    first_losses = row.measured.losses if row.measured else []  # of the first steps
    return [(i, loss) for i, loss in enumerate(first_losses, 1) if format.finite(loss) is not None]


def loss_axis_limit(comparison: Comparison, curves: Mapping[str, Curve]) -> float:
    """Return the highest loss of curves that did not diverge; inf if none did."""
    valid_rows = {row.name for row in comparison.rows if row.is_valid}
    initial_losses = sorted(abs(c[0][1]) for name, c in curves.items() if name in valid_rows)
    if not initial_losses:
        return math.inf
    limit = DIVERGENCE_FACTOR * initial_losses[(len(initial_losses) - 1) // 2]
    maxima = [max(loss for _, loss in curve) for curve in curves.values()]
    converged = [top for top in maxima if top <= limit]
    return max(converged) if 0 < len(converged) < len(maxima) else math.inf


def _attribution_figure(comparison: Comparison, floor: float) -> Iterator[Figure]:
    attribution = comparison.benchmark.attribution if comparison.benchmark else None
    if attribution is None or not attribution.effects:
        return
    level, charts = attribution.level, []
    for side, heading, note in (
        ("added", "Added alone", "speed-up of the plain run with it"),
        ("removed", f"Within {level}", f"speed of {level} with it over {level} without it"),
    ):
        effects = [e for e in attribution.effects if getattr(e, side) is not None]
        if bars := [_effect_bar(effect, side, floor) for effect in effects]:
            charts.append(
                (heading, f": {note}", draw_bars(bars, f"{heading}, by technique", floor))
            )
    about = "Bars right of the vertical line save time, bars left of it cost time; the axis is "
    about += "logarithmic. A whisker without an end mark goes on beyond it."
    if attribution.stopped:
        about += f" Measured until: {attribution.stopped}."
    yield Figure("Speed-up by technique", about, charts)


def _effect_bar(effect: Effect, side: str, floor: float) -> Bar:
    value, interval = getattr(effect, side), getattr(effect, f"{side}_interval")
    kind = "unclear"
    if interval is not None and abs(value - 1) > floor and (interval[0] > 1 or interval[1] < 1):
        kind = "faster" if value > 1 else "slower"
    text = format.times_interval(value, interval)
    return Bar(effect.name.replace("_", " "), value, interval, text, kind)
