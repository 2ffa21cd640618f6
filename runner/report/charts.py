"""Charts as inline SVG: bars with intervals, points with names, curves. Numbers are text as well,
so nothing is told by a colour or a length alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from runner.report.curves import pieces
from runner.report.places import together
from runner.report.svg import Markup, Scale, join, percent, shorten, tag, tick

BAR = 34  # pixels high, with the room around it
PLOT = 260
DASHES = (None, "7 4", "2 3", "10 3 2 3")
COLOURS = 7
SHAPES = 5
LETTER = 7.2  # pixels wide, about
LABEL = 18  # letters of a point's name
BESIDE = 14  # pixels up or down at which a name is still beside its point
NARROW = 250  # pixels of a plot on a phone: names that do not overlap there do so nowhere


@dataclass(frozen=True)
class Bar:
    """One bar: where it ends, the interval around that, and what is said beside it."""

    label: str
    value: float
    ends: tuple[float, float] | None
    said: str
    kind: str = "plain"  # reference | faster | slower | plain | hint | fail: how it is filled


def bars(
    items: Sequence[Bar], start: float, described: str, floor: float = 0.0, unit: str = "×"
) -> Markup:
    """Bars from `start` to each value, with their intervals; what lies in 1 ± `floor` is shaded."""
    ends = [end for item in items for end in (*(item.ends or ()), item.value)]
    ends = [end for end in ends if end < 1e6]
    bottom = max(1 - floor, 0.0)  # no ratio is below nothing
    low, high = min([start, bottom, *ends]), max([1 + floor, 1.0, *ends])
    room = 0.04 * (high - low)
    scale = Scale(low if low == start == 0 else low - room, high + room)
    rows = [
        tag(
            "li",
            tag("span", item.label, class_="label"),
            tag("span", item.said, class_="said"),
            _bar(item, start, floor, scale),
            class_=f"bar {item.kind}",
        )
        for item in items
    ]
    marks = [_x_label(scale(x), f"{tick(x)}{unit}") for x in scale.ticks()]
    axis = tag("svg", *marks, class_="axis", height=22, aria_hidden="true", focusable="false")
    return join(
        [tag("ul", *rows, class_="bars", aria_label=described), tag("div", axis, class_="bar-axis")]
    )


def _bar(item: Bar, start: float, floor: float, scale: Scale) -> Markup:
    middle = BAR / 2
    left, right = sorted((scale(start), scale(item.value)))
    parts = [_upright(scale(x), 0, BAR, "grid") for x in scale.ticks()]
    if floor:
        bottom = scale(max(1 - floor, 0.0))
        band = percent(scale(1 + floor) - bottom)
        parts.append(tag("rect", x=percent(bottom), y=0, width=band, height=BAR, class_="floor"))
    size = {"x": percent(left), "y": 9, "width": percent(right - left), "height": BAR - 18}
    parts.append(tag("rect", **size, class_="fill", data_value=f"{item.value:.6g}"))
    parts.append(_upright(scale(1.0), 0, BAR, "one"))
    if item.ends is not None:
        a, b = (scale(end) for end in item.ends)
        ends = {"x1": percent(a), "x2": percent(b), "y1": middle, "y2": middle}
        parts.append(tag("line", **ends, class_="whisker"))
        parts += [_upright(x, middle - 6, middle + 6, "whisker") for x in (a, b)]
    return tag("svg", *parts, height=BAR, aria_hidden="true", focusable="false")


def _upright(x: float, top: float, bottom: float, kind: str) -> Markup:
    return tag("line", x1=percent(x), x2=percent(x), y1=top, y2=bottom, class_=kind)


def _x_label(x: float, said: str) -> Markup:
    anchor = "start" if x < 6 else "end" if x > 94 else "middle"
    return tag("text", said, x=percent(x), y=15, text_anchor=anchor)


@dataclass(frozen=True)
class Point:
    """A place with a name."""

    label: str
    x: float
    y: float
    said: str  # all of it, for those who point at it or cannot see it


def scatter(points: Sequence[Point], x_title: str, y_title: str, described: str) -> Markup:
    """Points with their names beside them, from 0 on; those in one place share one name."""
    x_scale = Scale(0.0, 1.08 * max(p.x for p in points))
    y_scale = Scale(0.0, 1.15 * max(p.y for p in points))
    places = [(x_scale(p.x), _down(y_scale(p.y))) for p in points]
    narrow = [(x * NARROW / 100, y) for x, y in places]
    # a point is in the way of names, also its neighbours'
    placed = [(x - 6, y - 6, x + 6, y + 6) for x, y in narrow]
    drawn = []
    for i, (p, (x, y)) in enumerate(zip(points, places, strict=True)):
        drawn.append(tag("g", tag("title", p.said), _marker(i, x, y)))
    for group in together(narrow, near=10):
        names = ", ".join(points[i].label for i in group)
        name = shorten(names, LABEL if len(group) == 1 else 30)
        drawn.append(_named(name, *places[group[0]], placed))
    return _plot(drawn, x_scale, y_scale, x_title, y_title, described)


def _named(
    name: str, x: float, y: float, placed: list[tuple[float, float, float, float]]
) -> Markup:
    """The name on that side of its point where nothing else is, even on a phone.

    A line leads to one that is farther off.
    """
    wide, at = LETTER * len(name), x * NARROW / 100
    for side, drop in [(s, d) for d in (0, -14, 14, -28, 28, -42, 42) for s in (1, -1)]:
        left = at + 11 if side > 0 else at - 11 - wide
        box = (left, y + drop - 8, left + wide, y + drop + 6)
        free = all(box[2] < b[0] or b[2] < box[0] or box[3] < b[1] or b[3] < box[1] for b in placed)
        if free and left >= -4 and box[2] <= NARROW + 4 and 0 <= box[1] and box[3] <= PLOT:
            placed.append(box)
            anchor = "start" if side > 0 else "end"
            place = {"x": percent(x), "y": f"{y + drop + 4:.1f}", "dx": 11 * side}
            text = tag("text", name, **place, text_anchor=anchor, class_="name")
            lead = tag("line", x1=0, y1=0, x2=9 * side, y2=drop, class_="lead-line")
            far = tag("svg", lead, x=percent(x), y=f"{y:.1f}") if abs(drop) > BESIDE else ""
            return join([far, text])
    return Markup("")


def _marker(i: int, x: float, y: float) -> Markup:
    """One of several shapes, so that colour is not needed; drawn around 0 and moved there."""
    shapes = (
        tag("circle", r=6),
        tag("rect", x=-5.5, y=-5.5, width=11, height=11),
        tag("path", d="M0-7.5 7 5.5H-7Z"),
        tag("path", d="M0-7.5 7.5 0 0 7.5-7.5 0Z"),
        tag("path", d="M-2-7H2V-2H7V2H2V7H-2V2H-7V-2H-2Z"),
    )
    inner = tag("svg", shapes[i % SHAPES], x=percent(x), y=f"{y:.1f}", class_="marker")
    return tag("g", inner, class_=f"c{i % COLOURS}")


@dataclass(frozen=True)
class Series:
    """A curve; with `ends`, the interval around each of its points."""

    label: str
    points: Sequence[tuple[float, float]]
    ends: Sequence[tuple[float, float] | None] = ()
    look: int = 0  # which colour and dashes: the same in every chart of a page


def lines(
    series: Sequence[Series],
    x_title: str,
    y_title: str,
    described: str,
    x_names: Sequence[str] = (),
    reach: float = math.inf,
) -> Markup:
    """Curves over one another, told apart by colour and dashes; `x_names` are for x = 0, 1, …

    What is above `reach` leaves the top.
    """
    xs = [x for one in series for x, _ in one.points]
    ys = [y for one in series for _, y in one.points if y <= reach]
    ys += [end for one in series for ends in one.ends if ends for end in ends if end < 1e6]
    margin = 0.3 if x_names else 0.0  # points at the very edge would be cut in half
    x_scale = Scale(min(xs) - margin, max(xs) + margin)
    low, high = min(ys), max(ys)
    y_scale = Scale(low, high, log=True) if low > 0 and high / low > 30 else _loose(ys)
    drawn = []
    for one in series:
        i = one.look
        drawn_at = [
            " ".join(f"{10 * x_scale(x):.1f},{1000 - 10 * y_scale(y):.1f}" for x, y in piece)
            for piece in pieces(one.points, reach)
        ]
        dashes = DASHES[i % 4]
        curve = [
            tag("polyline", points=dots, class_="curve", stroke_dasharray=dashes)
            for dots in drawn_at
        ]
        view = {"viewBox": "0 0 1000 1000", "preserveAspectRatio": "none"}
        parts = [tag("svg", *curve, **view, width="100%", height="100%")]
        for (x, y), ends in zip(one.points, one.ends, strict=False):
            at = x_scale(x)
            if ends is not None:
                parts.append(
                    _upright(at, _down(y_scale(ends[1])), _down(y_scale(ends[0])), "curve")
                )
            parts.append(_marker(i, at, _down(y_scale(y))))
        drawn.append(tag("g", tag("title", one.label), *parts, class_=f"c{i % COLOURS}"))
    names = [(float(i), name) for i, name in enumerate(x_names)]
    plot = _plot(drawn, x_scale, y_scale, x_title, y_title, described, names)
    return join([plot, _legend(series)])


def _legend(series: Sequence[Series]) -> Markup:
    entries = []
    for one in series:
        i = one.look
        line = tag("line", x1=0, x2=36, y1=7, y2=7, class_="curve", stroke_dasharray=DASHES[i % 4])
        mark = tag("svg", line, width=36, height=14, aria_hidden="true", focusable="false")
        entries.append(tag("li", tag("span", mark, class_=f"c{i % COLOURS}"), one.label))
    return tag("ul", *entries, class_="legend")


def _plot(
    drawn: Sequence[Markup],
    x_scale: Scale,
    y_scale: Scale,
    x_title: str,
    y_title: str,
    described: str,
    x_names: Sequence[tuple[float, str]] = (),
) -> Markup:
    """Axes around what is drawn. They are SVGs of their own: only the plot's width may change."""
    y_ticks = [(_down(y_scale(y)), tick(y)) for y in y_scale.ticks()]
    grid = [tag("line", x1="0%", x2="100%", y1=y, y2=y, class_="grid") for y, _ in y_ticks]
    x_marks = list(x_names) or [(x, tick(x)) for x in x_scale.ticks()]
    x_marks = x_marks[:: max(1, -(-len(x_marks) // 5))]
    labels = [tag("text", said, x=52, y=f"{y + 4:.1f}", text_anchor="end") for y, said in y_ticks]
    frame = tag("line", x1="0%", x2="100%", y1=PLOT, y2=PLOT, class_="frame")
    about = {"role": "img", "aria_label": described}
    return tag(
        "div",
        tag("div", y_title, class_="y-title"),
        tag("svg", *labels, class_="y-axis", width=58, height=PLOT, aria_hidden="true"),
        tag("svg", *grid, frame, *drawn, class_="area", height=PLOT, **about),
        tag(
            "svg",
            *(_x_label(x_scale(x), said) for x, said in x_marks),
            class_="x-axis",
            height=22,
            aria_hidden="true",
        ),
        tag("div", x_title, class_="x-title"),
        class_="plot",
    )


def _down(y: float) -> float:
    """Per cent from below, as pixels from above."""
    return PLOT * (1 - y / 100)


def _loose(values: Sequence[float]) -> Scale:
    """A scale with some room on both sides of the values."""
    low, high = min(values), max(values)
    room = 0.12 * (high - low) or 0.1 * abs(high) or 1.0
    return Scale(low - room if low < 0 or low > room else 0.0, high + room)
