"""Charts as inline SVG: bars with intervals, named points, curves.

Numbers are text as well, so nothing is told by a colour or a length alone. Charts stretch with
the page: positions across are per cent, and only curves lie in a stretched view of their own, so
letters keep their size on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from runner.record.text import CONTROL
from runner.report.curves import clip_curve
from runner.report.format import tick_label
from runner.report.naming import shorten_middle

BAR_HEIGHT = 34  # pixels, with the room around it
PLOT_HEIGHT = 260
DASHES = (None, "7 4", "2 3", "10 3 2 3")
COLOURS = 7
LETTER = 7.2  # pixels wide, about
LABEL = 18  # letters of a point's name
BESIDE = 14  # pixels up or down at which a name is still beside its point
NARROW = 250  # pixels of a plot on a phone: names that do not overlap there do so nowhere
LARGEST, LEAST = 1e300, 1e-290  # on an axis: beyond, sums are not finite and parts are nothing
VOID = {"line", "rect", "circle", "path", "polyline"}
MARKERS = (
    ("circle", {"r": 6}),
    ("rect", {"x": -5.5, "y": -5.5, "width": 11, "height": 11}),
    ("path", {"d": "M0-7.5 7 5.5H-7Z"}),
    ("path", {"d": "M0-7.5 7.5 0 0 7.5-7.5 0Z"}),
    ("path", {"d": "M-2-7H2V-2H7V2H2V7H-2V2H-7V-2H-2Z"}),
)
"""Several shapes, so that colour is not needed; drawn around 0 and moved to their point."""
HIDDEN = {"aria_hidden": "true", "focusable": "false"}

Interval = tuple[float, float] | None


@dataclass(frozen=True)
class Bar:
    """A bar: where it ends, the interval around that, and the text beside it."""

    label: str
    value: float | None  # None: nothing is drawn, and the text says why
    ends: Interval
    text: str
    kind: str = "plain"  # reference | faster | slower | plain | hint | unclear | fail: its fill


@dataclass(frozen=True)
class Point:
    """A place with a name."""

    label: str
    x: float
    y: float
    text: str  # all of it, for those who point at it or cannot see it


@dataclass(frozen=True)
class Series:
    """A curve; with `ends`, the interval around each of its points."""

    label: str
    points: Sequence[tuple[float, float]]
    ends: Sequence[Interval] = ()
    style: int = 0  # which colour and dashes: the same in every chart of a page


def printable(value: object) -> str:
    """Anything as text for a page: control characters and direction marks become blanks.

    Markup stays as it is; the caller escapes the rest.
    """
    if isinstance(value, Markup):
        return value
    return CONTROL.sub(" ", str(value)).translate({0xFFFE: " ", 0xFFFF: " "})


def tag(name: str, /, *inside: object, **attributes: object) -> Markup:
    """An element. `class_` is `class`, other underscores are hyphens; None leaves one out."""
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(printable(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID:
        return Markup(f"<{name}{told}/>")  # noqa: S704  # every value is escaped
    return Markup(f"<{name}{told}>{_join(*inside)}</{name}>")  # noqa: S704  # as above


def _join(*parts: object) -> Markup:
    return Markup("").join(escape(printable(part)) for part in parts)


def _percent(value: float) -> str:
    return f"{value:.3f}%"


class Scale:
    """From values to 0 … 100, evenly or by their logarithm."""

    def __init__(self, low: float, high: float, log: bool = False) -> None:
        low, high = (min(max(end, -LARGEST), LARGEST) for end in (low, high))
        self.log = log and low > 0
        if high - low < LEAST:
            high = low + (abs(low) if abs(low) > LEAST else 1.0)
        self.low, self.high = low, high
        ends = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        self.start, self.length = ends[0], ends[1] - ends[0]

    def __call__(self, value: float) -> float:
        """The position of the value, in per cent; values outside lie on the edge."""
        value = min(max(value, self.low), self.high)
        at = math.log(value) if self.log else value
        return 100 * ((at - self.start) / self.length)

    def down(self, value: float) -> float:
        """The same in pixels from the top of a plot."""
        return PLOT_HEIGHT * (1 - self(value) / 100)

    def ticks(self, most: int = 5) -> list[float]:
        """Round values for the axis, at most about so many."""
        if self.log:
            return self._powers(most)
        step = 10.0 ** math.floor(math.log10((self.high - self.low) / most))
        step *= next(m for m in (1, 2, 5, 10) if (self.high - self.low) / (step * m) <= most)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [i * step for i in range(first, last + 1)]

    def _powers(self, most: int) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        inside: list[float] = []
        for steps in ((1, 2, 5), (1,)):  # many are thinned out to every so many-th power
            values = [m * 10.0**e for e in range(first, last + 1) for m in steps]
            inside = [x for x in values if self.low <= x <= self.high]
            if len(inside) <= most:
                break
        return inside[:: max(1, math.ceil(len(inside) / most))]


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
            tag("span", bar.text, class_="said"),
            _bar(bar, start, floor, scale),
            class_=f"bar {bar.kind}",
        )
        for bar in bars
    ]
    marks = [_x_label(scale(x), f"{tick_label(x)}{unit}") for x in scale.ticks()]
    axis = tag("svg", *marks, class_="axis", height=22, **HIDDEN)
    listed = tag("ul", *items, class_="bars", aria_label=described)
    return _join(listed, tag("div", axis, class_="bar-axis"))


def _bar(bar: Bar, start: float, floor: float, scale: Scale) -> Markup:
    middle, value = BAR_HEIGHT / 2, bar.value or 0.0
    left, right = sorted((scale(start), scale(value)))
    parts = [_upright(scale(x), 0, BAR_HEIGHT, "grid") for x in scale.ticks()]
    if floor:
        bottom = scale(max(1 - floor, 0.0))
        band = _percent(scale(1 + floor) - bottom)
        x = _percent(bottom)
        parts.append(tag("rect", x=x, y=0, width=band, height=BAR_HEIGHT, class_="floor"))
    size = {"x": _percent(left), "y": 9, "width": _percent(right - left), "height": BAR_HEIGHT - 18}
    parts.append(tag("rect", **size, class_="fill", data_value=f"{value:.6g}"))
    parts.append(_upright(scale(1.0), 0, BAR_HEIGHT, "one"))
    if bar.ends is not None:
        a, b = (scale(end) for end in bar.ends)
        ends = {"x1": _percent(a), "x2": _percent(b), "y1": middle, "y2": middle}
        parts.append(tag("line", **ends, class_="whisker"))
        parts += [_upright(x, middle - 6, middle + 6, "whisker") for x in (a, b)]
    return tag("svg", *parts, height=BAR_HEIGHT, **HIDDEN)


def _upright(x: float, top: float, bottom: float, kind: str) -> Markup:
    return tag("line", x1=_percent(x), x2=_percent(x), y1=top, y2=bottom, class_=kind)


def _x_label(x: float, text: str) -> Markup:
    anchor = "start" if x < 6 else "end" if x > 94 else "middle"
    return tag("text", text, x=_percent(x), y=15, text_anchor=anchor)


def draw_points(points: Sequence[Point], x_title: str, y_title: str, described: str) -> Markup:
    """Points with their names beside them, from 0 on; those in one place share one name."""
    x_scale = Scale(0.0, 1.08 * max(p.x for p in points))
    y_scale = Scale(0.0, 1.15 * max(p.y for p in points))
    places = [(x_scale(p.x), y_scale.down(p.y)) for p in points]
    narrow = [(x * NARROW / 100, y) for x, y in places]
    # a point is in the way of names, also its neighbours'
    placed = [(x - 6, y - 6, x + 6, y + 6) for x, y in narrow]
    drawn = [
        tag("g", tag("title", point.text), _marker(i, x, y))
        for i, (point, (x, y)) in enumerate(zip(points, places, strict=True))
    ]
    for group in group_near(narrow, near=10):
        names = ", ".join(points[i].label for i in group)
        name = shorten_middle(names, LABEL if len(group) == 1 else 30)
        drawn.append(_name_beside(name, *places[group[0]], placed))
    return _plot(drawn, (x_scale, y_scale), (x_title, y_title), described)


def group_near(places: Sequence[tuple[float, float]], near: float) -> list[list[int]]:
    """The points by number, those nearer than `near` to another's place, both ways, with it."""
    groups: list[list[int]] = []
    for i, (x, y) in enumerate(places):
        for group in groups:
            a, b = places[group[0]]
            if abs(x - a) < near and abs(y - b) < near:
                group.append(i)
                break
        else:
            groups.append([i])
    return groups


