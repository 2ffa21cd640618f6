"""What lies in finished folders, as rows: runs, sweeps, benchmarks. None is trusted to be whole."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]  # what OmegaConf reads files with

from runner.benchmark.result import FILE as BENCHMARK
from runner.benchmark.result import BenchmarkResult
from runner.checkpoint.lock import is_locked
from runner.errors import StorageError, UsageError
from runner.report import facts
from runner.report.comparison import Comparison, Row, of_benchmark
from runner.report.naming import keys, names
from runner.summary import FILE as SUMMARY
from runner.summary import Summary

SWEEP = "sweep.json"
DEPTH = 6  # of folders within folders: outputs/benchmarks/<name>/<time>/<arm>
NOT_RUNS = {"checkpoints", "debug", "comparison", "__pycache__"}
ONE_RUN_EACH = "one run each, not interleaved: read it as a hint; job=benchmark measures"


@dataclass
class Found:
    """A folder that is something: `kind` is run, sweep or benchmark."""

    kind: str
    folder: Path
    rows: list[Row] = field(default_factory=list)
    result: BenchmarkResult | None = None
    command: str = ""
    notes: list[str] = field(default_factory=list)


def compare(folders: Sequence[Path]) -> Comparison:
    """All that lies in `folders`; UsageError where that is nothing."""
    found: list[Found] = []
    seen: set[Path] = set()
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder}: {'not a folder' if folder.exists() else 'no such folder'}")
        here = list(_walk(folder.absolute(), seen, DEPTH))
        if not here and folder.resolve() not in seen:
            raise UsageError(
                f"{folder}: nothing to compare: no {SUMMARY}, {SWEEP} or {BENCHMARK} in it; "
                "name a folder of outputs/runs, outputs/sweeps or outputs/benchmarks"
            )
        found += here
    if not any(one.rows or one.result for one in found):
        raise UsageError(f"{folders[0]}: nothing to compare: no job in it has begun")
    if len(found) == 1 and found[0].result is not None:
        return of_benchmark(found[0].result, found[0].folder)
    if len(found) == 1 and found[0].kind == "sweep":
        return _of_sweep(found[0])
    return _together(found, [folder.absolute() for folder in folders])


def _walk(folder: Path, seen: set[Path], depth: int) -> Iterator[Found]:
    """What `folder` is, or else what is in it; a folder reached twice counts once."""
    resolved = folder.resolve()
    if resolved in seen:
        return
    seen.add(resolved)
    if (folder / BENCHMARK).exists():
        yield _benchmark(folder, seen)
    elif (folder / SWEEP).exists() or (folder / "multirun.yaml").exists():
        yield _sweep(folder, seen)
    elif _is_run(folder):
        yield Found("run", folder, [_row(folder)])
    elif depth:
        for inside in _folders(folder):
            yield from _walk(inside, seen, depth - 1)


def _folders(folder: Path) -> list[Path]:
    """The folders in it, numbered ones in the order of their numbers."""
    try:
        inside = [path for path in folder.iterdir() if path.is_dir()]
    except OSError:
        return []
    visible = [p for p in inside if not p.name.startswith(".") and p.name not in NOT_RUNS]
    return sorted(visible, key=lambda p: (len(p.name) if p.name.isdigit() else 99, p.name))


def _is_run(folder: Path) -> bool:
    """Whether it is one that trains or evaluates: other jobs leave no summary, nor need to."""
    if (folder / SUMMARY).exists():
        return True
    begun = (folder / ".hydra" / "overrides.yaml").exists()
    return begun and keys(_overrides(folder)).get("job", "train") in ("train", "evaluate")


def _benchmark(folder: Path, seen: set[Path]) -> Found:
    """Its result; where that is damaged, the runs of its arms."""
    runs = [inside for inside in _folders(folder) if _is_run(inside)]
    seen.update(run.resolve() for run in runs)
    try:
        return Found("benchmark", folder, result=BenchmarkResult.read(folder))
    except StorageError as error:
        note = f"{error}; its arms are shown as the runs they were"
        rows = [_row(run) for run in runs] or [Row([], "failed", str(error))]
        return Found("sweep", folder, rows, notes=[note])


def _sweep(folder: Path, seen: set[Path]) -> Found:
    """Its jobs in their order; those that never began are rows as well."""
    told = _json(folder / SWEEP)
    jobs = told.get("jobs") if isinstance(told, dict) else None
    rows, known = [], set()
    for number, job in enumerate(jobs if isinstance(jobs, list) else []):
        job = job if isinstance(job, dict) else {}
        place = folder / (facts.text(job, "folder") or str(number))
        known.add(place.resolve())
        rows.append(_job(place, job))
    for inside in _folders(folder):
        if inside.resolve() not in known and _is_run(inside):
            rows.append(_row(inside))
    seen.update(path.resolve() for path in _folders(folder))
    notes = []
    if (folder / SWEEP).exists() and told is None:
        notes.append(f"{SWEEP} is damaged: the jobs are those whose folders are there")
    return Found("sweep", folder, rows, command=facts.text(told, "command"), notes=notes)


def _job(folder: Path, job: dict[str, Any]) -> Row:
    """A job as the sweep tells of it, with what its run says."""
    overrides = job.get("overrides")
    typed = [str(item) for item in overrides] if isinstance(overrides, list) else None
    status, reason = facts.text(job, "status"), facts.text(job, "reason")
    if status == "running" and not is_locked(folder.parent):
        status, reason = "killed", "the sweep ended before it did"
    if not _is_run(folder):
        row = Row(typed or [], status or "skipped", reason or "never begun", folder=str(folder))
        return replace(row, command=_command(row.overrides))
    row = _row(folder, typed)
    if row.finished and status == "killed":  # its end was not noted any more
        return row
    if status and status not in ("running", row.status):
        row = replace(row, status=status, reason=reason or row.reason)
    return row


def _row(folder: Path, typed: list[str] | None = None) -> Row:
    """A run's folder; one whose record is missing or damaged says so."""
    overrides = _overrides(folder) if typed is None else typed
    row = Row(overrides, "failed", folder=str(folder), command=_command(overrides))
    if not (folder / SUMMARY).exists():
        if is_locked(folder):
            return replace(row, status="running", reason="it has not come to a summary yet")
        return replace(row, status="killed", reason=f"no {SUMMARY}: it ended before it wrote one")
    try:
        Summary.read(folder)  # says what is wrong with it
    except StorageError as error:
        return replace(row, reason=str(error).replace(str(folder) + "/", ""))
    raw = _json(folder / SUMMARY)
    raw = raw if isinstance(raw, dict) else {}
    status, reason = facts.text(raw, "status") or "failed", facts.text(raw, "reason")
    if status == "running" and not is_locked(folder):
        steps = facts.number(raw, "steps") or 0
        status, reason = "killed", f"its process is gone; its last record is of step {steps:,.0f}"
    command = facts.text(raw, "command") or row.command
    return replace(row, status=status, reason=reason, summary=raw, command=command)


