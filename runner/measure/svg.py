"""Draw charts as SVG: elements, scales, and plots of curves and points.

Colours are attributes, which a page's CSS overrides; a series sets `color` for its group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from runner.core.record.text import CONTROL

WIDTH, HEIGHT = 400, 348  # pixels of a plot, including axes and title
MARGIN_LEFT, MARGIN_TOP = 58, 48
PLOT_WIDTH, PLOT_HEIGHT = 322, 260  # of the plot area
COLOURS = ("#0b5cad", "#b3420e", "#00725a", "#84439c", "#6f5a00", "#b0206f", "#45606f")
DASHES = (None, "7 4", "2 3", "10 3 2 3")
MARKERS = (
    "M-6 0a6 6 0 1 0 12 0a6 6 0 1 0-12 0",
    "M-5.5-5.5h11v11h-11Z",
    "M0-7.5 7 5.5H-7Z",
    "M0-7.5 7.5 0 0 7.5-7.5 0Z",
    "M-2-7H2V-2H7V2H2V7H-2V2H-7V-2H-2Z",
)
"""Paths around (0, 0); shapes differ so that colour is not needed."""
MAX_VALUE, MIN_RANGE = 1e300, 1e-290  # of an axis: arithmetic stays finite and non-zero
NESTED = {"overflow": "visible", "aria_hidden": "true"}  # of a drawing in one with a description
VOID_ELEMENTS = {"line", "rect", "path", "polyline", "polygon"}


@dataclass(frozen=True)
class Series:
    """A curve or points; `style` selects the colour, and the dashes or marker."""

    label: str
    points: Sequence[tuple[float, float]]
    style: int = 0
    text: str = ""  # shown after its label
    band: Sequence[tuple[float, float, float]] = ()  # x, lowest, highest: shaded behind a curve
    scattered: bool = False  # points instead of a curve

    @property
    def colour(self) -> dict[str, str]:
        """The attributes that set a group's colour."""
        number = self.style % len(COLOURS)
        return {"class_": f"c{number}", "color": COLOURS[number]}


def printable(value: object) -> str:
    """Return text without control characters and direction marks (replaced by blanks).

    Markup is returned unchanged; other text is not escaped here.
    """
    if isinstance(value, Markup):
        return value
    return CONTROL.sub(" ", str(value)).translate({0xFFFE: " ", 0xFFFF: " "})


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """Return an element. `class_` becomes `class`, other `_` become `-`; None is omitted."""
    given = {k.rstrip("_").replace("_", "-"): x for k, x in attributes.items() if x is not None}
    attribute_text = "".join(f' {key}="{escape(printable(x))}"' for key, x in given.items())
    if name in VOID_ELEMENTS:
        return Markup(f"<{name}{attribute_text}/>")  # noqa: S704  # every value is escaped
    return Markup(f"<{name}{attribute_text}>{join(*children)}</{name}>")  # noqa: S704  # as above


def join(*parts: object) -> Markup:
    """Concatenate elements and escaped text."""
    return Markup("").join(escape(printable(part)) for part in parts)


def tick_label(value: float) -> str:
    """Format a tick's label."""
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        return f"{value:.0e}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


class Scale:
    """Maps values to [0, 1], linearly or logarithmically."""

    def __init__(self, low: float, high: float, log: bool = False) -> None:
        low, high = (min(max(end, -MAX_VALUE), MAX_VALUE) for end in (low, high))
        self.log = log and low > 0
        if high - low < MIN_RANGE:
            high = low + (abs(low) if abs(low) > MIN_RANGE else 1.0)
        self.low, self.high = low, high
        ends = (math.log(low), math.log(high)) if self.log else (low, high)
        self.start, self.length = ends[0], ends[1] - ends[0]

    def __call__(self, value: float) -> float:
        """Return the value's position; values outside are clamped."""
        value = min(max(value, self.low), self.high)
        return ((math.log(value) if self.log else value) - self.start) / self.length

    def ticks(self, max_ticks: int = 5) -> list[float]:
        """Return about `max_ticks` round values for the axis."""
        if self.log and self.high > 10 * self.low:  # else as on a linear axis
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            powers = [10.0**e for e in range(first, last + 1)]
            options = [m * x for x in powers for m in (1, 2, 5) if self.low <= m * x <= self.high]
            in_range = options if len(options) <= max_ticks else [x for x in options if x in powers]
            return in_range[:: max(1, math.ceil(len(in_range) / max_ticks))]
        step = 10.0 ** math.floor(math.log10((self.high - self.low) / max_ticks))
        step *= next(m for m in (1, 2, 5, 10) if (self.high - self.low) / (step * m) <= max_ticks)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [i * step for i in range(first, last + 1)]


