"""Between what the numbers of a batch must lie."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from runner.checks.config import InputsConfig, Policy
from runner.checks.inputs.baseline import Baseline
from runner.checks.inputs.finding import Finding
from runner.checks.inputs.measure import LARGEST, Labels, Plan

DRIFT = "drift"  # it is told of finite numbers only
CHECKS = ("not_finite", "labels", "range", DRIFT)  # the worst first


@dataclass(frozen=True)
class Limit:
    """Between what one number of a row must lie, and which check says so."""

    check: str
    at: int
    low: float
    high: float


def limits(
    plan: Plan, config: InputsConfig, known: Labels, baseline: Baseline | None
) -> list[Limit]:
    """Of each number of a row; in float32, as the rows are. A `baseline` is a complete one."""
    found: list[Limit] = []
    for check in CHECKS:
        if getattr(config, check) is Policy.off:
            continue
        for at in range(plan.width):
            bounds = _bounds(check, plan, at, config, known, baseline)
            if bounds is not None:
                low, high = (float(np.float32(max(-LARGEST, min(LARGEST, x)))) for x in bounds)
                found.append(Limit(check, at, low, high))
    return found


def _bounds(
    check: str,
    plan: Plan,
    at: int,
    config: InputsConfig,
    known: Labels,
    baseline: Baseline | None,
) -> tuple[float, float] | None:
    entry = plan.entries[at]
    ends = entry.stat in ("low", "high")
    if check == "not_finite":
        return (-LARGEST, LARGEST) if entry.leaf in plan.values and ends else None
    if check == "labels":
        if entry.leaf == plan.labels:
            return 0, (known.classes or 1) - 1
        return (0, (known.vocab or 1) - 1) if entry.leaf == plan.tokens and ends else None
    if check == "range":
        if not ends or not entry.leaf.startswith("inputs") or entry.leaf == plan.tokens:
            return None
        learned = {} if baseline is None else baseline.ranges
        low, high = learned.get(entry.leaf, (-LARGEST, LARGEST))
        asked = config.schema
        return low if asked.low is None else asked.low, high if asked.high is None else asked.high
    return None if baseline is None else baseline.limits[at]


def crossed(limit: Limit, plan: Plan, value: float) -> Finding:
    """What is said of a number that is not within its limit."""
    entry, low, high = plan.entries[limit.at], limit.low, limit.high
    if limit.check == DRIFT:
        unit = " deviations" if entry.stat == "mean" else ""
        said = f"its {entry.stat} is {value:.4g}, and {low:.4g} to {high:.4g}{unit} is usual"
        return Finding("drift", entry.leaf, said)
    what = "labels" if entry.leaf == plan.labels else "values"
    said = {
        "not_finite": "values that are NaN or infinite",
        "labels": f"{what} such as {value:g}, and there are {low:g} to {high:g}",
        "range": f"values such as {value:.6g}, outside {low:.6g} to {high:.6g}",
    }[limit.check]
    low, high = (x if abs(x) < LARGEST else math.copysign(math.inf, x) for x in (low, high))
    return Finding(limit.check, entry.leaf, said, low, high)