def _overrides(folder: Path) -> list[str]:
    try:
        found = OmegaConf.load(folder / ".hydra" / "overrides.yaml")
        listed = OmegaConf.to_container(found, resolve=False)
    except (OSError, ValueError, YAMLError, OmegaConfBaseException):
        return []
    return [str(item) for item in listed] if isinstance(listed, list) else []


def _command(overrides: Sequence[str]) -> str:
    return shlex.join(["python", "-m", "runner", *overrides])


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _of_sweep(found: Found) -> Comparison:
    rows = _named(found.rows, found.folder)
    reference, rows = _held_against(rows)
    notes = [*found.notes, *([ONE_RUN_EACH] if reference else [])]
    return Comparison(
        _title(found.folder),
        rows,
        kind="sweep",
        reference=reference,
        notes=notes,
        command=found.command,
        home=found.folder,
    )


def _title(folder: Path) -> str:
    """`digits-mlp` of outputs/sweeps/digits-mlp/<time>-<id>."""
    dated = folder.name[:1].isdigit() and len(folder.parent.name) > 0
    return folder.parent.name if dated else folder.name


def _together(found: list[Found], folders: list[Path]) -> Comparison:
    """Things of several kinds, or several of one kind: one row for each run and arm."""
    results = [one.result for one in found if one.result is not None]
    home = _common(folders)
    plain = [row for one in found for row in one.rows]
    rows = _named(plain, home)
    reference, rows = _held_against(rows, alike=True)
    notes = list(dict.fromkeys(note for one in found for note in one.notes))
    if reference and sum(row.speedup is not None for row in rows) > 1:
        notes.append(ONE_RUN_EACH)
    several = len({result.name for result in results}) > 1
    rows += [row for one in found for row in _arms(one, home, several)]
    if results:
        notes.insert(0, "each benchmark's speed-ups are against its own reference")
    return Comparison(
        home.name or "runs",
        rows,
        kind="runs",
        reference=reference,
        notes=notes,
        command=shlex.join(["python", "-m", "runner.report", *map(str, folders)]),
        history=sorted(results, key=lambda result: result.started),
        home=home,
    )


def _arms(one: Found, home: Path, several: bool) -> list[Row]:
    """A benchmark's arms, named so that those of several benchmarks are told apart."""
    result = one.result
    if result is None:
        return []
    when = result.started[:16].replace("T", " ") or one.folder.name
    place = os.path.relpath(one.folder, home)
    return [
        replace(
            row,
            name=f"{result.name} {when} {row.name}" if several else f"{when} {row.name}",
            folder=f"{place}/{row.folder}" if row.folder else "",
        )
        for row in of_benchmark(result, one.folder).rows
    ]


def _common(folders: list[Path]) -> Path:
    if len(folders) == 1:
        return folders[0]
    parts = [folder.parts for folder in folders]
    shared = 0
    while all(len(p) > shared for p in parts) and len({p[shared] for p in parts}) == 1:
        shared += 1
    return Path(*parts[0][:shared])


def _named(rows: list[Row], home: Path) -> list[Row]:
    """Rows with their names, and folders relative to `home`."""
    places = [os.path.relpath(row.folder, home) if row.folder else "" for row in rows]
    made = names([row.overrides for row in rows], places)
    return [
        replace(row, name=name, folder=place)
        for row, name, place in zip(rows, made, places, strict=True)
    ]


def _held_against(rows: list[Row], alike: bool = False) -> tuple[str, list[Row]]:
    """The row that others are compared with, and the rows with their ratios to it.

    The plain one if there is one, else the first that is done. With `alike` only runs of one
    experiment have a ratio: samples of another one take another time.
    """
    able = [row for row in rows if row.finished and facts.samples_per_second(row)]
    if alike and able:
        experiment = facts.text(able[0].summary, "name")
        able = [row for row in able if facts.text(row.summary, "name") == experiment]
    plain = [row for row in able if keys(row.overrides).get("optimization") == "none"]
    if len(able) < 2:
        return "", rows  # there is nothing to hold anything against
    reference = (plain or able)[0]
    rate = facts.samples_per_second(reference) or 1.0
    return reference.name, [
        replace(row, speedup=(facts.samples_per_second(row) or 0.0) / rate) if row in able else row
        for row in rows
    ]
