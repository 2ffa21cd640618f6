"""Bars, points and lines, 640 pixels wide, with letters that can be read in a thumbnail."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw

from runner.record.drawing import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    PAPER,
    RED,
    SIDE,
    fit,
    font,
    shorten,
    turned,
    width,
)
from runner.report.charts import LARGEST
from runner.report.charts import group_near as together
from runner.report.curves import clip_curve as pieces
from runner.report.naming import labels

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from runner.report.curves import Curve
    from runner.report.pictures import Bar, Point

Colour = tuple[int, int, int]

EDGE = 16
TITLE = 56
NAME, NUMBER = 26, 24  # sizes of letters
LONG = 40  # letters of a name above its bar
LETTERS = 28  # of a name below a picture, beside its numbers
MARKED = 4  # numbers on one mark
GRID, BAND = (222, 226, 230), (233, 236, 239)
COLOURS: tuple[Colour, ...] = (
    (0, 114, 178), (213, 94, 0), (0, 158, 115), (204, 121, 167),
    (86, 180, 233), (230, 159, 0), (90, 90, 90), (150, 140, 0),
)  # fmt: skip
"""Told apart by the colour-blind as well (Okabe and Ito); the numbers are there without colour."""


def bars(
    title: str, shown: Sequence[Bar], floor: float, total: int, level: str = ""
) -> NDArray[np.uint8]:
    """A name and a bar below it for each, with its interval, the numbers beside.

    Bars start at nothing and a line marks 1; with a `level` they start at 1, on a logarithmic
    scale, two for each of its techniques. The band around 1 is the noise floor.
    """
    ratio = bool(level)
    lanes = _lanes(shown, ratio)
    height = TITLE + (40 if ratio else 0) + lanes[-1][2] + EDGE
    picture, draw = _paper(height, _of(title, len(shown), total))
    top = TITLE
    if ratio:
        _legend(draw, top, [(BLUE, "alone"), (ORANGE, f"within {level}")])
        top += 40
    beside = max(width(bar.told, NUMBER) for bar in shown if bar.value is not None) + 14
    at = _ratios(shown, SIDE - EDGE - beside) if ratio else _from_nothing(shown, SIDE - beside)
    names = labels([bar.name for bar in shown], LONG)
    for (bar, lane, _), name in zip(lanes, names, strict=True):
        y = top + lane
        if not bar.second:
            label = shorten(name, SIDE - 2 * EDGE, NAME)
            draw.text((EDGE, y + 15), label, INK, font(NAME), anchor="lm")
            y += 36
        if bar.value is None:
            told = shorten(bar.told, SIDE - 2 * EDGE - 8, NUMBER)
            draw.text((EDGE + 8, y + 14), told, RED, font(NUMBER), anchor="lm")
            continue
        if floor > 0:
            draw.rectangle((at(1 - floor), y - 4, at(1 + floor), y + 32), fill=BAND)
        start, end = sorted((at(1.0) if ratio else EDGE, at(bar.value)))
        fill = ORANGE if bar.second else BLUE
        draw.rectangle((start, y + 2, max(end, start + 2), y + 26), fill=fill)
        draw.line((at(1.0), y - 4, at(1.0), y + 32), fill=GREY, width=2)
        right = max(end, at(1.0)) if ratio else end
        if bar.low is not None and bar.high is not None:
            _whisker(draw, at(bar.low), at(bar.high), y + 14)
            right = max(right, at(bar.high))
        draw.text((right + 10, y + 14), bar.told, INK, font(NUMBER), anchor="lm")
    return np.asarray(picture)


def _lanes(shown: Sequence[Bar], ratio: bool) -> list[tuple[Bar, int, int]]:
    """Each bar with where its lane begins and ends."""
    lanes, y = [], 0
    for i, bar in enumerate(shown):
        last = not ratio or i + 1 == len(shown) or not shown[i + 1].second
        end = y + (30 if bar.second else 66) + (14 if last else 0)
        lanes.append((bar, y, end))
        y = end
    return lanes


def _from_nothing(shown: Sequence[Bar], right: float) -> Callable[[float], float]:
    most = max(max(bar.value or 0.0, bar.high or 0.0) for bar in shown)
    most = max(most, 1.0)
    return lambda value: EDGE + (right - EDGE) * min(max(value, 0.0), most) / most


def _ratios(shown: Sequence[Bar], right: float) -> Callable[[float], float]:
    ends = [x for b in shown for x in (b.value, b.low, b.high) if x is not None and x > 0]
    low, high = math.log(min([*ends, 0.95])), math.log(max([*ends, 1.05]))

    def at(value: float) -> float:
        position = min(max(math.log(value), low), high) if value > 0 else low
        return EDGE + (right - EDGE) * (position - low) / (high - low)

    return at


def _whisker(draw: ImageDraw.ImageDraw, low: float, high: float, y: float) -> None:
    """On white, so that it shows on the bar as well."""
    draw.line((low, y, high, y), fill=PAPER, width=7)
    draw.line((low, y, high, y), fill=INK, width=3)
    for x in (low, high):
        draw.line((x, y - 9, x, y + 9), fill=INK, width=3)


def scatter(points: Sequence[Point], unit: str, total: int) -> NDArray[np.uint8]:
    """Speed to the right, memory upwards; numbers on the points stand for the names below."""
    left, deep = 120, 330
    below = TITLE + deep + 84
    picture, draw = _paper(below + 36 * len(points) + EDGE, _of("memory and speed", len(points),
                                                                total))  # fmt: skip
    across = _scale([0.0, *(p.speed for p in points)], left + 20, SIDE - 40)
    up = _scale([0.0, *(p.mib for p in points)], TITLE + deep - 20, TITLE + 24)
    for value, y in up.ticks:
        draw.line((left, y, SIDE - EDGE, y), fill=GRID, width=2)
        draw.text((left - 10, y), f"{value:,.6g}", GREY, font(22), anchor="rm")
    for value, x in across.ticks:
        draw.line((x, TITLE + 4, x, TITLE + deep), fill=GRID, width=2)
        draw.text((x, TITLE + deep + 18), f"{value:,.6g}", GREY, font(22), anchor="mm")
    draw.text(((left + SIDE) / 2, TITLE + deep + 52), unit, GREY, font(NUMBER), anchor="mm")
    turned(picture, "peak memory, MiB", NUMBER, GREY, x=18, y=TITLE + deep / 2 - 105)
    places = [(across.at(point.speed), up.at(point.mib)) for point in points]
    for group in reversed(together(places, near=28)):
        _mark(draw, *places[group[0]], group)
    names = labels([point.name for point in points], LETTERS)
    for i, (point, name) in enumerate(zip(points, names, strict=True)):
        y = below + 36 * i + 12
        _mark(draw, EDGE + 15, y, [i])
        _named(draw, EDGE + 42, y, name, f"{_short(point.speed)}, {point.mib:,.0f} MiB")
    return np.asarray(picture)


def _named(draw: ImageDraw.ImageDraw, x: float, y: float, name: str, told: str) -> None:
    """A name and what is told of it, of which nothing is left out."""
    room = SIDE - EDGE - x - width(f":  {told}", NUMBER)
    text = f"{shorten(name, room, NUMBER)}: {told}"
    draw.text((x, y), text, INK, font(NUMBER), anchor="lm")


def _mark(draw: ImageDraw.ImageDraw, x: float, y: float, group: Sequence[int]) -> None:
    """The numbers of the points that lie there."""
    told = ", ".join(str(i + 1) for i in group[:MARKED])
    told += f" +{len(group) - MARKED}" if len(group) > MARKED else ""
    half = max(15.0, width(told, 20) / 2 + 8)
    x = min(x, SIDE - 2 - half)
    colour = COLOURS[group[0] % len(COLOURS)]
    place = (x - half, y - 15, x + half, y + 15)
    draw.rounded_rectangle(place, 15, fill=colour, outline=PAPER, width=2)
    draw.text((x, y), told, PAPER, font(20), anchor="mm")


def lines(
    title: str, curves: Mapping[str, Curve], total: int, reach: float = math.inf
) -> NDArray[np.uint8]:
    """Curves over the steps in one frame; below it their names and last values.

    What is above `reach` leaves the top.
    """
    left, deep = 110, 360
    below = TITLE + deep + 52
    picture, draw = _paper(below + 36 * len(curves) + EDGE, _of(title, len(curves), total))
    every = [loss for curve in curves.values() for _, loss in curve if loss <= reach]
    last = max(curve[-1][0] for curve in curves.values())
    logarithmic = min(every) > 0 and max(every) / min(every) > 30
    shape: Callable[[float], float] = math.log10 if logarithmic else float
    up = _scale([shape(loss) for loss in every], TITLE + deep - 6, TITLE + 10)
    for value, y in up.ticks:
        draw.line((left, y, SIDE - EDGE, y), fill=GRID, width=2)
        told = 10**value if logarithmic else value
        draw.text((left - 10, y), f"{told:.3g}", GREY, font(22), anchor="rm")
    names = labels(list(curves), LETTERS)
    for i, (name, curve) in enumerate(zip(names, curves.values(), strict=True)):
        for piece in pieces(curve, reach):
            places = [
                (left + (SIDE - EDGE - left) * step / last, up.at(shape(loss)))
                for step, loss in piece
            ]
            draw.line(places, fill=COLOURS[i % len(COLOURS)], width=4, joint="curve")
        y = below + 36 * i + 12
        draw.rectangle((EDGE, y - 6, EDGE + 34, y + 6), fill=COLOURS[i % len(COLOURS)])
        above = " (above)" if any(loss > reach for _, loss in curve) else ""
        _named(draw, EDGE + 46, y, name, f"{curve[-1][1]:.4g}{above}")
    draw.text((left, TITLE + deep + 20), "0", GREY, font(22), anchor="lm")
    end = f"step {last:,.0f}"
    draw.text((SIDE - EDGE, TITLE + deep + 20), end, GREY, font(22), anchor="rm")
    return np.asarray(picture)


class _scale:
    """Values on an axis from one pixel to another, with a few round numbers as marks."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        low, high = max(min(values), -LARGEST), min(max(values), LARGEST)
        if high - low < 1e-9 * max(abs(high), 1e-9):
            low, high = low - 0.05 * (abs(low) or 1.0), high + 0.05 * (abs(high) or 1.0)
        self.low, self.high, self.start, self.end = low, high, start, end
        self.ticks = [(tick, self.at(tick)) for tick in _round_numbers(low, high)]

    def at(self, value: float) -> float:
        """The pixel of a value."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * share


def _round_numbers(low: float, high: float) -> list[float]:
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * k for k in (1, 2, 2.5, 5, 10) if power * k >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _paper(height: int, title: str) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    picture = Image.new("RGB", (SIDE, height), PAPER)
    draw = ImageDraw.Draw(picture)
    title = shorten(title, SIDE - 24, 20)
    draw.text((SIDE / 2, TITLE / 2), title, INK, fit(title, SIDE - 24, 30), anchor="mm")
    return picture, draw


def _legend(draw: ImageDraw.ImageDraw, top: int, entries: Sequence[tuple[Colour, str]]) -> None:
    x = float(EDGE)
    for colour, name in entries:
        draw.rectangle((x, top + 8, x + 26, top + 26), fill=colour)
        draw.text((x + 36, top + 17), name, INK, font(NUMBER), anchor="lm")
        x += 36 + width(name, NUMBER) + 30


def _of(title: str, shown: int, total: int) -> str:
    return title if shown == total else f"{title} · {shown} of {total}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
