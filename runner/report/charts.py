"""The charts of a comparison: bars with intervals, as inline SVG, and what is written above them.

Numbers are text as well, so nothing depends on a colour or a length alone. Charts stretch with
the page: positions across are per cent, so letters keep their size on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from runner.benchmark.result import Effect
from runner.record.text import CONTROL
from runner.report import format, verdicts
from runner.report.comparison import Comparison, Row

BAR_HEIGHT = 34  # pixels, with the room around it
LARGEST, LEAST = 1e300, 1e-290  # on an axis: beyond, sums are not finite and parts are nothing
VOID = {"line", "rect", "circle", "path", "polyline"}
HIDDEN = {"aria_hidden": "true", "focusable": "false"}


@dataclass(frozen=True)
class Bar:
    """A bar: where it ends, the interval around that, and the text beside it."""

    label: str
    value: float | None  # None: nothing is drawn, and the text says why
    ends: tuple[float, float] | None
    text: str
    kind: str = "plain"  # reference | faster | slower | plain | hint | unclear | fail: its fill


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
    return Markup(f"<{name}{listed}>{_join(*inside)}</{name}>")  # noqa: S704  # as above


def _join(*parts: object) -> Markup:
    return Markup("").join(escape(printable(part)) for part in parts)


def tick_label(value: float) -> str:
    """A tick's label."""
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        return f"{value:.0e}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _percent(value: float) -> str:
    return f"{value:.3f}%"


class Scale:
    """From values to 0 … 100."""

    def __init__(self, low: float, high: float) -> None:
        low, high = (min(max(end, -LARGEST), LARGEST) for end in (low, high))
        if high - low < LEAST:
            high = low + (abs(low) if abs(low) > LEAST else 1.0)
        self.low, self.high = low, high

    def __call__(self, value: float) -> float:
        """The position of the value, in per cent; values outside lie on the edge."""
        value = min(max(value, self.low), self.high)
        return 100 * ((value - self.low) / (self.high - self.low))

    def ticks(self, most: int = 5) -> list[float]:
        """Round values for the axis, at most about so many."""
        step = 10.0 ** math.floor(math.log10((self.high - self.low) / most))
        step *= next(m for m in (1, 2, 5, 10) if (self.high - self.low) / (step * m) <= most)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [i * step for i in range(first, last + 1)]


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
    return _join(listed, tag("div", axis, class_="bar-axis"))


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
        across = {"x1": _percent(a), "x2": _percent(b), "y1": middle, "y2": middle}
        parts.append(tag("line", **across, class_="whisker"))
        parts += [_upright(x, middle - 6, middle + 6, "whisker") for x in (a, b)]
    return tag("svg", *parts, height=BAR_HEIGHT, **HIDDEN)


def _box(left: float, right: float, above: float, **attributes: object) -> Markup:
    size = {"x": _percent(left), "y": above, "width": _percent(right - left)}
    return tag("rect", **size, height=BAR_HEIGHT - 2 * above, **attributes)


def _upright(x: float, top: float, bottom: float, kind: str) -> Markup:
    return tag("line", x1=_percent(x), x2=_percent(x), y1=top, y2=bottom, class_=kind)


def _x_label(x: float, text: str) -> Markup:
    anchor = "start" if x < 6 else "end" if x > 94 else "middle"
    return tag("text", text, x=_percent(x), y=15, text_anchor=anchor)


# -- figures ----------------------------------------------------------------------------------

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
    }


def _speed(comparison: Comparison, floor: float) -> Iterator[Figure]:
    rows = [row for row in comparison.rows if row.finished and row.speedup is not None]
    if len(rows) < 2:
        return
    reference = comparison.reference or "its reference"
    about = f"How many times as fast as {reference}; the upright line is as fast."
    if any(row.speedup_interval for row in rows):
        about += " Whiskers are 95 % intervals."
    if floor:
        about += f" Nothing in the hatched strip, ± {format.share(floor)}, is claimed."
    if comparison.kind == "sweep":
        about = f"Samples per second, as a ratio to {reference}: one run each, without intervals."
    bars = [_speed_bar(row, verdicts.verdict(row, comparison)) for row in rows]
    yield Figure("Speed", about, [("", "", draw_bars(bars, 0.0, "speed-up of each row", floor))])


def _speed_bar(row: Row, verdict: str) -> Bar:
    ratio = format.times_interval(row.speedup, row.speedup_interval)
    text = ", ".join(filter(None, (ratio, verdict)))
    return Bar(row.name, row.speedup, row.speedup_interval, text, KINDS.get(verdict, "unclear"))


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