def _name_beside(
    name: str, x: float, y: float, placed: list[tuple[float, float, float, float]]
) -> Markup:
    """The name on that side of its point where nothing else is; a line leads to one far off."""
    wide, at = LETTER * len(name), x * NARROW / 100
    for side, drop in [(s, d) for d in (0, -14, 14, -28, 28, -42, 42) for s in (1, -1)]:
        left = at + 11 if side > 0 else at - 11 - wide
        box = (left, y + drop - 8, left + wide, y + drop + 6)
        free = all(box[2] < b[0] or b[2] < box[0] or box[3] < b[1] or b[3] < box[1] for b in placed)
        inside = left >= -4 and box[2] <= NARROW + 4 and 0 <= box[1] and box[3] <= PLOT_HEIGHT
        if free and inside:
            placed.append(box)
            anchor = "start" if side > 0 else "end"
            place = {"x": _percent(x), "y": f"{y + drop + 4:.1f}", "dx": 11 * side}
            text = tag("text", name, **place, text_anchor=anchor, class_="name")
            line = tag("line", x1=0, y1=0, x2=9 * side, y2=drop, class_="lead-line")
            far = tag("svg", line, x=_percent(x), y=f"{y:.1f}") if abs(drop) > BESIDE else ""
            return _join(far, text)
    return Markup("")


