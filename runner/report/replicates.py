"""Seeds and folds as replicates: metrics and speed of a configuration as mean and interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from statistics import mean, stdev

from runner.benchmark.statistics import CONFIDENCE, t_quantile
from runner.record.hydra_files import overrides_by_key
from runner.report.comparison import OF_SUMMARY, Comparison, Row
from runner.report.naming import names

KEYS = {"seed": "seed", "data.fold": "fold", "data.split_seed": "split"}
"""What sets the runs of one configuration apart, and what one value of it is called."""


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
        half_width = t_quantile(len(values) - 1, 1 - CONFIDENCE) * spread / math.sqrt(len(values))
        return cls(center, spread, (center - half_width, center + half_width))

    @classmethod
    def of_positive(cls, values: list[float]) -> MeanEstimate:
        """Of times and rates: the geometric mean, whose interval does not reach 0."""
        logs = cls.of([math.log(value) for value in values])
        low, high = (math.exp(end) for end in logs.interval)
        return cls(math.exp(logs.mean), stdev(values), (low, high))


@dataclass(frozen=True)
class Replicates:
    """The finished runs of one configuration, of which there are at least two."""

    overrides: tuple[str, ...]  # those that they share
    over: str  # `3 seeds`
    rows: tuple[str, ...]  # names
    metrics: dict[str, MeanEstimate]  # those that each run has; `best` is that of the monitored one
    speed: dict[str, MeanEstimate]  # samples_per_second, step_ms; peaks of memory in bytes
    speedup: MeanEstimate | None = None  # against the reference's runs of the same seeds and folds


def configuration(row: Row) -> tuple[str, ...]:
    """The overrides that a run shares with those that differ in seed or fold alone."""
    typed = overrides_by_key(row.overrides)
    return tuple(f"{key}={value}" for key, value in typed.items() if key not in KEYS)


def replicate(row: Row) -> tuple[str | None, ...]:
    """What tells a run from others of its configuration: only runs that share it are a pair."""
    typed = overrides_by_key(row.overrides)
    return tuple(typed.get(key) for key in KEYS)


def find_replicates(comparison: Comparison) -> list[Replicates]:
    """The configurations of a sweep that ran more than once, in the order of their first rows."""
    repeated = [
        (shared, rows, _over(rows))
        for shared, rows in _groups(row for row in comparison.rows if row.finished).items()
        if len(rows) > 1
    ]
    return [
        Replicates(
            shared,
            over,
            tuple(row.name for row in rows),
            _estimates([_metrics(row) for row in rows], MeanEstimate.of),
            _estimates([_speed(row) for row in rows], MeanEstimate.of_positive),
            _speedup(rows),
        )
        for shared, rows, over in repeated
        if over
    ]


def by_configuration(comparison: Comparison) -> Comparison | None:
    """The same with one row for each configuration; None where none ran more than once.

    A row has the means of its runs, with their intervals in `estimates`.
    """
    found = {x.overrides: x for x in find_replicates(comparison)}
    if not found:
        return None
    groups = _groups(comparison.rows)
    made = names(list(groups), [""] * len(groups))
    rows = [
        _merged(name, shared, members, found.get(shared))
        for name, (shared, members) in zip(made, groups.items(), strict=True)
    ]
    of_reference = next((r for r in comparison.rows if r.name == comparison.reference), None)
    places = list(groups)
    if of_reference is None:
        return replace(comparison, rows=rows)
    place = places.index(configuration(of_reference))
    rows[place].speedup_interval = None  # it is 1 by definition
    return replace(comparison, rows=rows, reference=made[place])


def _groups(rows: Iterable[Row]) -> dict[tuple[str, ...], list[Row]]:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row.measured is None:
            groups.setdefault(configuration(row), []).append(row)
    return groups


def _merged(
    name: str, shared: tuple[str, ...], members: list[Row], found: Replicates | None
) -> Row:
    """One row for the runs of a configuration: of several that finished, their means."""
    finished = [row for row in members if row.finished]
    failed = [row for row in members if not row.finished]
    first = (finished or members)[0]
    over = "1 run" if found is None else found.over
    merged = replace(first, name=name, overrides=list(shared), folder="", over=over)
    if failed and finished:
        merged.over += f"; {len(failed)} of {len(members)} failed"
    if found is None:
        return merged
    merged.estimates = {**found.speed, **{f"metric:{k}": v for k, v in found.metrics.items()}}
    merged.speedup = merged.speedup_interval = None
    if found.speedup is not None:
        merged.speedup, merged.speedup_interval = found.speedup.mean, found.speedup.interval
    return merged


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


def _metrics(row: Row) -> dict[str, float]:
    return {**row.metrics, **({} if row.best is None else {"best": row.best})}


def _speed(row: Row) -> dict[str, float]:
    values = {key: row.number(key) for key in OF_SUMMARY}
    return {key: value for key, value in values.items() if value is not None}


def _estimates(
    runs: list[dict[str, float]], estimate: Callable[[list[float]], MeanEstimate]
) -> dict[str, MeanEstimate]:
    shared = [name for name in runs[0] if all(name in other for other in runs)]
    return {name: estimate([run[name] for run in runs]) for name in shared}


def _speedup(rows: list[Row]) -> MeanEstimate | None:
    """Of the runs' ratios, each to the reference's run of the same seed."""
    ratios = [row.speedup for row in rows if row.speedup]
    return MeanEstimate.of_positive(ratios) if len(ratios) > 1 else None
