"""Read finished folders into rows: a run, a sweep, a benchmark, or folders of runs and sweeps.

Folders are untrusted: one that is damaged or unreadable becomes a row with the reason.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner.core.checkpoint.lock import is_locked
from runner.core.errors import StorageError, UsageError
from runner.core.module_path import python_command
from runner.core.record.hydra_files import (
    OVERRIDES,
    overrides_by_key,
    read_flat_config,
    recorded_overrides,
)
from runner.core.record.json_records import read_json
from runner.core.record.summary import SUMMARY_FILE, Summary
from runner.core.schemas.data import LOADING_KEYS
from runner.core.schemas.models import ObjectiveConfig
from runner.measure.benchmark.result import FILE as BENCHMARK_FILE
from runner.measure.benchmark.result import BenchmarkResult
from runner.measure.comparison import Comparison, best_first, compare_arms
from runner.measure.comparison_row import ComparisonRow, number_at, text_at
from runner.measure.naming import name_rows
from runner.measure.speed import (
    benchmark_command,
    describe_equal_engagement,
    read_measured_speed,
    set_measured_speed,
)
from runner.scale.sweep.search_record import read_search

SWEEP_FILE = "sweep.json"
MAX_DEPTH = 6  # of folders within folders: outputs/sweeps/<name>/<time>/<job>
LOSS_OPTIONS = ("label_smoothing", "gamma", "delta")  # of `objective`
NOT_RUNS = {"checkpoints", "debug", "ranks", "comparison", "__pycache__"}
END_STATUSES = ("done", "stopped", "interrupted", "failed", "killed", "timeout", "oom", "skipped")
"""The statuses of a row, besides `running`."""
READ_ERRORS = (OSError, ValueError, AttributeError, RecursionError)
"""Exceptions that reading an untrusted folder may raise."""
UNPAIRED_NOTE = (
    "not interleaved: the times include other load on the machine, so there is no speed-up"
)


def compare(folders: str | Path | Sequence[str | Path]) -> Comparison:
    """Compare runs, sweeps or a benchmark, as `python -m runner.report` does, writing nothing.

    A notebook shows its table. Raises UsageError if there is nothing to compare, StorageError for a
    damaged benchmark.
    """
    several = [folders] if isinstance(folders, str | Path) else folders
    if not isinstance(several, Sequence) or not all(isinstance(f, str | Path) for f in several):
        raise UsageError(f"compare: takes folders of runs, got {folders!r}")
    if not several:
        raise UsageError("compare: takes at least one folder of a run")
    return compare_folders([Path(folder) for folder in several])


def compare_folders(folders: Sequence[Path]) -> Comparison:
    """Return the comparison of a benchmark, a sweep, or all runs and sweeps in several folders.

    Raises UsageError if there is nothing to compare, StorageError for a damaged benchmark; a
    damaged run becomes a row with the reason.
    """
    for folder in folders:
        try:
            os.listdir(folder)
        except OSError as error:
            fix = "name the folder of a run, a sweep or a benchmark"
            raise UsageError(f"{folder}: cannot be read: {error.strerror}; {fix}") from None
    first, *others = folders
    if (first / BENCHMARK_FILE).exists() and not others:
        return compare_arms(BenchmarkResult.read(first), first)
    notes: list[str] = []
    if _is_sweep(first) and not others:
        root, kind, rows = first.absolute(), "sweep", list(_sweep_rows(first.absolute(), notes))
        command = text_at(read_json(root / SWEEP_FILE), "command")
    else:
        root, kind = Path(os.path.commonpath([folder.absolute() for folder in folders])), "runs"
        found = (r for folder in folders for r in _find_rows(folder.absolute(), notes, MAX_DEPTH))
        rows = list({row.folder or id(row): row for row in found}.values())  # each folder once
        command = shlex.join([*python_command("runner.report"), *map(str, folders)])
    if not rows:
        reason = "; ".join(notes) or f"no {SUMMARY_FILE}, {SWEEP_FILE} or {BENCHMARK_FILE} in it"
        fix = "name a folder of outputs/runs, outputs/sweeps or outputs/benchmarks"
        raise UsageError(f"{first}: nothing to compare: {reason}; {fix}")
    rows, measured, speed_command = _name_rows(rows, root), None, ""
    search = read_search(root) if kind == "sweep" else None
    if search is None:  # whose trials differ in what they train
        notes += describe_equal_engagement(rows)
        if kind == "sweep" and (measured := read_measured_speed(root)) is not None:
            measured = set_measured_speed(rows, measured)
        elif kind == "sweep":
            speed_command = benchmark_command(rows)
        if measured is None and sum(row.finished for row in rows) > 1:
            notes.append(UNPAIRED_NOTE)
    title = root.name or kind
    if title[:1].isdigit():  # outputs/sweeps/<title>/<time>-<id>
        title = root.parent.name or title
    reference, notes = measured.reference if measured else "", list(dict.fromkeys(notes))
    return best_first(
        Comparison(
            title, rows, kind, reference, notes, command, measured, search, root, speed_command
        )
    )


def _is_sweep(folder: Path) -> bool:
    return (folder / SWEEP_FILE).exists() or (folder / "multirun.yaml").exists()


def _is_run(folder: Path) -> bool:
    """Whether it is a run that trains or evaluates; other jobs write no summary.

    A folder without read permission counts as one, so that its row reports that.
    """
    try:
        if (folder / SUMMARY_FILE).exists():
            return True
        is_hydra_run = (folder / OVERRIDES).exists()
    except PermissionError:
        return True
    overrides = overrides_by_key(recorded_overrides(folder)) if is_hydra_run else {"job": "none"}
    return overrides.get("job", "train") in ("train", "evaluate")


def _find_rows(folder: Path, notes: list[str], depth: int) -> Iterator[ComparisonRow]:
    """Yield the rows of `folder` or, if it is neither run nor sweep, of its subfolders."""
    try:
        os.listdir(folder)  # raises if it cannot be read
        if (folder / BENCHMARK_FILE).exists():
            notes.append(f"{folder.name} is a benchmark, compared by itself: left out")
        elif _is_sweep(folder):
            yield from _sweep_rows(folder, notes)
        elif _is_run(folder):
            yield _run_row(folder)
        elif depth:
            for subfolder in _subfolders(folder):
                yield from _find_rows(subfolder, notes, depth - 1)
    except READ_ERRORS as error:
        yield _unreadable_row(folder, [], error)


def _subfolders(folder: Path) -> list[Path]:
    folders = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    visible = [p for p in folders if not p.name.startswith(".") and p.name not in NOT_RUNS]
    return sorted(visible, key=lambda p: (len(p.name) if p.name.isdigit() else 99, p.name))


def _sweep_rows(folder: Path, notes: list[str]) -> Iterator[ComparisonRow]:
    """Yield a sweep's jobs in order, including those that never started."""
    state = read_json(folder / SWEEP_FILE)
    jobs = state.get("jobs") if isinstance(state, dict) else None
    if state is None and (folder / SWEEP_FILE).exists():
        notes.append(f"{SWEEP_FILE} is damaged: jobs are listed by their folders")
    job_folders = set()
    for i, job in enumerate(jobs if isinstance(jobs, list) else []):
        job = job if isinstance(job, dict) else {}
        entries, name = job.get("overrides"), text_at(job, "folder") or str(i)
        overrides = [str(item) for item in entries] if isinstance(entries, list) else []
        job_folders.add(folder / name)
        try:
            yield _read_job_row(folder, name, job, overrides)
        except READ_ERRORS as error:
            yield _unreadable_row(folder / name, overrides, error)
    for path in _subfolders(folder):
        if path not in job_folders and _is_run(path):
            yield _run_row(path)


