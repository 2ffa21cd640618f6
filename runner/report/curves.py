"""A run's curves, read from its metrics, and drawn as a file of their own."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from runner.masking import masked
from runner.record.recorder import METRICS
from runner.record.storage import open_regular
from runner.report.svg import PLOT_HEIGHT, Scale, Series, curve_scales, join, tag, tick_label

Curve = list[tuple[float, float]]

POINTS = 240  # of a curve; a phone is 360 wide
BYTES = 256 << 20  # of a record: what lies beyond is not read
LONGEST = 1 << 20  # bytes of a line
WIDTH, LEFT, ABOVE = 400, 58, 48  # pixels: of a plot with its axis, of the axis, of the title
INKS = ("#0a7d91", "#c2410c")  # both legible on white
GREY = "#6b7280"


def read_curves(folder: Path, names: Sequence[str] = ("train/loss",)) -> dict[str, Curve]:
    """The finite values by step of those metrics (`train/loss`); damaged lines are left out.

    A step that comes twice, in a run that was rolled back or resumed, counts as it was last.
    """
    found: dict[str, dict[float, float]] = {name: {} for name in names}
    splits = [(f'"{split}"'.encode(), split) for split in {x.partition("/")[0] for x in names}]
    try:
        with open_regular(folder / METRICS) as lines:
            while (line := lines.readline(LONGEST)) and lines.tell() <= BYTES:
                for mark, split in splits:
                    if mark in line:
                        _read_row(line, split, found)
    except OSError:
        return {}
    return {name: sorted(points.items()) for name, points in found.items() if points}


def _read_row(line: bytes, split: str, found: dict[str, dict[float, float]]) -> None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return
    if isinstance(row, dict) and row.get("split") == split and _is_number(row.get("step")):
        for name, points in found.items():
            group, _, key = name.partition("/")
            if group == split and _is_number(row.get(key)):
                points[float(row["step"])] = float(row[key])


def _is_number(value: Any) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        return False


def thin_curve(curve: Sequence[tuple[float, float]], most: int = POINTS) -> Curve:
    """At most `most` points: the lowest and highest of each stretch, so that no spike is lost."""
    if len(curve) <= most:
        return list(curve)
    bounds = [i * len(curve) // (most // 2) for i in range(most // 2 + 1)]
    parts = [curve[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]
    by_loss = [sorted(part, key=lambda point: point[1]) for part in parts]
    return sorted({point for part in by_loss for point in (part[0], part[-1])})


def draw_run(folder: Path, monitor: str) -> str:
    """An SVG file: the losses of training and validation, and the monitored metric beside them.

    "" where the record has no curve of two points.
    """
    curves = read_curves(
        folder, list(dict.fromkeys(["train/loss", "val/loss", monitor or "val/loss"]))
    )
    curves = {name: thin_curve(curve) for name, curve in curves.items() if len(curve) > 1}
    losses = [
        Series(x, curves.pop(x), i) for i, x in enumerate(("train/loss", "val/loss")) if x in curves
    ]
    plots = [losses, *([Series(name, curve, 1)] for name, curve in curves.items())]
    drawn = [_plot(plot, WIDTH * i) for i, plot in enumerate(filter(None, plots))]
    if not drawn:
        return ""
    width, height = WIDTH * len(drawn), ABOVE + PLOT_HEIGHT + 40
    size = {"width": width, "height": height, "viewBox": f"0 0 {width} {height}"}
    paper = tag("rect", width=width, height=height, fill="white")
    font = {"font_family": "system-ui, sans-serif", "font_size": 12, "fill": GREY}
    return str(tag("svg", paper, *drawn, xmlns="http://www.w3.org/2000/svg", **size, **font)) + "\n"


def _plot(series: Sequence[Series], left: int) -> Markup:
    """Curves with their axes; a title in the curves' own colours."""
    x_scale, y_scale = curve_scales(series)
    room = WIDTH - LEFT - 20
    grid = []
    for y in y_scale.ticks():
        at = round(y_scale.down(y), 1)
        grid.append(tag("line", x1=0, x2=room, y1=at, y2=at, stroke="#e5e7eb"))
        grid.append(tag("text", tick_label(y), x=-8, y=at + 4, text_anchor="end"))
    for x in x_scale.ticks():
        at = round(x_scale(x) * room / 100, 1)
        grid.append(tag("text", tick_label(x), x=at, y=PLOT_HEIGHT + 18, text_anchor="middle"))
    below = tag("text", "step", x=room, y=PLOT_HEIGHT + 34, text_anchor="end")
    titles = [tag("tspan", masked(x.label), dx=14 * (i > 0), fill=INKS[x.style])
              for i, x in enumerate(series)]  # fmt: skip
    title = tag("text", *titles, y=-20, font_size=14, font_weight=600)
    lines = [_line(one, x_scale, y_scale, room) for one in series]
    place = f"translate({left + LEFT} {ABOVE})"
    return tag("g", title, join(*grid), below, *lines, transform=place)


def _line(one: Series, x_scale: Scale, y_scale: Scale, room: float) -> Markup:
    places = ((x_scale(x) * room / 100, y_scale.down(y)) for x, y in one.points)
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    style = {"stroke": INKS[one.style], "stroke_width": 2, "stroke_linejoin": "round"}
    return tag("polyline", points=points, fill="none", **style)