def _marker(i: int, x: float, y: float) -> Markup:
    shape, size = MARKERS[i % len(MARKERS)]
    inner = tag("svg", tag(shape, **size), x=_percent(x), y=f"{y:.1f}", class_="marker")
    return tag("g", inner, class_=f"c{i % COLOURS}")


def draw_curves(
    series: Sequence[Series],
    x_title: str,
    y_title: str,
    described: str,
    x_names: Sequence[str] = (),
    top: float = math.inf,
) -> Markup:
    """Curves over one another, told apart by colour and dashes; `x_names` are for x = 0, 1, …

    What is above `top` leaves the plot.
    """
    xs = [x for one in series for x, _ in one.points]
    ys = [y for one in series for _, y in one.points if y <= top]
    ys += [end for one in series for ends in one.ends if ends for end in ends if end < 1e6]
    margin = 0.3 if x_names else 0.0  # points at the very edge would be cut in half
    x_scale = Scale(min(xs) - margin, max(xs) + margin)
    low, high = min(ys), max(ys)
    y_scale = Scale(low, high, log=True) if low > 0 and high / low > 30 else _loose_scale(ys)
    drawn = [_curve(one, x_scale, y_scale, top) for one in series]
    names = [(float(i), name) for i, name in enumerate(x_names)]
    plot = _plot(drawn, (x_scale, y_scale), (x_title, y_title), described, names)
    return _join(plot, _legend(series))


def _curve(one: Series, x_scale: Scale, y_scale: Scale, top: float) -> Markup:
    dashes = DASHES[one.style % len(DASHES)]
    lines = [
        " ".join(f"{10 * x_scale(x):.1f},{1000 - 10 * y_scale(y):.1f}" for x, y in piece)
        for piece in clip_curve(one.points, top)
    ]
    curve = [tag("polyline", points=d, class_="curve", stroke_dasharray=dashes) for d in lines]
    view = {"viewBox": "0 0 1000 1000", "preserveAspectRatio": "none"}
    parts = [tag("svg", *curve, **view, width="100%", height="100%")]
    for (x, y), ends in zip(one.points, one.ends, strict=False):
        at = x_scale(x)
        if ends is not None:
            parts.append(_upright(at, y_scale.down(ends[1]), y_scale.down(ends[0]), "curve"))
        parts.append(_marker(one.style, at, y_scale.down(y)))
    return tag("g", tag("title", one.label), *parts, class_=f"c{one.style % COLOURS}")


def _legend(series: Sequence[Series]) -> Markup:
    entries = []
    for one in series:
        dashes = DASHES[one.style % len(DASHES)]
        line = tag("line", x1=0, x2=36, y1=7, y2=7, class_="curve", stroke_dasharray=dashes)
        mark = tag("svg", line, width=36, height=14, **HIDDEN)
        colour = f"c{one.style % COLOURS}"
        entries.append(tag("li", tag("span", mark, class_=colour), one.label))
    return tag("ul", *entries, class_="legend")


def _plot(
    drawn: Sequence[Markup],
    scales: tuple[Scale, Scale],
    titles: tuple[str, str],
    described: str,
    x_names: Sequence[tuple[float, str]] = (),
) -> Markup:
    """Axes around the drawing. They are SVGs of their own: only the plot's width may change."""
    x_scale, y_scale = scales
    y_ticks = [(y_scale.down(y), tick_label(y)) for y in y_scale.ticks()]
    across = {"x1": "0%", "x2": "100%"}
    grid = [tag("line", **across, y1=y, y2=y, class_="grid") for y, _ in y_ticks]
    frame = tag("line", **across, y1=PLOT_HEIGHT, y2=PLOT_HEIGHT, class_="frame")
    labels = [tag("text", text, x=52, y=f"{y + 4:.1f}", text_anchor="end") for y, text in y_ticks]
    marks = list(x_names) or [(x, tick_label(x)) for x in x_scale.ticks()]
    marks = marks[:: max(1, -(-len(marks) // 5))]
    x_labels = [_x_label(x_scale(x), text) for x, text in marks]
    area = {"class_": "area", "height": PLOT_HEIGHT, "role": "img", "aria_label": described}
    return tag(
        "div",
        tag("div", titles[1], class_="y-title"),
        tag("svg", *labels, class_="y-axis", width=58, height=PLOT_HEIGHT, aria_hidden="true"),
        tag("svg", *grid, frame, *drawn, **area),
        tag("svg", *x_labels, class_="x-axis", height=22, aria_hidden="true"),
        tag("div", titles[0], class_="x-title"),
        class_="plot",
    )


def _loose_scale(values: Sequence[float]) -> Scale:
    """A scale with some room on both sides of the values."""
    low, high = min(values), max(values)
    room = 0.12 * (high - low) or 0.1 * abs(high) or 1.0
    return Scale(low - room if low < 0 or low > room else 0.0, high + room)
