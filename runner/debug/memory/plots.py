"""Pictures of a run's memory: over the steps, and by module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw

from runner.record.drawing import BLUE, GREEN, GREY, INK, ORANGE, PAPER, RED, SIDE, fit, font, width

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from runner.debug.memory.account import Row

HIGH, TOP, LEFT, RIGHT = 420, 92, 84, 24  # pixels
COLOURS = (BLUE, ORANGE, GREEN, RED, GREY, (120, 60, 160))
LANE = 42
NAMES = (90, 300)  # pixels that names may take, at least and at most
MOST_BARS = 10


Line = Sequence[tuple[int, float]]


def timeline(
    lines: Mapping[str, Line], dots: Mapping[str, Line], last: int, unit: str
) -> NDArray[np.uint8]:
    """Lines and dots over the steps, from nothing up; a later one is drawn over an earlier."""
    picture = Image.new("RGB", (SIDE, HIGH), PAPER)
    draw = ImageDraw.Draw(picture)
    title = f"memory, {unit}"
    draw.text((SIDE / 2, 26), title, INK, fit(title, SIDE - 24, 28), anchor="mm")
    every = [value for line in (*lines.values(), *dots.values()) for _, value in line]
    most = max(every, default=0.0) or 1.0
    top = _round_up(most)
    bottom = HIGH - 40

    def at(step: int, value: float) -> tuple[float, float]:
        x = LEFT + (SIDE - LEFT - RIGHT) * step / max(last, 1)
        return x, bottom - (bottom - TOP) * value / top

    for part in range(5):
        value = top * part / 4
        y = at(0, value)[1]
        draw.line((LEFT, y, SIDE - RIGHT, y), fill=(222, 226, 230), width=1)
        draw.text((LEFT - 8, y), f"{value:,.4g}", GREY, font(20), anchor="rm")
    x = LEFT
    wide = 9  # what is underneath shows at its edges
    for (name, line), colour in zip({**lines, **dots}.items(), COLOURS, strict=False):
        draw.rectangle((x, 58, x + 18, 72), fill=colour)
        draw.text((x + 24, 65), name, INK, font(20), anchor="lm")
        x += 24 + round(font(20).getlength(name)) + 22
        points = [at(step, value) for step, value in line]
        if name in lines and len(points) > 1:
            draw.line(points, fill=colour, width=wide, joint="curve")
            wide = 4
        for px, py in points if name in dots or len(points) == 1 else []:
            draw.ellipse((px - 5, py - 5, px + 5, py + 5), fill=colour)
    draw.text((LEFT, HIGH - 18), "0", GREY, font(20), anchor="lm")
    draw.text((SIDE - RIGHT, HIGH - 18), f"step {last:,}", GREY, font(20), anchor="rm")
    return np.asarray(picture)


def modules(rows: Sequence[Row], parts: Sequence[str]) -> NDArray[np.uint8]:
    """A bar for each of the largest modules, in a colour for each part of its memory."""
    shown = list(rows)[:MOST_BARS]
    picture = Image.new("RGB", (SIDE, 112 + LANE * len(shown) + 12), PAPER)
    draw = ImageDraw.Draw(picture)
    title = "memory of a step by module, MiB"
    draw.text((SIDE / 2, 26), title, INK, fit(title, SIDE - 24, 28), anchor="mm")
    coloured = list(zip(parts, COLOURS, strict=False))
    there = [(part, colour) for part, colour in coloured if any(getattr(r, part) for r in shown)]
    for i, (part, colour) in enumerate(there):
        x, y = 24 + i % 3 * 205, 62 + i // 3 * 26
        draw.rectangle((x, y - 7, x + 18, y + 7), fill=colour)
        draw.text((x + 24, y), part, INK, font(20), anchor="lm")
    most = max((row.all for row in shown), default=0) or 1
    longest = max((width(row.name, 20) for row in shown), default=0.0)
    names = round(min(max(longest + 20, NAMES[0]), NAMES[1]))
    room = SIDE - names - 110
    for i, row in enumerate(shown):
        middle = 112 + i * LANE + LANE / 2
        name = _shortened(row.name, names - 20)
        draw.text((names - 10, middle), name, INK, font(20), "rm")
        start = float(names)
        for part, colour in there:
            wide = room * getattr(row, part) / most
            if wide >= 0.5:
                draw.rectangle((start, middle - 13, start + wide, middle + 13), fill=colour)
            start += wide
        draw.text((start + 8, middle), f"{row.all / 2**20:,.3g}", INK, font(20), anchor="lm")
    return np.asarray(picture)


def _shortened(name: str, room: float) -> str:
    """The name of a module, its middle left out: the block and the layer tell it from others."""
    first, last = (len(name) + 1) // 2, len(name) // 2
    shown = name
    while width(shown, 20) > room and last > 1:
        first, last = first - 1, last - (first < last)
        shown = f"{name[:first]}…{name[-last:]}"
    return shown


def _round_up(value: float) -> float:
    """A number at or above it that divides well by four."""
    power = 10.0 ** np.floor(np.log10(value))
    return float(next(power * step for step in (1, 2, 4, 6, 8, 10) if power * step >= value))