def _run_row(folder: Path) -> ComparisonRow:
    overrides = recorded_overrides(folder)
    try:
        return _read_run_row(folder, overrides)
    except READ_ERRORS as error:
        return _unreadable_row(folder, overrides, error)


def _unreadable_row(folder: Path, overrides: list[str], error: Exception) -> ComparisonRow:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    reason = f"its folder cannot be read: {reason or type(error).__name__}"
    row = _empty_row(folder, overrides, reason)
    return row if isinstance(error, PermissionError) else replace(row, folder="")


def _empty_row(folder: Path, overrides: list[str], reason: str = "") -> ComparisonRow:
    command = shlex.join([*python_command(), *overrides])
    return ComparisonRow(overrides, "failed", reason, folder=str(folder), command=command)


def _read_job_row(
    sweep: Path, name: str, job: dict[str, Any], overrides: list[str]
) -> ComparisonRow:
    """Return the row of a sweep's job, from the sweep's record and the run's."""
    if "\0" in name or ".." in Path(name).parts or Path(name).is_absolute():
        raise ValueError("it is outside the sweep's folder")
    folder, running = sweep / name, is_locked(sweep)
    status, reason = text_at(job, "status"), text_at(job, "reason")
    if status == "running" and not running:
        status, reason = "killed", "the sweep ended first; its command again completes it"
    elif status == "waiting":
        status, reason = "skipped", "not started yet" if running else "never started"
    elif status not in ("", "running", *END_STATUSES):
        status, reason = "failed", f"unknown job status: {status}"
    if not _is_run(folder):
        row = _empty_row(folder, overrides, reason or "never started")
        return replace(row, status=status or "skipped")
    row = replace(_read_run_row(folder, overrides), device=text_at(job, "device"))
    if row.finished and status == "killed":  # the sweep ended before it recorded the job's end
        return row
    if status and status not in ("running", row.status):
        row = replace(row, status=status, reason=reason or row.reason)
    return row


