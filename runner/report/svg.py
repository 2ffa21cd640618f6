"""What charts are made of: elements, series, scales."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from runner.record.text import CONTROL

PLOT_HEIGHT = 260  # pixels
DASHES = (None, "7 4", "2 3", "10 3 2 3")
LARGEST, LEAST = 1e300, 1e-290  # on an axis: beyond, sums are not finite and parts are nothing
VOID = {"line", "rect", "circle", "path", "polyline"}


@dataclass(frozen=True)
class Series:
    """A curve, or a point by itself; `style` is its colour, and its dashes or shape."""

    label: str
    points: Sequence[tuple[float, float]]
    style: int = 0
    text: str = ""  # said beside its name


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


def percent(value: float) -> str:
    """A position across."""
    return f"{value:.3f}%"


class Scale:
    """From values to 0 … 100, evenly or by their logarithm."""

    def __init__(self, low: float, high: float, log: bool = False) -> None:
        low, high = (min(max(end, -LARGEST), LARGEST) for end in (low, high))
        self.log = log and low > 0
        if high - low < LEAST:
            high = low + (abs(low) if abs(low) > LEAST else 1.0)
        self.low, self.high = low, high
        ends = (math.log(low), math.log(high)) if self.log else (low, high)
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
    low, high = min(ys), max(ys)
    log = low > 0 and high / low > 30
    room = 0 if log else 0.12 * (high - low) or 0.1 * abs(high) or 1.0
    start = low - room if log or low < 0 or low > room else 0.0
    return Scale(min(xs), max(xs)), Scale(start, high + room, log)
