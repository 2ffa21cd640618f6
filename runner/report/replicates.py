"""Seeds and folds as replicates: the metrics of one configuration as mean, spread and interval."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import mean, stdev

from runner.record.hydra_files import overrides_by_key
from runner.report.comparison import Comparison, Row

KEYS = {"seed": "seed", "data.fold": "fold", "data.split_seed": "split"}
"""What sets the runs of one configuration apart, and what one value of it is called."""
NORMAL = 1.959964  # the 97.5 % quantile
FEW = (12.7062, 4.3027, 3.1824, 2.7764)  # that of Student's t with 1 to 4 degrees of freedom


@dataclass(frozen=True)
class MeanEstimate:
    """A metric over replicates: mean, sample standard deviation, 95 % interval of the mean."""

    mean: float
    spread: float
    interval: tuple[float, float]

    @classmethod
    def of(cls, values: list[float]) -> MeanEstimate:
        """Of at least two values, by Student's t."""
        center, spread = mean(values), stdev(values)
        half_width = t_quantile(len(values) - 1) * spread / math.sqrt(len(values))
        return cls(center, spread, (center - half_width, center + half_width))


@dataclass(frozen=True)
class Replicates:
    """The finished runs of one configuration."""

    overrides: tuple[str, ...]  # those that they share
    over: str  # `3 seeds`
    rows: tuple[str, ...]  # names
    metrics: dict[str, MeanEstimate]  # those that each run has; `best` is that of the monitored one


def find_replicates(comparison: Comparison) -> list[Replicates]:
    """The configurations of a sweep that ran more than once, in the order of their first rows."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in comparison.rows:
        if row.finished and row.measured is None:
            typed = overrides_by_key(row.overrides)
            shared = tuple(f"{key}={value}" for key, value in typed.items() if key not in KEYS)
            groups.setdefault(shared, []).append(row)
    repeated = [(shared, rows, _over(rows)) for shared, rows in groups.items() if len(rows) > 1]
    return [
        Replicates(shared, over, tuple(row.name for row in rows), _metrics(rows))
        for shared, rows, over in repeated
        if over
    ]


def _over(rows: list[Row]) -> str:
    """What sets the rows apart, such as `3 seeds`; "" where two are the same run twice."""
    typed = [overrides_by_key(row.overrides) for row in rows]
    varied = [key for key in KEYS if len({row.get(key) for row in typed}) > 1]
    if len({tuple(row.get(key) for key in varied) for row in typed}) < len(rows):
        return ""
    if len({row.get("data.folds") for row in typed}) > 1 or not varied:
        return ""
    counts = [(len({row.get(key) for row in typed}), KEYS[key]) for key in varied]
    return " × ".join(f"{count} {word}s" for count, word in counts)


def _metrics(rows: list[Row]) -> dict[str, MeanEstimate]:
    values = [{**row.metrics, **({} if row.best is None else {"best": row.best})} for row in rows]
    shared = [name for name in values[0] if all(name in other for other in values)]
    return {name: MeanEstimate.of([each[name] for each in values]) for name in shared}


def t_quantile(degrees: int) -> float:
    """The 97.5 % quantile of Student's t, within 0.2 %.

    From 5 degrees of freedom on by the expansion of Abramowitz and Stegun, 26.7.5.
    """
    if degrees <= len(FEW):
        return FEW[degrees - 1]
    z, n = NORMAL, degrees
    first = (z**3 + z) / (4 * n)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    return z + first + second + third
