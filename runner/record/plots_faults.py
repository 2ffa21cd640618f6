"""Pictures of what went wrong in a run: when, how often, and what the gradients did."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
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
    width,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

LANE = 54  # pixels
LEFT = 230  # where the time line begins; names stand before it
SMALLEST = 14  # letters of a name
MOST_LANES = 12
PALE = (166, 189, 219)
COLOURS = {"info": BLUE, "warning": ORANGE, "error": RED}


def timeline(
    lanes: Mapping[str, Collection[int]],
    counts: Mapping[str, int],
    severities: Mapping[str, str],
    last: int,
) -> NDArray[np.uint8]:
    """A lane for each kind of fault, a mark for each step at which it was; up to step `last`.

    Where not all of its `counts` steps are known, a lighter bar goes from the first to the last.
    """
    shown = list(lanes.items())[:MOST_LANES]
    height = 52 + LANE * len(shown) + 44
    picture = Image.new("RGB", (SIDE, height), PAPER)
    draw = ImageDraw.Draw(picture)
    title = "faults by step"
    draw.text((SIDE / 2, 26), title, INK, fit(title, SIDE - 24, 28), anchor="mm")
    told = {kind: f"{counts.get(kind, len(steps)):,}" for kind, steps in shown}
    right = max((width(text, 22) for text in told.values()), default=0) + 22
    room = SIDE - LEFT - right
    for i, (kind, steps) in enumerate(shown):
        middle = 52 + i * LANE + LANE / 2
        _name(draw, kind, middle)
        draw.line((LEFT, middle, LEFT + room, middle), fill=(222, 226, 230), width=2)
        draw.text((SIDE - 10, middle), told[kind], INK, font(22), anchor="rm")
        if counts.get(kind, 0) > len(steps) > 1:
            start, end = (LEFT + room * step / max(last, 1) for step in (min(steps), max(steps)))
            pale = tuple((2 * 255 + c) // 3 for c in COLOURS[severities[kind]])
            draw.rectangle((start, middle - 8, end, middle + 8), fill=pale)
        for step in steps:
            x = LEFT + room * step / max(last, 1)
            draw.rectangle((x - 2, middle - 16, x + 2, middle + 16), fill=COLOURS[severities[kind]])
    below = 52 + LANE * len(shown) + 18
    draw.text((LEFT, below), "0", GREY, font(22), anchor="lm")
    draw.text((LEFT + room, below), f"step {last:,}", GREY, font(22), anchor="rm")
    return np.asarray(picture)


def distribution(
    counts: Mapping[str, int], severities: Mapping[str, str], steps: int
) -> NDArray[np.uint8]:
    """How often each kind of fault was, as bars; the most frequent first."""
    shown = sorted(counts.items(), key=lambda item: -item[1])[:MOST_LANES]
    picture = Image.new("RGB", (SIDE, 52 + LANE * len(shown) + 12), PAPER)
    draw = ImageDraw.Draw(picture)
    title = f"faults in {steps:,} steps"
    draw.text((SIDE / 2, 26), title, INK, fit(title, SIDE - 24, 28), anchor="mm")
    most = max(count for _, count in shown)
    room = SIDE - LEFT - 110
    for i, (kind, count) in enumerate(shown):
        top, middle = 52 + i * LANE + 10, 52 + i * LANE + LANE / 2
        _name(draw, kind, middle)
        end = LEFT + max(3, room * count / most)
        draw.rectangle(
            (LEFT, top, end, top + LANE - 20), fill=COLOURS[severities.get(kind, "info")]
        )
        draw.text((end + 8, middle), f"{count:,}", INK, font(22), anchor="lm")
    return np.asarray(picture)


def _name(draw: ImageDraw.ImageDraw, kind: str, middle: float) -> None:
    """Of a lane, whole where smaller letters make it fit."""
    size, room = 22, LEFT - 20
    while size > SMALLEST and width(kind, size) > room:
        size -= 1
    draw.text((LEFT - 12, middle), shorten(kind, room, size), INK, font(size), anchor="rm")


def norms(
    steps: Sequence[int], typical: Sequence[float], largest: Sequence[float], bad: Sequence[int]
) -> NDArray[np.uint8]:
    """The gradient norm before clipping over the steps, on a logarithmic scale.

    Of each stretch that ends at a step of `steps` the median is a line and the largest a lighter
    one; `bad` are steps that were not finite, marked in red.
    """
    high, left, top = 430, 96, 84
    picture = Image.new("RGB", (SIDE, high), PAPER)
    draw = ImageDraw.Draw(picture)
    title = "gradient norm before clipping"
    draw.text((SIDE / 2, 26), title, INK, fit(title, SIDE - 24, 28), anchor="mm")
    legend = [(BLUE, "median"), (PALE, "largest")] + ([(RED, "not finite")] if bad else [])
    x = float(left)
    for colour, name in legend:
        draw.rectangle((x, 58, x + 22, 66), fill=colour)
        draw.text((x + 30, 62), name, GREY, font(20), anchor="lm")
        x += 30 + width(name, 20) + 26
    finite = [x for x in (*typical, *largest) if math.isfinite(x) and x > 0]
    low = math.floor(math.log10(min(finite, default=1.0)))
    up = max(low + 1, math.ceil(math.log10(max(finite, default=10.0))))
    last = max(steps, default=1)
    room, deep = SIDE - left - 24, high - top - 48

    def at(step: int, value: float) -> tuple[float, float]:
        share = (math.log10(value) - low) / (up - low)
        return left + room * step / last, top + deep * (1 - share)

    every = max(1, (up - low) // 5)
    for power in range(low, up + 1, every):
        y = at(0, 10.0**power)[1]
        draw.line((left, y, left + room, y), fill=(222, 226, 230), width=2)
        draw.text((left - 10, y), f"1e{power}", GREY, font(22), anchor="rm")
    for series, colour, wide in ((largest, PALE, 2), (typical, BLUE, 3)):
        points = [
            at(s, v) for s, v in zip(steps, series, strict=True) if math.isfinite(v) and v > 0
        ]
        if len(points) > 1:
            draw.line(points, fill=colour, width=wide, joint="curve")
    for step in bad:
        x = left + room * step / last
        draw.rectangle((x - 2, top, x + 2, top + 14), fill=RED)
    draw.text((left, high - 22), "0", GREY, font(22), anchor="lm")
    draw.text((left + room, high - 22), f"step {last:,}", GREY, font(22), anchor="rm")
    return np.asarray(picture)
