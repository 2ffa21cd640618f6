"""Read finished folders into rows: a run, a sweep, a benchmark, or folders of runs and sweeps.

Folders are untrusted: one that is damaged or unreadable becomes a row with the reason.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner.benchmark.result import FILE as BENCHMARK
from runner.benchmark.result import BenchmarkResult
from runner.checkpoint.lock import is_locked
from runner.data.config import LOADING
from runner.errors import StorageError, UsageError
from runner.record.hydra_files import (
    OVERRIDES,
    overrides_by_key,
    read_flat_config,
    recorded_overrides,
)
from runner.report.comparison import Comparison, Row, number, of_benchmark, read_json, text
from runner.report.naming import names
from runner.report.replicates import configuration, replicate
from runner.report.search import read_search
from runner.training.summary import FILE as SUMMARY
from runner.training.summary import Summary

SWEEP = "sweep.json"
RATE = "samples_per_second"
DEPTH = 6  # of folders within folders: outputs/sweeps/<name>/<time>/<job>
NOT_RUNS = {"checkpoints", "debug", "ranks", "comparison", "__pycache__"}
SHORTEST = 10  # minimum steps for a speed-up; the first three are not timed
ENDS = ("done", "stopped", "interrupted", "failed", "killed", "timeout", "oom", "skipped")
"""The statuses of a row, besides `running`."""
TROUBLE = (OSError, ValueError, AttributeError, RecursionError)
"""Exceptions that reading an untrusted folder may raise."""
ONE_RUN_EACH = "one run each, not interleaved: only a hint; job=benchmark measures"
IN_PAIRS = (
    "speed-ups compare runs of the same seed or fold, not interleaved, so they include other load "
    "on the machine; job=benchmark measures"
)


def of_folders(folders: Sequence[Path]) -> Comparison:
    """Return the comparison of a benchmark, a sweep, or all runs and sweeps in several folders.

    Raises UsageError if there is nothing to compare, StorageError for a damaged benchmark; a
    damaged run becomes a row with the reason.
    """
    for folder in folders:
        try:
            os.listdir(folder)
        except OSError as error:
            raise UsageError(f"{folder}: cannot be read: {error.strerror}") from None
    first, *others = folders
    if (first / BENCHMARK).exists() and not others:
        return of_benchmark(BenchmarkResult.read(first), first)
    notes: list[str] = []
    if _is_sweep(first) and not others:
        home, kind, rows = first.absolute(), "sweep", list(_sweep_rows(first.absolute(), notes))
        command = text(read_json(home / SWEEP), "command")
    else:
        home, kind = Path(os.path.commonpath([folder.absolute() for folder in folders])), "runs"
        rows = [row for folder in folders for row in _rows(folder.absolute(), notes, DEPTH)]
        rows = list({row.folder or id(row): row for row in rows}.values())  # each folder once
        command = shlex.join(["python", "-m", "runner.report", *map(str, folders)])
    if not rows:
        reason = "; ".join(notes) or f"no {SUMMARY}, {SWEEP} or {BENCHMARK} in it"
        fix = "name a folder of outputs/runs, outputs/sweeps or outputs/benchmarks"
        raise UsageError(f"{first}: nothing to compare: {reason}; {fix}")
    search = read_search(home) if kind == "sweep" else None
    reference, rows = "", _named(rows, home)
    if search is None:  # whose trials differ in what they train
        reference, rows = _with_ratios(rows, notes)
    title = home.name or kind
    if title[:1].isdigit():  # outputs/sweeps/<title>/<time>-<id>
        title = home.parent.name or title
    notes = list(dict.fromkeys(notes))
    return Comparison(title, rows, kind, reference, notes, command, None, search, home)


def _is_sweep(folder: Path) -> bool:
    return (folder / SWEEP).exists() or (folder / "multirun.yaml").exists()


def _is_run(folder: Path) -> bool:
    """Whether it is a run that trains or evaluates; other jobs write no summary.

    A folder without read permission counts as one, so that its row reports that.
    """
    try:
        if (folder / SUMMARY).exists():
            return True
        begun = (folder / OVERRIDES).exists()
    except PermissionError:
        return True
    typed = overrides_by_key(recorded_overrides(folder)) if begun else {"job": "none"}
    return typed.get("job", "train") in ("train", "evaluate")


def _rows(folder: Path, notes: list[str], depth: int) -> Iterator[Row]:
    """Yield the rows of `folder` or, if it is neither run nor sweep, of its subfolders."""
    try:
        os.listdir(folder)  # raises if it cannot be read
        if (folder / BENCHMARK).exists():
            notes.append(f"{folder.name} is a benchmark, compared by itself: left out")
        elif _is_sweep(folder):
            yield from _sweep_rows(folder, notes)
        elif _is_run(folder):
            yield _run_row(folder)
        elif depth:
            for inside in _folders(folder):
                yield from _rows(inside, notes, depth - 1)
    except TROUBLE as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        notes.append(f"{folder.name} is skipped: {reason}")


def _folders(folder: Path) -> list[Path]:
    """Return the subfolders that may hold runs, numbered ones in numeric order."""
    inside = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    visible = [p for p in inside if not p.name.startswith(".") and p.name not in NOT_RUNS]
    return sorted(visible, key=lambda p: (len(p.name) if p.name.isdigit() else 99, p.name))


def _sweep_rows(folder: Path, notes: list[str]) -> Iterator[Row]:
    """Yield a sweep's jobs in order, including those that never started."""
    state = read_json(folder / SWEEP)
    jobs = state.get("jobs") if isinstance(state, dict) else None
    if state is None and (folder / SWEEP).exists():
        notes.append(f"{SWEEP} is damaged: jobs are listed by their folders")
    known = set()
    for i, job in enumerate(jobs if isinstance(jobs, list) else []):
        row = _job_row(i, job if isinstance(job, dict) else {}, folder)
        known.add(row.folder)
        yield row
    for path in _folders(folder):
        if str(path) not in known and _is_run(path):
            yield _run_row(path)


