"""Charts as SVG: elements, scales, and the plot of curves and points that files and pages share.

Colours are attributes, which a page's own style replaces; `color` of a series is that of its curve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from runner.record.text import CONTROL

WIDTH, HEIGHT = 400, 348  # pixels of a plot, with its axes and its title
LEFT, ABOVE, ROOM, PLOT_HEIGHT = 58, 48, 322, 260  # of the axis, the title, and within the axes
COLOURS = ("#0b5cad", "#b3420e", "#00725a", "#84439c", "#6f5a00", "#b0206f", "#45606f")
DASHES = (None, "7 4", "2 3", "10 3 2 3")
MARKERS = (
    "M-6 0a6 6 0 1 0 12 0a6 6 0 1 0-12 0",
    "M-5.5-5.5h11v11h-11Z",
    "M0-7.5 7 5.5H-7Z",
    "M0-7.5 7.5 0 0 7.5-7.5 0Z",
    "M-2-7H2V-2H7V2H2V7H-2V2H-7V-2H-2Z",
)
"""Several shapes, so that colour is not needed; drawn around 0 and moved to their point."""
LARGEST, LEAST = 1e300, 1e-290  # on an axis: beyond, sums are not finite and parts are nothing
VOID = {"line", "rect", "path", "polyline", "polygon"}


@dataclass(frozen=True)
class Series:
    """A curve, or points by themselves; `style` is its colour, and its dashes or shape."""

    label: str
    points: Sequence[tuple[float, float]]
    style: int = 0
    text: str = ""  # beside its name
    band: Sequence[tuple[float, float, float]] = ()  # x, lowest, highest: shaded behind a curve
    scattered: bool = False  # points

    @property
    def colour(self) -> dict[str, str]:
        """The attributes that give a group its colour."""
        number = self.style % len(COLOURS)
        return {"class_": f"c{number}", "color": COLOURS[number]}


def printable(value: object) -> str:
    """Anything as text for a page: control characters and direction marks become blanks.

    Markup stays as it is; the caller escapes the rest.
    """
    if isinstance(value, Markup):
        return value
    return CONTROL.sub(" ", str(value)).translate({0xFFFE: " ", 0xFFFF: " "})


def tag(name: str, /, *inside: object, **attributes: object) -> Markup:
    """An element. `class_` is `class`, other underscores are hyphens; None leaves one out."""
    listed = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(printable(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID:
        return Markup(f"<{name}{listed}/>")  # noqa: S704  # every value is escaped
    return Markup(f"<{name}{listed}>{join(*inside)}</{name}>")  # noqa: S704  # as above


def join(*parts: object) -> Markup:
    """Elements and text in a row."""
    return Markup("").join(escape(printable(part)) for part in parts)


def tick_label(value: float) -> str:
    """A tick's label."""
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        return f"{value:.0e}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


class Scale:
    """From values to 0 … 1, evenly or by their logarithm."""

    def __init__(self, low: float, high: float, log: bool = False) -> None:
        low, high = (min(max(end, -LARGEST), LARGEST) for end in (low, high))
        self.log = log and low > 0
        if high - low < LEAST:
            high = low + (abs(low) if abs(low) > LEAST else 1.0)
        self.low, self.high = low, high
        ends = (math.log(low), math.log(high)) if self.log else (low, high)
        self.start, self.length = ends[0], ends[1] - ends[0]

    def __call__(self, value: float) -> float:
        """The position of the value; values outside lie on the edge."""
        value = min(max(value, self.low), self.high)
        return ((math.log(value) if self.log else value) - self.start) / self.length

    def ticks(self, most: int = 5) -> list[float]:
        """Round values for the axis, at most about so many."""
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            powers = [10.0**e for e in range(first, last + 1)]
            fine = [m * x for x in powers for m in (1, 2, 5) if self.low <= m * x <= self.high]
            inside = fine if len(fine) <= most else [x for x in fine if x in powers]
            return inside[:: max(1, math.ceil(len(inside) / most))]
        step = 10.0 ** math.floor(math.log10((self.high - self.low) / most))
        step *= next(m for m in (1, 2, 5, 10) if (self.high - self.low) / (step * m) <= most)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [i * step for i in range(first, last + 1)]


