"""What lies in finished folders, as rows: a run, a sweep, a benchmark, or runs and sweeps."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from runner.benchmark.result import FILE as BENCHMARK
from runner.benchmark.result import BenchmarkResult
from runner.errors import UsageError
from runner.record.hydra_files import overrides_by_key
from runner.report.comparison import Comparison, Row, number, of_benchmark, text
from runner.report.naming import names
from runner.report.read_run import TROUBLE, is_run, of_job, of_run, read_json
from runner.report.replicates import configuration, replicate
from runner.report.search import read_search
from runner.training.summary import FILE as SUMMARY

SWEEP = "sweep.json"
RATE = "samples_per_second"
DEPTH = 6  # of folders within folders: outputs/sweeps/<name>/<time>/<job>
NOT_RUNS = {"checkpoints", "debug", "ranks", "comparison", "__pycache__"}
SHORTEST = 10  # steps of a run whose speed says something; the first three are not counted
ONE_RUN_EACH = "one run each, not interleaved: read it as a hint; job=benchmark measures"
IN_PAIRS = (
    "speed-ups are of runs of the same seed or fold, which were not interleaved: whatever the "
    "machine did meanwhile is in them; job=benchmark measures"
)


def of_folders(folders: Sequence[Path]) -> Comparison:
    """A benchmark, a sweep, or all runs and sweeps in several folders; none is trusted to be whole.

    Raises UsageError where there is nothing to compare, StorageError for a damaged benchmark; a
    damaged summary is a row that says so.
    """
    for folder in folders:
        _check_folder(folder)
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
    dated = home.name[:1].isdigit() and home.parent.name  # outputs/sweeps/<title>/<time>-<id>
    return Comparison(
        (home.parent.name if dated else home.name) or kind,
        rows,
        kind=kind,
        reference=reference,
        notes=list(dict.fromkeys(notes)),
        command=command,
        home=home,
        search=search,
    )


def _check_folder(folder: Path) -> None:
    try:
        if not folder.is_dir():
            problem = "not a folder" if folder.exists() else "no such folder"
            raise UsageError(f"{folder}: {problem}")
        os.listdir(folder)  # says why it cannot be read
    except OSError as error:
        raise UsageError(f"{folder}: cannot be read: {error.strerror}") from None


def _is_sweep(folder: Path) -> bool:
    return (folder / SWEEP).exists() or (folder / "multirun.yaml").exists()


def _rows(folder: Path, notes: list[str], depth: int) -> Iterator[Row]:
    """The rows of `folder`, or else of what is in it."""
    try:
        os.listdir(folder)  # says why it cannot be read
        if (folder / BENCHMARK).exists():
            notes.append(f"{folder.name} is a benchmark, which is compared by itself: left out")
        elif _is_sweep(folder):
            yield from _sweep_rows(folder, notes)
        elif is_run(folder):
            yield of_run(folder)
        elif depth:
            for inside in _folders(folder):
                yield from _rows(inside, notes, depth - 1)
    except TROUBLE as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        notes.append(f"{folder.name} is skipped: {reason}")


def _folders(folder: Path) -> list[Path]:
    """The folders in it, numbered ones in the order of their numbers."""
    inside = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    visible = [p for p in inside if not p.name.startswith(".") and p.name not in NOT_RUNS]
    return sorted(visible, key=lambda p: (len(p.name) if p.name.isdigit() else 99, p.name))


def _sweep_rows(folder: Path, notes: list[str]) -> Iterator[Row]:
    """Its jobs in their order; those that never began are rows as well."""
    state = read_json(folder / SWEEP)
    jobs = state.get("jobs") if isinstance(state, dict) else None
    if state is None and (folder / SWEEP).exists():
        notes.append(f"{SWEEP} is damaged: the jobs are those whose folders are there")
    known = set()
    for i, job in enumerate(jobs if isinstance(jobs, list) else []):
        row = of_job(i, job if isinstance(job, dict) else {}, folder)
        known.add(row.folder)
        yield row
    for path in _folders(folder):
        if str(path) not in known and is_run(path):
            yield of_run(path)


def _named(rows: list[Row], home: Path) -> list[Row]:
    """Rows with their names, and folders relative to `home`."""
    places = [os.path.relpath(row.folder, home) if row.folder else "" for row in rows]
    made = names([row.overrides for row in rows], places)
    return [
        replace(row, name=name, folder=place)
        for row, name, place in zip(rows, made, places, strict=True)
    ]


def _with_ratios(rows: list[Row], notes: list[str]) -> tuple[str, list[Row]]:
    """The row that others are compared with, and the rows with their ratios to it.

    The plain one if there is one, else the first that is done. Only runs of the same data, model
    and device have a ratio, and only those that were long enough. Where configurations ran with
    several seeds or folds, the ratio is to the reference's run of the same ones.
    """
    timed = [row for row in rows if row.finished and row.number(RATE)]
    long = [row for row in timed if (number(row.summary, "steps") or 0) >= SHORTEST]
    groups: dict[str, list[Row]] = {}
    for row in long:
        groups.setdefault(row.work, []).append(row)
    same = max(groups.values(), key=len, default=[])  # of several, the first
    if len({configuration(row) for row in same}) < 2:  # other seeds alone are no other speed
        return "", rows
    plain = [row for row in same if overrides_by_key(row.overrides).get("optimization") == "none"]
    reference = (plain or same)[0]
    shared = configuration(reference)
    partners = {replicate(row): row.number(RATE) for row in same if configuration(row) == shared}
    ratios = {
        id(row): (row.number(RATE) or 0.0) / rate
        for row in same
        if (rate := partners.get(replicate(row)))
    }
    notes.append(ONE_RUN_EACH if len(partners) < 2 else IN_PAIRS)
    if len(same) < len(long):
        notes.append(f"of another data set, model or device than {reference.name}: no speed-up")
    if len(long) < len(timed):
        notes.append(f"fewer than {SHORTEST} steps: no speed-up")
    rows = [replace(row, speedup=ratios.get(id(row), row.speedup)) for row in rows]
    return reference.name, rows
