"""Training losses of runs, from their `metrics.jsonl`, thinned out to what a chart can show."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from runner.record.storage import open_regular
from runner.report.comparison import Comparison, Row, number, text

Curve = list[tuple[float, float]]

POINTS = 240  # of a curve; a phone is 360 wide
DIVERGED = 100  # times as high as where the runs begin
BYTES = 256 << 20  # of a record: what lies beyond is not read
LONGEST = 1 << 20  # bytes of a line


def read_losses(comparison: Comparison) -> dict[str, Curve]:
    """The training loss by step, for each row that has one of two steps or more."""
    curves = {row.name: _row_curve(row, comparison.home) for row in comparison.rows}
    return {name: thin_curve(curve) for name, curve in curves.items() if len(curve) > 1}


def _row_curve(row: Row, home: Path | None) -> Curve:
    if home is not None and row.folder:
        if curve := read_curve(home / row.folder / "metrics.jsonl"):
            return curve
    first = row.measured.losses if row.measured else []  # of the first steps
    return [(i, loss) for i, loss in enumerate(first, 1) if number(loss) is not None]


def read_curve(path: Path) -> Curve:
    """The training losses in a record; damaged lines are left out.

    A step that comes twice, in a run that was rolled back or resumed, counts as it was last.
    """
    losses: dict[float, float] = {}
    try:
        with open_regular(path) as lines:
            while (line := lines.readline(LONGEST)) and lines.tell() <= BYTES:
                if b'"train"' in line:
                    losses |= _train_loss(line)
    except OSError:
        return []
    return sorted(losses.items())


def _train_loss(line: bytes) -> dict[float, float]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    step, loss = number(entry, "step"), number(entry, "loss")
    if text(entry, "split") != "train" or step is None or loss is None:
        return {}
    return {step: loss}


def axis_top(comparison: Comparison, curves: Mapping[str, Curve]) -> float:
    """The highest loss of the curves that did not diverge; infinite where none did."""
    sound = {row.name for row in comparison.rows if row.sound}
    starts = sorted(abs(curve[0][1]) for name, curve in curves.items() if name in sound)
    if not starts:
        return math.inf
    limit = DIVERGED * starts[(len(starts) - 1) // 2]
    tops = [max(loss for _, loss in curve) for curve in curves.values()]
    below = [top for top in tops if top <= limit]
    return max(below) if 0 < len(below) < len(tops) else math.inf


def thin_curve(curve: Sequence[tuple[float, float]], most: int = POINTS) -> Curve:
    """At most `most` points: the lowest and highest of each stretch, so that no spike is lost."""
    if len(curve) <= most:
        return list(curve)
    bounds = [i * len(curve) // (most // 2) for i in range(most // 2 + 1)]
    parts = [curve[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]
    by_loss = [sorted(part, key=lambda point: point[1]) for part in parts]
    return sorted({point for part in by_loss for point in (part[0], part[-1])})