def curve_scales(series: Sequence[Series], top: float = math.inf) -> tuple[Scale, Scale]:
    """For the axes of curves: from 0 unless that is far away, by logarithm over two decades."""
    xs = [x for one in series for x, _ in one.points]
    ys = [y for one in series for _, y in one.points if y <= top]
    ys += [y for one in series for _, *ends in one.band for y in ends if y <= top]
    low, high = min(ys), max(ys)
    log = low > 0 and high / low > 30
    room = 0 if log else 0.12 * (high - low) or 0.1 * abs(high) or 1.0
    start = low - room if log or low < 0 or low > room else 0.0
    return Scale(min(xs), max(xs)), Scale(start, high + room, log)


def draw_plot(
    series: Sequence[Series], scales: tuple[Scale, Scale], titles: tuple[object, str], left: int = 0
) -> Markup:
    """A group `WIDTH` × `HEIGHT`, `left` pixels from the left; titles: the plot's, and of x."""
    x_scale, y_scale = scales
    grid = []
    for value in y_scale.ticks():
        y = round(PLOT_HEIGHT * (1 - y_scale(value)), 1)
        grid.append(tag("line", x2=ROOM, y1=y, y2=y, class_="grid", stroke="#e5e7eb"))
        grid.append(tag("text", tick_label(value), x=-8, y=round(y + 4, 1), text_anchor="end"))
    for value in x_scale.ticks():
        x = round(ROOM * x_scale(value), 1)
        grid.append(tag("text", tick_label(value), x=x, y=PLOT_HEIGHT + 18, text_anchor="middle"))
    grid.append(tag("text", titles[0], x=14 - LEFT, y=-20))
    grid.append(tag("text", titles[1], x=ROOM, y=PLOT_HEIGHT + 34, text_anchor="end"))
    drawn = [_draw_series(one, scales) for one in series]
    return tag("g", *grid, *drawn, transform=f"translate({left + LEFT} {ABOVE})")


def _draw_series(one: Series, scales: tuple[Scale, Scale]) -> Markup:
    def place(x: float, y: float) -> tuple[str, str]:
        return f"{ROOM * scales[0](x):.1f}", f"{PLOT_HEIGHT * (1 - scales[1](y)):.1f}"

    title = tag("title", f"{one.label}: {one.text}" if one.text else one.label)
    parts = []
    if one.scattered:
        places = [" ".join(place(x, y)) for x, y in one.points]
        parts = [draw_marker(one, transform=f"translate({at})") for at in places]
    else:
        if one.band:
            around = [(x, high) for x, _, high in one.band]
            around += [(x, low) for x, low, _ in reversed(one.band)]
            outline = " ".join(",".join(place(x, y)) for x, y in around)
            parts = [tag("polygon", points=outline, fill="currentColor", fill_opacity=0.17)]
        points = " ".join(",".join(place(x, y)) for x, y in one.points)
        parts.append(tag("polyline", points=points, **_line_style(one)))
    return tag("g", title, *parts, **one.colour)


def _line_style(one: Series) -> dict[str, object]:
    look: dict[str, object] = {"class_": "curve", "fill": "none", "stroke": "currentColor"}
    dashes = DASHES[one.style % len(DASHES)]
    return {**look, "stroke_width": 2, "stroke_linejoin": "round", "stroke_dasharray": dashes}


def draw_marker(one: Series, **place: object) -> Markup:
    """The shape of a series of points, around 0."""
    shape = MARKERS[one.style % len(MARKERS)]
    return tag("path", d=shape, class_="marker", fill="currentColor", stroke="#fff", **place)


def draw_key(one: Series) -> Markup:
    """A sample of a series, for a legend."""
    sample = tag("line", x1=-18, x2=18, **_line_style(one))
    mark = draw_marker(one) if one.scattered else sample
    size = {"width": 36, "height": 18, "viewBox": "-18 -9 36 18"}
    return tag("svg", mark, **size, **one.colour, aria_hidden="true", focusable="false")
