"""Charts as inline SVG in HTML: bars with intervals, points, curves.

Numbers are text as well, so nothing depends on a colour or a length alone. Charts stretch with
the page: positions across are per cent, and only curves lie in a stretched view of their own, so
letters keep their size on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from runner.report.svg import (
    DASHES,
    PLOT_HEIGHT,
    Scale,
    Series,
    curve_scales,
    join,
    percent,
    tag,
    tick_label,
)

BAR_HEIGHT = 34  # pixels, with the room around it
COLOURS = 7
MARKERS = (
    ("circle", {"r": 6}),
    ("rect", {"x": -5.5, "y": -5.5, "width": 11, "height": 11}),
    ("path", {"d": "M0-7.5 7 5.5H-7Z"}),
    ("path", {"d": "M0-7.5 7.5 0 0 7.5-7.5 0Z"}),
    ("path", {"d": "M-2-7H2V-2H7V2H2V7H-2V2H-7V-2H-2Z"}),
)
"""Several shapes, so that colour is not needed; drawn around 0 and moved to their point."""
HIDDEN = {"aria_hidden": "true", "focusable": "false"}


@dataclass(frozen=True)
class Bar:
    """A bar: where it ends, the interval around that, and the text beside it."""

    label: str
    value: float | None  # None: nothing is drawn, and the text says why
    ends: tuple[float, float] | None
    text: str
    kind: str = "plain"  # reference | faster | slower | plain | hint | unclear | fail: its fill


def draw_bars(
    bars: Sequence[Bar], start: float, described: str, floor: float = 0.0, unit: str = "×"
) -> Markup:
    """Bars from `start` to each value, with their intervals; 1 ± `floor` is shaded."""
    values = [x for bar in bars for x in (*(bar.ends or ()), bar.value) if x is not None]
    values = [x for x in values if x < 1e6]
    low, high = min([start, max(1 - floor, 0.0), *values]), max([1 + floor, 1.0, *values])
    room = 0.04 * (high - low)
    scale = Scale(low if low == start == 0 else low - room, high + room)
    items = [
        tag(
            "li",
            tag("span", bar.label, class_="label"),
            tag("span", bar.text, class_="value"),
            _bar(bar, start, floor, scale),
            class_=f"bar {bar.kind}",
        )
        for bar in bars
    ]
    marks = [_x_label(scale(x), f"{tick_label(x)}{unit}") for x in scale.ticks()]
    axis = tag("svg", *marks, class_="axis", height=22, **HIDDEN)
    listed = tag("ul", *items, class_="bars", aria_label=described)
    return join(listed, tag("div", axis, class_="bar-axis"))


def _bar(bar: Bar, start: float, floor: float, scale: Scale) -> Markup:
    middle, value = BAR_HEIGHT / 2, bar.value or 0.0
    parts = [_upright(scale(x), 0, BAR_HEIGHT, "grid") for x in scale.ticks()]
    if floor:
        parts.append(_box(scale(max(1 - floor, 0.0)), scale(1 + floor), 0, class_="floor"))
    left, right = sorted((scale(start), scale(value)))
    parts.append(_box(left, right, 9, class_="fill", data_value=f"{value:.6g}"))
    parts.append(_upright(scale(1.0), 0, BAR_HEIGHT, "one"))
    if bar.ends is not None:
        a, b = (scale(end) for end in bar.ends)
        across = {"x1": percent(a), "x2": percent(b), "y1": middle, "y2": middle}
        parts.append(tag("line", **across, class_="whisker"))
        parts += [_upright(x, middle - 6, middle + 6, "whisker") for x in (a, b)]
    return tag("svg", *parts, height=BAR_HEIGHT, **HIDDEN)


def _box(left: float, right: float, above: float, **attributes: object) -> Markup:
    size = {"x": percent(left), "y": above, "width": percent(right - left)}
    return tag("rect", **size, height=BAR_HEIGHT - 2 * above, **attributes)


def _upright(x: float, top: float, bottom: float, kind: str) -> Markup:
    return tag("line", x1=percent(x), x2=percent(x), y1=top, y2=bottom, class_=kind)


def _x_label(x: float, text: str) -> Markup:
    anchor = "start" if x < 6 else "end" if x > 94 else "middle"
    return tag("text", text, x=percent(x), y=15, text_anchor=anchor)


def draw_points(series: Sequence[Series], x_title: str, y_title: str) -> Markup:
    """Points on axes from 0, told apart by colour and shape; names and values stand below."""
    xs, ys = zip(*(point for one in series for point in one.points), strict=True)
    x_scale, y_scale = Scale(0.0, 1.08 * max(xs)), Scale(0.0, 1.15 * max(ys))
    drawn, marks = [], []
    for one in series:
        (x, y), (name, size) = one.points[0], MARKERS[one.style % len(MARKERS)]
        shape = tag(name, **size)
        place = {"x": percent(x_scale(x)), "y": f"{y_scale.down(y):.1f}"}
        drawn.append(tag("svg", shape, **place, class_="marker"))
        view = {"viewBox": "-9 -9 18 18", "width": 18, "height": 18}
        marks.append(tag("svg", shape, class_="marker", **view, **HIDDEN))
    return _plot(series, drawn, marks, (x_scale, y_scale), (x_title, y_title))


def draw_curves(
    series: Sequence[Series], x_title: str, y_title: str, top: float = math.inf
) -> Markup:
    """Curves over one another, told apart by colour and dashes; the axis ends at `top`."""
    x_scale, y_scale = curve_scales(series, top)
    view = {"viewBox": "0 0 1000 1000", "preserveAspectRatio": "none"}
    drawn, marks = [], []
    for one in series:
        places = ((10 * x_scale(x), 1000 - 10 * y_scale(y)) for x, y in one.points)
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        style = {"class_": "curve", "stroke_dasharray": DASHES[one.style % len(DASHES)]}
        curve = tag("polyline", points=line, **style)
        drawn.append(tag("svg", curve, **view, width="100%", height="100%"))
        sample = tag("line", x1=0, x2=36, y1=7, y2=7, **style)
        marks.append(tag("svg", sample, width=36, height=14, **HIDDEN))
    return _plot(series, drawn, marks, (x_scale, y_scale), (x_title, y_title))


def _plot(
    series: Sequence[Series],
    drawn: Sequence[Markup],
    marks: Sequence[Markup],
    scales: tuple[Scale, Scale],
    titles: tuple[str, str],
) -> Markup:
    """Axes around the drawings, and a legend with a mark for each.

    Axes are SVGs of their own: only the plot's width may change.
    """
    x_scale, y_scale = scales
    y_ticks = [(y_scale.down(y), tick_label(y)) for y in y_scale.ticks()]
    across = {"x1": "0%", "x2": "100%"}
    grid = [tag("line", **across, y1=y, y2=y, class_="grid") for y, _ in y_ticks]
    frame = tag("line", **across, y1=PLOT_HEIGHT, y2=PLOT_HEIGHT, class_="frame")
    labels = [tag("text", text, x=52, y=f"{y + 4:.1f}", text_anchor="end") for y, text in y_ticks]
    x_labels = [_x_label(x_scale(x), tick_label(x)) for x in x_scale.ticks()]
    titled, legend = [], []
    for one, drawing, mark in zip(series, drawn, marks, strict=True):
        colour = f"c{one.style % COLOURS}"
        text = tag("span", one.text, class_="value") if one.text else ""
        title = tag("title", f"{one.label}: {one.text}" if one.text else one.label)
        titled.append(tag("g", title, drawing, class_=colour))
        legend.append(tag("li", tag("span", mark, class_=colour), tag("span", one.label), text))
    described = "; ".join(f"{one.label}: {one.text}" for one in series)
    area = {"class_": "area", "height": PLOT_HEIGHT, "role": "img", "aria_label": described}
    plot = tag(
        "div",
        tag("div", titles[1], class_="y-title"),
        tag("svg", *labels, class_="y-axis", width=58, height=PLOT_HEIGHT, aria_hidden="true"),
        tag("svg", *grid, frame, *titled, **area),
        tag("svg", *x_labels, class_="x-axis", height=22, aria_hidden="true"),
        tag("div", titles[0], class_="x-title"),
        class_="plot",
    )
    return join(plot, tag("ul", *legend, class_="legend"))
