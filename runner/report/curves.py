"""Training losses of runs, from their `metrics.jsonl`, thinned out to what a chart can show."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from runner.report import facts, verdicts
from runner.report.comparison import Comparison, Row
from runner.storage import open_regular

Curve = list[tuple[float, float]]

POINTS = 240  # of a curve; a phone is 360 wide
DIVERGED = 100  # times as high as where the runs begin
BYTES = 256 << 20  # of a record: what lies beyond is not read
LONGEST = 1 << 20  # bytes of a line


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
        with open_regular(path) as lines:
            while line := lines.readline(LONGEST):
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


def reach(comparison: Comparison, found: Mapping[str, Curve]) -> float:
    """The highest loss of the curves that did not diverge: where an axis for all of them ends.

    One that diverged went many times above where sound runs begin. Infinite where none did.
    """
    sound = {row.name for row in comparison.rows if verdicts.sound(row)}
    begun = sorted(abs(curve[0][1]) for name, curve in found.items() if name in sound)
    if not begun:
        return math.inf
    limit = DIVERGED * begun[(len(begun) - 1) // 2]
    tops = [max(loss for _, loss in curve) for curve in found.values()]
    kept = [top for top in tops if top <= limit]
    return max(kept) if 0 < len(kept) < len(tops) else math.inf


def beyond(found: Mapping[str, Curve], reach: float) -> list[str]:
    """Whose losses are above it."""
    return [name for name, curve in found.items() if any(loss > reach for _, loss in curve)]


def pieces(curve: Sequence[tuple[float, float]], reach: float) -> list[Curve]:
    """The parts of a curve up to `reach`, each as far as the point at which it goes beyond."""
    made: list[Curve] = [[]]
    for before, here in zip([None, *curve], curve, strict=False):
        if here[1] <= reach:
            if before is not None and before[1] > reach:
                made.append([(before[0], reach)])
            made[-1].append(here)
        elif before is not None and before[1] <= reach:
            made[-1].append((here[0], reach))
    return [piece for piece in made if len(piece) > 1]


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
