"""What the first batches are like, and what is so far from them that it counts as drift."""

from __future__ import annotations

import math
from statistics import median
from typing import Any

import numpy as np

from runner.checks.inputs.measure import MARKS, STATS, Plan
from runner.checks.inputs.shares import Shares

# Least robust deviation, in deviations of the data: what is less is real, and of no consequence.
FLOOR = {"mean": 0.02, "deviation": 0.02, "low": 0.1, "high": 0.1}
FEW = 16  # samples of a batch below which its numbers have long tails
TO_SIGMA = 1.4826  # median absolute deviation to standard deviation, of a normal distribution
FAR = 85.0  # sinh of it is a float32 still


class Baseline:
    """The rows of the first batches; from the last of them on, limits.

    A value x is held against the others as asinh(x / d), where d is the data's usual deviation:
    a distance within one deviation and a ratio beyond it, so that heavy tails are no drift; a
    batch's mean is in its own deviations, since one value of a heavy tail moves both. The
    robust deviation is the largest of 1.48 times the median absolute deviation, a quarter of the
    range, and a floor: fifty batches tell the first only to a sixth.
    """

    def __init__(self, batches: int, threshold: float) -> None:
        self.batches, self.threshold = batches, threshold
        self.rows: list[list[float]] = []
        self.samples = 0  # of a usual batch
        self.reach = threshold  # robust deviations that count as drift
        self.limits: list[tuple[float, float] | None] = []  # of each entry
        self.ranges: dict[str, tuple[float, float]] = {}  # of each leaf, with as much on each side
        self.shares = Shares(threshold)  # of the labels

    @property
    def full(self) -> bool:
        """Whether there are limits."""
        return len(self.rows) >= self.batches

    def add(self, row: list[float], samples: int, plan: Plan) -> bool:
        """Take a sound batch in; True where it was the last that was missing."""
        if self.full:
            return False
        if samples > self.samples:  # the first may have been a small one
            self.samples, self.rows = samples, []
        if samples < self.samples:
            return False
        self.rows.append(row)
        complete = len(self.rows) >= self.batches
        if complete:
            self.settle(plan)
        return complete

    def fits(self, plan: Plan) -> bool:
        """Whether the rows are such as that plan gives; those of a checkpoint may be any."""
        counts = slice(plan.width, plan.width + plan.shares)
        most = float(np.float32(self.samples))  # as rows have it
        return all(
            len(row) == plan.length
            and all(0 <= n <= most and n % 1 == 0 for n in row[counts])
            and all(n >= 1 for n in row[plan.width + plan.shares + MARKS :])
            for row in self.rows
        ) and (self.samples > 0 or not self.rows)

    def settle(self, plan: Plan) -> None:
        """Make limits of the rows."""
        columns = list(zip(*self.rows, strict=True))
        self.reach = self.threshold * max(1.0, math.sqrt(FEW / self.samples))
        self.limits = [None] * plan.width
        for leaf in plan.learned:
            at = {e.stat: i for i, e in enumerate(plan.entries) if e.leaf == leaf}
            usual = median(columns[at["deviation"]]) or 1.0
            for stat in STATS:
                unit = 1.0 if stat == "mean" else usual
                self.limits[at[stat]] = self._limits(columns[at[stat]], unit, FLOOR[stat])
            low, high = min(columns[at["low"]]), max(columns[at["high"]])
            width = max(high - low, 1e-6)
            self.ranges[leaf] = (low - width, high + width)
        if plan.shares:
            self.shares.settle([row[plan.width : plan.width + plan.shares] for row in self.rows])

    def all_alike(self, plan: Plan, samples: int) -> float:
        """How likely all samples of a batch are one, by how many were among the batches so far."""
        at = plan.width + plan.shares + MARKS
        distinct = [row[at] for row in self.rows if len(row) > at]
        if not distinct:
            return 0.0
        equal = sum(self.samples - n + 1 for n in distinct if n < self.samples)
        return float((equal / len(distinct) / self.samples) ** samples)

    def _limits(self, values: Any, usual: float, floor: float) -> tuple[float, float]:
        middle, scale = _spread([math.asinh(v / usual) for v in values], floor)
        ends = (middle - self.reach * scale, middle + self.reach * scale)
        low, high = (usual * math.sinh(max(-FAR, min(FAR, end))) for end in ends)
        return low, high

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"rows": [list(row) for row in self.rows], "samples": self.samples}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from there; limits are to be made anew, of the same rows."""
        self.rows, self.samples = [list(row) for row in state["rows"]], state["samples"]
        self.limits = []


def _spread(values: list[float], floor: float) -> tuple[float, float]:
    """Median, and the robust deviation that drift is counted in."""
    middle = median(values)
    mad = TO_SIGMA * median(abs(v - middle) for v in values)
    return middle, max(mad, (max(values) - min(values)) / 4, floor)