def curve_scales(series: Sequence[Series], top: float = math.inf) -> tuple[Scale, Scale]:
    """Return x and y scales; y starts at 0 if that is near, and is logarithmic for wide ranges."""
    xs = [x for one in series for x, _ in one.points]
    ys = [y for one in series for _, y in one.points if y <= top]
    ys += [y for one in series for _, *ends in one.band for y in ends if y <= top]
    low, high = min(ys), max(ys)
    log = low > 0 and high / low > 30
    margin = 0 if log else 0.12 * (high - low) or 0.1 * abs(high) or 1.0
    start = low - margin if log or low < 0 or low > margin else 0.0
    return Scale(min(xs), max(xs)), Scale(start, high + margin, log)


def draw_plot(
    series: Sequence[Series], scales: tuple[Scale, Scale], titles: tuple[object, str], **box: object
) -> Markup:
    """Draw a plot area of any width, with axes around it; titles: of the plot and the x axis."""
    x_scale, y_scale = scales
    grid = []
    for value in y_scale.ticks():
        y = round(PLOT_HEIGHT * (1 - y_scale(value)), 1)
        grid.append(tag("line", x2="100%", y1=y, y2=y, class_="grid", stroke="#e5e7eb"))
        grid.append(tag("text", tick_label(value), x=-8, y=round(y + 4, 1), text_anchor="end"))
    for value in x_scale.ticks():
        x = f"{x_scale(value):.3%}"
        grid.append(tag("text", tick_label(value), x=x, y=PLOT_HEIGHT + 18, text_anchor="middle"))
    grid.append(tag("text", titles[0], x=14 - MARGIN_LEFT, y=-20))
    grid.append(tag("text", titles[1], x="100%", y=PLOT_HEIGHT + 34, text_anchor="end"))
    curves = [_draw_series(one, scales) for one in series]
    return tag("svg", *grid, *curves, **box, height=PLOT_HEIGHT, overflow="visible")


def _draw_series(series: Series, scales: tuple[Scale, Scale]) -> Markup:
    def to_pixels(x: float, y: float) -> tuple[str, str]:
        return f"{PLOT_WIDTH * scales[0](x):.1f}", f"{PLOT_HEIGHT * (1 - scales[1](y)):.1f}"

    title = tag("title", f"{series.label}: {series.text}" if series.text else series.label)
    parts = []
    if series.scattered:  # each in a place of its own, so that its shape is not stretched
        for x, y in series.points:
            place = {"x": f"{scales[0](x):.3%}", "y": to_pixels(x, y)[1]}
            parts.append(tag("svg", draw_marker(series), **place, **NESTED))
        return tag("g", title, *parts, **series.colour)
    if series.band:
        outline_points = [(x, high) for x, _, high in series.band]
        outline_points += [(x, low) for x, low, _ in reversed(series.band)]
        outline = " ".join(",".join(to_pixels(x, y)) for x, y in outline_points)
        parts = [tag("polygon", points=outline, fill="currentColor", fill_opacity=0.17)]
    points = " ".join(",".join(to_pixels(x, y)) for x, y in series.points)
    parts.append(tag("polyline", points=points, **line_style(series)))
    box = {"viewBox": f"0 0 {PLOT_WIDTH} {PLOT_HEIGHT}", "preserveAspectRatio": "none"}
    return tag("g", title, tag("svg", *parts, **box, **NESTED), **series.colour)


def line_style(series: Series) -> dict[str, object]:
    """Return the attributes of a line in the colour and the dashes of a series."""
    style: dict[str, object] = {"class_": "curve", "fill": "none", "stroke": "currentColor"}
    style |= {"stroke_linejoin": "round", "stroke_dasharray": DASHES[series.style % len(DASHES)]}
    return {**style, "stroke_width": 2, "vector_effect": "non-scaling-stroke"}


def draw_marker(series: Series) -> Markup:
    """Draw the marker of a series at the origin."""
    shape = MARKERS[series.style % len(MARKERS)]
    return tag("path", d=shape, class_="marker", fill="currentColor", stroke="#fff")
