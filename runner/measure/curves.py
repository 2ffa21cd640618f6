"""Read a run's curves from its metrics file and draw them as an SVG file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from runner.core.format import finite
from runner.core.masking import mask_secrets
from runner.core.record.storage import LONGEST_ROW, METRICS, open_regular
from runner.measure import svg

Curve = list[tuple[float, float]]

MAX_POINTS = 240  # per curve; a phone is 360 px wide
MAX_BYTES = 256 << 20  # of a metrics file; the rest is not read
GREY = "#6b7280"
LOSSES = ("train/loss", "val/loss")


def read_curves(folder: Path, names: Sequence[str] = LOSSES[:1]) -> dict[str, Curve]:
    """Read the finite values of those metrics (e.g. `train/loss`) by step; skip damaged lines.

    If a step occurs twice, after a rollback or resume, the last value counts.
    """
    curves: dict[str, dict[float, float]] = {name: {} for name in names}
    splits = [(f'"{split}"'.encode(), split) for split in {x.partition("/")[0] for x in names}]
    try:
        with open_regular(folder / METRICS) as lines:
            while (line := lines.readline(LONGEST_ROW)) and lines.tell() <= MAX_BYTES:
                for mark, split in splits:
                    if mark in line:
                        _read_row(line, split, curves)
    except OSError:
        return {}
    return {name: sorted(points.items()) for name, points in curves.items() if points}


def _read_row(line: bytes, split: str, curves: dict[str, dict[float, float]]) -> None:
    row = None
    with suppress(ValueError, RecursionError):
        row = json.loads(line)
    if not isinstance(row, dict) or row.get("split") != split:
        return
    step = finite(row.get("step"))
    for name, points in curves.items():
        group, _, key = name.partition("/")
        value = finite(row.get(key)) if group == split else None
        if step is not None and value is not None:
            points[step] = value


def downsample_curve(curve: Sequence[tuple[float, float]], max_points: int = MAX_POINTS) -> Curve:
    """Return at most `max_points`: the lowest and highest of each segment, to keep spikes."""
    if len(curve) <= max_points:
        return list(curve)
    bounds = [i * len(curve) // (max_points // 2) for i in range(max_points // 2 + 1)]
    parts = [curve[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]
    by_loss = [sorted(part, key=lambda point: point[1]) for part in parts]
    return sorted({point for part in by_loss for point in (part[0], part[-1])})


def draw_run_curves(folder: Path, monitor: str) -> str:
    """Return an SVG of training and validation loss, with the monitored metric beside it.

    "" if no curve has two points.
    """
    names = list(dict.fromkeys([*LOSSES, monitor or LOSSES[1]]))
    curves = {name: x for name, x in read_curves(folder, names).items() if len(x) > 1}
    groups = [[name for name in curves if name in LOSSES], [x for x in curves if x not in LOSSES]]
    plots = [
        [svg.Series(mask_secrets(x), downsample_curve(curves[x]), x != LOSSES[0]) for x in group]
        for group in groups
        if group
    ]
    if not plots:
        return ""
    drawings, font = [], {"font_size": 14, "font_weight": 600}
    for i, plot in enumerate(plots):
        place = {"x": svg.WIDTH * i + svg.MARGIN_LEFT, "y": svg.MARGIN_TOP, "width": svg.PLOT_WIDTH}
        labels = (  # in the colours of the curves
            svg.tag("tspan", one.label, dx=14 * (j > 0), fill=svg.COLOURS[one.style], **font)
            for j, one in enumerate(plot)
        )
        titles = svg.join(*labels), "step"
        drawings.append(svg.draw_plot(plot, svg.curve_scales(plot), titles, **place))
    width = svg.WIDTH * len(plots)
    size = {"width": width, "height": svg.HEIGHT, "viewBox": f"0 0 {width} {svg.HEIGHT}"}
    background = svg.tag("rect", width=width, height=svg.HEIGHT, fill="white")
    look = {"font_family": "system-ui, sans-serif", "font_size": 12, "fill": GREY}
    namespace = "http://www.w3.org/2000/svg"
    return str(svg.tag("svg", background, *drawings, xmlns=namespace, **size, **look)) + "\n"
