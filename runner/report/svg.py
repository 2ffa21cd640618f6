"""Elements of pages and charts, as text. Everything that is not markup is escaped here.

Charts stretch with the page: across, places are per cent, and only lines that have to bend lie in
a stretched view of their own. So letters keep their size on a phone.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence

BAD = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0), *range(0xD800, 0xE000), 0xFFFE, 0xFFFF], " ")
TURNING = dict.fromkeys([0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)], " ")


class Markup(str):
    """Text that is markup already, and is not escaped again."""

    __slots__ = ()


def text(value: object) -> Markup:
    """Anything, as text in a page; what would turn the direction of writing is left out."""
    flat = str(value).translate(BAD | TURNING)
    return Markup(html.escape(flat, quote=True))


def prose(value: str) -> str:
    """Text in which a number and its unit stay on one line."""
    return re.sub(r"(?<=\d) (?=%|×|s\b|MiB|GiB|ms\b)|(?<=±) ", "\u00a0", value)


def tag(name: str, /, *inside: object, **attributes: object) -> Markup:
    """An element. `class_` is `class`, other underscores are hyphens; None leaves one out."""
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in ("meta", "br", "line", "rect", "circle", "path", "polyline", "col"):
        return Markup(f"<{name}{told}/>")
    return Markup(f"<{name}{told}>{join(inside)}</{name}>")


def join(parts: Sequence[object]) -> Markup:
    """Parts one after the other; those that are not markup are escaped."""
    return Markup("".join(part if isinstance(part, Markup) else text(part) for part in parts))


def percent(value: float) -> str:
    """A place or width, as SVG takes it."""
    return f"{value:.3f}%"


LARGEST, LEAST = 1e300, 1e-290  # on an axis: beyond, sums are not finite and parts are nothing


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
        """Where the value lies, in per cent; what is outside lies on the edge."""
        value = min(max(value, self.low), self.high)
        at = math.log(value) if self.log else value
        return 100 * ((at - self.start) / self.length)

    def ticks(self, most: int = 5) -> list[float]:
        """Round values for the axis, at most about so many."""
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            for steps in ((1, 2, 5), (1,)):  # many are thinned out to every so many-th power
                found = [m * 10.0**e for e in range(first, last + 1) for m in steps]
                found = [x for x in found if self.low <= x <= self.high]
                if len(found) <= most:
                    break
            return found[:: max(1, math.ceil(len(found) / most))]
        step = 10.0 ** math.floor(math.log10((self.high - self.low) / most))
        step *= next(m for m in (1, 2, 5, 10) if (self.high - self.low) / (step * m) <= most)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [i * step for i in range(first, last + 1)]


def tick(value: float) -> str:
    """A tick's label."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.0e}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")
    if abs(value) >= 10_000:
        return f"{value / 1000:,.6g}k"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def shorten(name: str, most: int) -> str:
    """A name with its middle left out where it is longer than that."""
    if len(name) <= most:
        return name
    return f"{name[: most // 2]}…{name[len(name) - (most - most // 2 - 1) :]}"