def _run_row(folder: Path) -> Row:
    """Return the row of a run's folder; if unreadable, a failed row with the reason."""
    typed = recorded_overrides(folder)
    return _guarded(folder, typed, lambda: _read_run(folder, typed))


def _guarded(folder: Path, typed: list[str], make: Callable[[], Row]) -> Row:
    try:
        return make()
    except TROUBLE as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        reason = f"its folder cannot be read: {why or type(error).__name__}"
        place = str(folder) if isinstance(error, PermissionError) else ""
        return Row(typed, "failed", reason, folder=place, command=_command(typed))


def _job_row(index: int, job: dict[str, Any], sweep: Path) -> Row:
    """Return the row of a sweep's job, from the sweep's record and the run's."""
    listed = job.get("overrides")
    typed = [str(item) for item in listed] if isinstance(listed, list) else []
    name = text(job, "folder") or str(index)
    return _guarded(sweep / name, typed, lambda: _read_job(sweep, name, job, typed))


def _read_job(sweep: Path, name: str, job: dict[str, Any], typed: list[str]) -> Row:
    if "\0" in name or ".." in Path(name).parts or Path(name).is_absolute():
        raise ValueError("it is outside the sweep's folder")
    status, reason, running = text(job, "status"), text(job, "reason"), is_locked(sweep)
    if status == "running" and not running:
        status, reason = "killed", "the sweep ended before it did"
    elif status == "waiting":
        status, reason = "skipped", "not started yet" if running else "never started"
    elif status not in ("", "running", *ENDS):
        status, reason = "failed", f"unknown job status: {status}"
    folder = sweep / name
    if not _is_run(folder):
        row = Row(typed, status or "skipped", reason or "never started", folder=str(folder))
        return replace(row, command=_command(typed))
    row = _read_run(folder, typed)
    if row.finished and status == "killed":  # the sweep ended before it recorded the job's end
        return row
    if status and status not in ("running", row.status):
        row = replace(row, status=status, reason=reason or row.reason)
    return row


