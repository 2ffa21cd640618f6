"""Training losses of runs, from their `metrics.jsonl`, thinned out to what a chart can show."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from runner.report import facts
from runner.report.comparison import Comparison, Row

Curve = list[tuple[float, float]]

POINTS = 240  # of a curve; a phone is 360 wide
BYTES = 256 << 20  # of a record: what lies beyond is not read


def losses(comparison: Comparison) -> dict[str, Curve]:
    """The training loss by step, for each row that has one of two steps or more."""
    found = {row.name: _curve(row, comparison.home) for row in comparison.rows}
    return {name: thin(curve) for name, curve in found.items() if len(curve) > 1}


def _curve(row: Row, home: Path | None) -> Curve:
    if home is not None and row.folder:
        if curve := read(home / row.folder / "metrics.jsonl"):
            return curve
    first = row.measured.losses if row.measured else []  # of the first steps
    return [(step, loss) for step, loss in enumerate(first, 1) if facts.number(loss) is not None]


def read(path: Path) -> Curve:
    """The training losses in a record; lines that are damaged are left out.

    A step that comes twice, in a run that was rolled back or resumed, counts as it was last.
    """
    found: dict[float, float] = {}
    try:
        with path.open("rb") as lines:
            for line in lines:
                if b'"train"' not in line:
                    continue
                try:
                    entry = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                step, loss = facts.number(entry, "step"), facts.number(entry, "loss")
                if facts.text(entry, "split") == "train" and step is not None and loss is not None:
                    found[step] = loss
                if lines.tell() > BYTES:
                    break
    except OSError:
        return []
    return sorted(found.items())


def thin(curve: Sequence[tuple[float, float]], most: int = POINTS) -> Curve:
    """At most `most` points: the lowest and highest of each stretch, so that no spike is lost."""
    if len(curve) <= most:
        return list(curve)
    stretches = most // 2
    kept: Curve = []
    for i in range(stretches):
        part = curve[i * len(curve) // stretches : (i + 1) * len(curve) // stretches]
        ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept
