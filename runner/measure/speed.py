"""The speed of a sweep's runs: which engaged the same, and figures measured in turns."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner.core.config.groups import REPLICATE_KEYS, without_arguments
from runner.core.errors import StorageError
from runner.core.format import join_names
from runner.core.record.hydra_files import overrides_by_key
from runner.core.record.text import quote_for_hydra
from runner.core.schemas.data import LOADING_KEYS
from runner.measure.benchmark.result import FILE, BenchmarkResult
from runner.measure.comparison_row import ComparisonRow, number_at, text_at
from runner.measure.naming import changes_speed, varied_keys
from runner.measure.replicates import configuration_key, name_configurations

FOLDER = "benchmark"  # of a sweep: the configurations measured in turns
MIN_TURNS = 5  # of each configuration, for an interval and a headline
MAX_ARMS = 6  # of the command that compares speeds
MEASURED_FACTS = {"cache", "pairs"}  # evidence that differs between equal runs, besides numbers
SHARED_GROUPS = {"job", "benchmark", "sweep", "search", "hydra", "security", "name", "monitoring"}
"""Groups of keys that cannot differ between the arms of a benchmark, or make no difference."""


def engagement(row: ComparisonRow) -> str:
    """Return what engaged in a run, without measured numbers; equal for runs that compute alike."""
    engaged = {name: x.get("evidence") for name, x in row.techniques.items() if x.get("engaged")}
    tools, keys = row.summary.get("tools"), overrides_by_key(row.overrides)
    names = [text_at(tool, "name") for tool in tools] if isinstance(tools, list) else []
    debug = {key: value for key, value in keys.items() if key.startswith("debug.")}
    device = text_at(row.summary, "device", "kind"), number_at(row.summary, "device", "threads")
    facts = [_without_measurements(engaged), names, debug, device, row.workload]
    return json.dumps(facts, sort_keys=True, default=str)


def _without_measurements(value: Any) -> Any:
    if isinstance(value, Mapping):
        facts = {k: x for k, x in value.items() if k not in MEASURED_FACTS}
        return {k: _without_measurements(x) for k, x in facts.items() if not isinstance(x, float)}
    if isinstance(value, list):
        return [_without_measurements(x) for x in value if not isinstance(x, float)]
    return value


def describe_equal_engagement(rows: Sequence[ComparisonRow]) -> list[str]:
    """Return a note for each group of configurations of which the same techniques engaged."""
    groups: dict[str, dict[tuple[str, ...], ComparisonRow]] = {}
    for row in rows:
        if row.finished and row.techniques:
            groups.setdefault(engagement(row), {}).setdefault(configuration_key(row), row)
    notes = []
    for members in (list(group.values()) for group in groups.values() if len(group) > 1):
        engaged = (x for x, entry in members[0].techniques.items() if entry.get("engaged"))
        what = join_names(name.replace("_", " ") for name in engaged) or "no technique"
        notes.append(f"{join_names([row.name for row in members])} engaged the same: {what}")
    return notes


def differ_in_speed(rows: Sequence[ComparisonRow]) -> bool:
    """Whether keys that can change speed differ between finished rows, and what engaged, too."""
    finished = [row for row in rows if row.finished and row.summary]
    varied = varied_keys([overrides_by_key(row.overrides) for row in finished])
    return any(map(changes_speed, varied)) and len(set(map(engagement, finished))) > 1


def has_distributed_rows(rows: Sequence[ComparisonRow]) -> bool:
    """Whether a row is of several processes, which a benchmark does not compare."""
    return any(
        number_at(row.summary, "distributed", "world_size")
        or overrides_by_key(row.overrides).get("distributed", "none") != "none"
        for row in rows
    )


def benchmark_command(rows: Sequence[ComparisonRow]) -> str:
    """Return the job=benchmark command that compares the rows' configurations in turns.

    It is "" for runs of several processes, and if fewer than two can be arms. Other data, seeds
    and folds are those of the first row.
    """
    finished = [row for row in rows if row.finished]
    if has_distributed_rows(finished):
        return ""
    typed = [_texts_by_key(row.overrides) for row in finished]
    keys = [key for key in varied_keys(typed) if _may_differ_between_arms(key)]
    arms = [[by_key[key] for key in keys if key in by_key] for by_key in typed]
    texts = list(dict.fromkeys(map(_arm_text, filter(None, arms))))[:MAX_ARMS]
    if len(texts) < 2:
        return ""
    words = shlex.split(finished[0].command)
    replaced = {*keys, "job", "checkpoint.resume"}
    words = [word for word in words if not _texts_by_key([word]).keys() & replaced]
    # double marks: a shell takes what has no single ones without escapes
    listed = ",".join(x if x.isidentifier() else quote_for_hydra(x, "double") for x in texts)
    return shlex.join([*words, "job=benchmark", f"benchmark.arms=[{listed}]"])


def _texts_by_key(overrides: Sequence[str]) -> dict[str, str]:
    """Return the overrides as typed, with + or ~, by key."""
    texts = map(without_arguments, overrides)
    return {key: text for text in texts for key in overrides_by_key([text])}


def _may_differ_between_arms(key: str) -> bool:
    group, _, name = key.partition(".")
    fixed = (*REPLICATE_KEYS, "experiment", "checkpoint.resume")
    if key in fixed or group in SHARED_GROUPS:
        return False
    return group != "data" or name in LOADING_KEYS


def _arm_text(overrides: Sequence[str]) -> str:
    level = overrides[0].removeprefix("optimization=")
    return level if len(overrides) == 1 and level.isidentifier() else shlex.join(overrides)


def read_measured_speed(sweep: Path) -> BenchmarkResult | None:
    """Return the configurations of a sweep as measured in turns; None if they were not."""
    try:
        return BenchmarkResult.read(sweep / FOLDER / FILE)
    except StorageError:
        return None


def set_measured_speed(rows: Sequence[ComparisonRow], result: BenchmarkResult) -> BenchmarkResult:
    """Set speed-up, interval and claim of the rows that were measured.

    Returns the result with the names of the rows; without claims after fewer than `MIN_TURNS`.
    """
    arms, names = [], {}
    merged_names = name_configurations(rows)
    for arm in result.arms:
        key = configuration_key(ComparisonRow(arm.overrides, ""))
        if arm.blocks < MIN_TURNS:
            arm = replace(arm, speedup_interval=None, claim="")
        members = [row for row in rows if row.finished and configuration_key(row) == key]
        for row in members:
            row.speedup, row.speedup_interval = arm.speedup, arm.speedup_interval
            row.claim = arm.claim
        names[arm.name] = members[0].name if len(members) == 1 else merged_names.get(key, arm.name)
        arms.append(replace(arm, name=names[arm.name]))
    return replace(result, arms=arms, reference=names.get(result.reference, result.reference))