def _read_run_row(folder: Path, overrides: list[str]) -> ComparisonRow:
    """Return the row of a run's folder; one without a summary is running, or was killed."""
    row = _empty_row(folder, overrides)
    if not (folder / SUMMARY_FILE).exists():
        if is_locked(folder):
            return replace(row, status="running", reason="no summary yet")
        reason = f"no {SUMMARY_FILE}: the run ended before writing it"
        return replace(row, status="killed", reason=reason)
    try:
        Summary.read(folder)  # raises with what is wrong
    except StorageError as error:
        return replace(row, reason=str(error).replace(str(folder) + "/", ""))
    summary = read_json(folder / SUMMARY_FILE)
    if not isinstance(summary, dict):
        return replace(row, reason=f"{SUMMARY_FILE}: nested too deeply")
    status, reason = text_at(summary, "status") or "failed", text_at(summary, "reason")
    if status == "running" and not is_locked(folder):
        steps = number_at(summary, "steps") or 0
        status, reason = "killed", f"its process is gone; the last record is of step {steps:,.0f}"
    settings = {"data.name": text_at(summary, "name"), **overrides_by_key(overrides)}
    settings = read_flat_config(folder) or settings
    row = replace(row, status=status, reason=reason, summary=summary)
    row.command = text_at(summary, "command") or row.command
    row.judged_on = _metric_key(settings, text_at(summary, "monitor"))
    row.workload = _workload_key(settings, summary)
    return row


def _metric_key(settings: Mapping[str, Any], monitor: str) -> str:
    """Return a key that is equal for runs whose monitored metrics can be compared."""

    def selected_class(group: str) -> Any:
        selections = (settings.get(f"{group}.{key}") for key in ("_target_", "kind"))
        return next(filter(None, selections), None) or settings.get(group)

    parts = [selected_class("data"), settings.get("data.path"), settings.get("data.target")]
    objective = selected_class("objective"), settings.get("objective.loss")
    loss_names = [name for name in objective if name not in (None, "auto")]
    if monitor == "val/loss":  # the loss, and its unit, depend on it
        loss_names += _loss_options(settings)
        parts += ["with", *loss_names] if loss_names else []
    return " ".join(str(part) for part in parts if part)


def _loss_options(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield what else than the default changes the values of a loss."""
    unscaled = settings.get("objective._target_")
    defaults = {f"objective.{key}": getattr(ObjectiveConfig, key) for key in LOSS_OPTIONS}
    defaults["data.target_transform"] = "none" if unscaled else "standardise"
    for key, default in defaults.items():
        if (value := str(settings.get(key))) not in ("None", "null", str(default)):
            yield f"{key.rpartition('.')[2]}={value}"


def _workload_key(settings: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """Return a key that is equal for runs whose speeds can be compared."""
    device = text_at(summary, "device", "kind"), text_at(summary, "device", "name")
    keys = [key for key in sorted(settings) if key.partition(".")[0] in ("data", "model")]
    parts = {x: str(settings[x]) for x in keys if x.removeprefix("data.") not in LOADING_KEYS}
    return f"{device} {parts}"


def _name_rows(rows: list[ComparisonRow], root: Path) -> list[ComparisonRow]:
    folders = [os.path.relpath(row.folder, root) if row.folder else "" for row in rows]
    row_names = name_rows([row.overrides for row in rows], folders)
    row_names = [root.name if name == os.curdir else name for name in row_names]
    named = zip(rows, row_names, folders, strict=True)
    return [replace(row, name=name, folder=folder) for row, name, folder in named]
