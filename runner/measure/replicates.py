"""Merge seeds and folds of a configuration into means with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from runner.core.config.groups import REPLICATE_KEYS
from runner.core.record.hydra_files import overrides_by_key
from runner.measure.comparison_row import (
    METRIC_PREFIX,
    SUMMARY_PATHS,
    UNBOUNDED,
    ComparisonRow,
    MeanEstimate,
    number_at,
)
from runner.measure.naming import name_rows

SHARES = {"accuracy", "top5", "f1", "auroc", "precision", "recall"}  # metrics between 0 and 1
SHARE = (0.0, 1.0)


def configuration_key(row: ComparisonRow) -> tuple[str, ...]:
    """Return the overrides except seed and fold keys; equal for replicates."""
    values_by_key = overrides_by_key(row.overrides)
    return tuple(f"{key}={v}" for key, v in values_by_key.items() if key not in REPLICATE_KEYS)


def name_configurations(rows: Sequence[ComparisonRow]) -> dict[tuple[str, ...], str]:
    """Return a name for each configuration, by its key."""
    keys = list(dict.fromkeys(map(configuration_key, rows)))
    return dict(zip(keys, name_rows(keys, [""] * len(keys)), strict=True))


def merge_replicates(run_rows: list[ComparisonRow]) -> list[ComparisonRow]:
    """Return one row per configuration; the same list if none ran more than once.

    Merged rows have the means of their runs, with intervals in `estimates`.
    """
    groups: dict[tuple[str, ...], list[ComparisonRow]] = {}
    names = name_configurations(run_rows)
    for row in run_rows:
        if row.measured is None:
            groups.setdefault(configuration_key(row), []).append(row)
    rows = [_merge_runs(names[key], key, runs) for key, runs in groups.items()]
    return rows if any(row.estimates for row in rows) else run_rows


def _merge_runs(name: str, overrides: tuple[str, ...], runs: list[ComparisonRow]) -> ComparisonRow:
    """Return one row for the runs of a configuration, with the means of those that finished."""
    finished = [row for row in runs if row.finished]
    over = _describe_replicates(finished)
    row = replace((finished or runs)[0], name=name, overrides=list(overrides), folder="")
    row.averaged_over, row.run_names = over or "1 run", [run.name for run in runs]
    row.device = "; ".join(dict.fromkeys(run.device for run in runs if run.device))
    if 0 < len(finished) < len(runs):
        row.averaged_over += f"; {len(runs) - len(finished)} of {len(runs)} failed"
    if over:
        row.estimates = _estimates(finished)

    def total(*path: str) -> float:
        return sum(number_at(run.summary, *path) or 0 for run in finished)

    faults = {kind: total("faults", kind) for kind in ("non_finite", "overflow")}
    totals = {key: total(key) for key in ("steps", "skipped_steps")}
    row.summary = {**row.summary, **totals, "faults": faults}
    return row


def _describe_replicates(rows: list[ComparisonRow]) -> str:
    """Describe what the rows vary over, as `3 seeds`; "" for one row or if two are the same run."""
    overrides = [overrides_by_key(row.overrides) for row in rows]
    counts = {key: len({r.get(key) for r in overrides}) for key in (*REPLICATE_KEYS, "data.folds")}
    varied = [key for key in REPLICATE_KEYS if counts[key] > 1]
    are_distinct = len({tuple(row.get(key) for key in varied) for row in overrides}) == len(rows)
    if not (varied and are_distinct) or counts["data.folds"] > 1:
        return ""
    return " × ".join(f"{counts[key]} {REPLICATE_KEYS[key]}s" for key in varied)


def _estimates(rows: list[ComparisonRow]) -> dict[str, MeanEstimate]:
    estimates = {}
    for key in SUMMARY_PATHS:
        values = [value for row in rows if (value := row.number(key) or 0.0) > 0]
        if len(values) == len(rows):
            estimates[key] = MeanEstimate.of_positive(values)
    metrics = [{**row.metrics, **({} if row.best is None else {"best": row.best})} for row in rows]
    for name in metrics[0]:
        if all(name in others for others in metrics):
            metric_name = rows[0].monitor if name == "best" else name
            bounds = SHARE if SHARES & {*metric_name.split("/")} else UNBOUNDED
            values = [others[name] for others in metrics]
            estimates[METRIC_PREFIX + name] = MeanEstimate.of(values, bounds)
    return estimates