def _read_run(folder: Path, typed: list[str]) -> Row:
    row = Row(typed, "failed", folder=str(folder), command=_command(typed))
    if not (folder / SUMMARY).exists():
        if is_locked(folder):
            return replace(row, status="running", reason="no summary yet")
        return replace(
            row, status="killed", reason=f"no {SUMMARY}: the run ended before writing it"
        )
    try:
        Summary.read(folder)  # raises with what is wrong
    except StorageError as error:
        return replace(row, reason=str(error).replace(str(folder) + "/", ""))
    summary = read_json(folder / SUMMARY)
    if not isinstance(summary, dict):
        return replace(row, reason=f"{SUMMARY}: nested too deeply")
    status, reason = text(summary, "status") or "failed", text(summary, "reason")
    if status == "running" and not is_locked(folder):
        steps = number(summary, "steps") or 0
        status, reason = "killed", f"its process is gone; the last record is of step {steps:,.0f}"
    settings = read_flat_config(folder) or {
        "data.name": text(summary, "name"),
        **overrides_by_key(typed),
    }
    return replace(
        row,
        status=status,
        reason=reason,
        summary=summary,
        command=text(summary, "command") or row.command,
        judged_on=_judged_on(settings, text(summary, "monitor")),
        work=_work(settings, summary),
    )


def _judged_on(settings: Mapping[str, Any], monitor: str) -> str:
    """Return a key that is equal for runs whose monitored metrics can be compared."""

    def chosen(group: str) -> Any:
        named = (settings.get(f"{group}.{key}") for key in ("_target_", "kind"))
        return next(filter(None, named), None) or settings.get(group)

    parts = [chosen("data"), settings.get("data.path"), settings.get("data.target")]
    objective = chosen("objective"), settings.get("objective.loss")
    named = [name for name in objective if name not in (None, "auto")]
    if monitor == "val/loss" and named:  # the loss depends on it
        parts += ["with", *named]
    return " ".join(str(part) for part in parts if part)


def _work(settings: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """Return a key that is equal for runs whose speeds can be compared."""
    device = text(summary, "device", "kind"), text(summary, "device", "name")
    parts = {
        key: str(value)
        for key, value in sorted(settings.items())
        if key.partition(".")[0] in ("data", "model") and key.removeprefix("data.") not in LOADING
    }
    return f"{device} {parts}"


def _command(overrides: Sequence[str]) -> str:
    return shlex.join(["python", "-m", "runner", *overrides])


def _named(rows: list[Row], home: Path) -> list[Row]:
    """Return the rows with names, and with folders relative to `home`."""
    places = [os.path.relpath(row.folder, home) if row.folder else "" for row in rows]
    made = names([row.overrides for row in rows], places)
    return [
        replace(row, name=name, folder=place)
        for row, name, place in zip(rows, made, places, strict=True)
    ]


def _with_ratios(rows: list[Row], notes: list[str]) -> tuple[str, list[Row]]:
    """Set the rows' speed-ups and return the reference's name with the rows.

    The reference is the first run with `optimization=none`, else the first run. Only runs of the
    same data, model and device with enough steps have a ratio. Where configurations ran with
    several seeds or folds, it is to the reference's run of the same seed and fold.
    """
    timed = [row for row in rows if row.finished and row.number(RATE)]
    long = [row for row in timed if (number(row.summary, "steps") or 0) >= SHORTEST]
    groups: dict[str, list[Row]] = {}
    for row in long:
        groups.setdefault(row.work, []).append(row)
    same = max(groups.values(), key=len, default=[])  # the first of several equally large
    if len({configuration(row) for row in same}) < 2:  # no speed-up between seeds
        return "", rows
    plain = [row for row in same if overrides_by_key(row.overrides).get("optimization") == "none"]
    reference = (plain or same)[0]
    shared = configuration(reference)
    partners = {replicate(row): row.number(RATE) for row in same if configuration(row) == shared}
    for row in same:
        if rate := partners.get(replicate(row)):
            row.speedup = (row.number(RATE) or 0.0) / rate
    notes.append(ONE_RUN_EACH if len(partners) < 2 else IN_PAIRS)
    if len(same) < len(long):
        notes.append(f"no speed-up over {reference.name} with another data set, model or device")
    if len(long) < len(timed):
        notes.append(f"fewer than {SHORTEST} steps: no speed-up")
    return reference.name, rows
