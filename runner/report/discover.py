"""What lies in finished folders, as rows: runs, sweeps, benchmarks. None is trusted to be whole."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from runner.benchmark.result import FILE as BENCHMARK
from runner.benchmark.result import BenchmarkResult
from runner.errors import StorageError, UsageError
from runner.record.hydra_files import overrides_by_key
from runner.report.comparison import Comparison, Row, number, of_benchmark, text
from runner.report.naming import names
from runner.report.read_run import TROUBLE, is_run, of_job, of_run, read_json
from runner.training.summary import FILE as SUMMARY

SWEEP = "sweep.json"
DEPTH = 6  # of folders within folders: outputs/benchmarks/<name>/<time>/<arm>
NOT_RUNS = {"checkpoints", "debug", "comparison", "__pycache__"}
SHORTEST = 10  # steps of a run whose speed says something; the first three are not counted
ONE_RUN_EACH = "one run each, not interleaved: read it as a hint; job=benchmark measures"


@dataclass
class Source:
    """A folder and what it is: `kind` is run, sweep, benchmark or nothing (see its notes)."""

    kind: str
    folder: Path
    rows: list[Row] = field(default_factory=list)
    result: BenchmarkResult | None = None
    command: str = ""
    notes: list[str] = field(default_factory=list)


def of_folders(folders: Sequence[Path]) -> Comparison:
    """Whatever lies in finished folders: runs, sweeps, benchmarks, also of several sweeps.

    Raises UsageError where there is nothing to compare; a damaged summary is a row that says so.
    """
    sources: list[Source] = []
    seen: set[Path] = set()
    for folder in folders:
        _check_folder(folder)
        found = list(_walk(folder.absolute(), seen, DEPTH))
        if not found and folder.resolve() not in seen:
            raise UsageError(
                f"{folder}: nothing to compare: no {SUMMARY}, {SWEEP} or {BENCHMARK} in it; "
                "name a folder of outputs/runs, outputs/sweeps or outputs/benchmarks"
            )
        sources += found
    if not any(source.rows or source.result for source in sources):
        why = "; ".join(note for source in sources for note in source.notes)
        raise UsageError(f"{folders[0]}: nothing to compare: {why or 'no job in it has begun'}")
    if len(sources) == 1 and sources[0].result is not None:
        return of_benchmark(sources[0].result, sources[0].folder)
    if len(sources) == 1 and sources[0].kind == "sweep":
        return _of_sweep(sources[0])
    return _together(sources, [folder.absolute() for folder in folders])


def _check_folder(folder: Path) -> None:
    try:
        if not folder.is_dir():
            problem = "not a folder" if folder.exists() else "no such folder"
            raise UsageError(f"{folder}: {problem}")
    except OSError as error:
        raise UsageError(f"{folder}: cannot be read: {error.strerror}") from None


def _walk(folder: Path, seen: set[Path], depth: int) -> Iterator[Source]:
    """What `folder` is, or else what is in it; a folder reached twice counts once."""
    if folder.resolve() in seen:
        return
    seen.add(folder.resolve())
    try:
        os.listdir(folder)  # says why it cannot be read
        source = _read_source(folder, seen)
    except TROUBLE as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        yield Source("nothing", folder, notes=[f"{folder.name} is passed over: {reason}"])
        return
    if source is not None:
        yield source
    if (source is None or source.kind == "nothing") and depth:
        for inside in _folders(folder):
            yield from _walk(inside, seen, depth - 1)


def _read_source(folder: Path, seen: set[Path]) -> Source | None:
    """What the folder is by itself; None where it may hold something."""
    if (folder / BENCHMARK).exists():
        try:
            result = BenchmarkResult.read(folder)
        except StorageError as error:
            note = str(error).replace(f"{folder}/", "")
            return Source("nothing", folder, notes=[f"{note}; its arms are shown as runs"])
        seen.update(path.resolve() for path in _folders(folder))
        return Source("benchmark", folder, result=result)
    if (folder / SWEEP).exists() or (folder / "multirun.yaml").exists():
        return _read_sweep(folder, seen)
    return Source("run", folder, [of_run(folder)]) if is_run(folder) else None


def _folders(folder: Path) -> list[Path]:
    """The folders in it, numbered ones in the order of their numbers."""
    try:
        inside = [path for path in folder.iterdir() if path.is_dir()]
    except OSError:
        return []
    visible = [p for p in inside if not p.name.startswith(".") and p.name not in NOT_RUNS]
    return sorted(visible, key=lambda p: (len(p.name) if p.name.isdigit() else 99, p.name))


def _read_sweep(folder: Path, seen: set[Path]) -> Source:
    """Its jobs in their order; those that never began are rows as well."""
    state = read_json(folder / SWEEP)
    jobs = state.get("jobs") if isinstance(state, dict) else None
    rows = [
        of_job(i, job if isinstance(job, dict) else {}, folder)
        for i, job in enumerate(jobs if isinstance(jobs, list) else [])
    ]
    known = {Path(row.folder).resolve() for row in rows if row.folder}
    inside = _folders(folder)
    rows += [of_run(path) for path in inside if path.resolve() not in known and is_run(path)]
    seen.update(path.resolve() for path in inside)
    damaged = (folder / SWEEP).exists() and state is None
    notes = [f"{SWEEP} is damaged: the jobs are those whose folders are there"] if damaged else []
    return Source("sweep", folder, rows, command=text(state, "command"), notes=notes)


def _of_sweep(source: Source) -> Comparison:
    home = source.folder
    reference, rows, notes = _with_ratios(_named(source.rows, home))
    dated = home.name[:1].isdigit() and home.parent.name  # outputs/sweeps/<title>/<time>-<id>
    return Comparison(
        home.parent.name if dated else home.name,
        rows,
        reference=reference,
        notes=[*source.notes, *notes],
        command=source.command,
        home=home,
    )


def _together(sources: list[Source], folders: list[Path]) -> Comparison:
    """Things of several kinds, or several of one kind: one row for each run and arm."""
    home = Path(os.path.commonpath(folders))
    rows = _named([row for source in sources for row in source.rows], home)
    reference, rows, notes = _with_ratios(rows)
    notes = [*(note for source in sources for note in source.notes), *notes]
    arms = [row for source in sources for row in _arms(source, home)]
    if arms:
        notes.insert(0, "each benchmark's speed-ups are against its own reference")
    return Comparison(
        home.name or "runs",
        rows + arms,
        kind="runs",
        reference=reference,
        notes=list(dict.fromkeys(notes)),
        command=shlex.join(["python", "-m", "runner.report", *map(str, folders)]),
        home=home,
    )


def _arms(source: Source, home: Path) -> list[Row]:
    """A benchmark's arms, named so that those of several benchmarks are told apart."""
    if source.result is None:
        return []
    when = source.result.started[:16].replace("T", " ") or source.folder.name
    place = os.path.relpath(source.folder, home)
    return [
        replace(
            row,
            name=f"{source.result.name} {when} {row.name}",
            folder=f"{place}/{row.folder}" if row.folder else "",
        )
        for row in of_benchmark(source.result, source.folder).rows
    ]


def _named(rows: list[Row], home: Path) -> list[Row]:
    """Rows with their names, and folders relative to `home`."""
    places = [os.path.relpath(row.folder, home) if row.folder else "" for row in rows]
    made = names([row.overrides for row in rows], places)
    return [
        replace(row, name=name, folder=place)
        for row, name, place in zip(rows, made, places, strict=True)
    ]


def _with_ratios(rows: list[Row]) -> tuple[str, list[Row], list[str]]:
    """The row that others are compared with, the rows with their ratios to it, and notes.

    The plain one if there is one, else the first that is done. Only runs of the same data, model
    and device have a ratio, and only those that were long enough.
    """
    able = [row for row in rows if row.finished and row.samples_per_second]
    long = [row for row in able if (number(row.summary, "steps") or 0) >= SHORTEST]
    groups: dict[str, list[Row]] = {}
    for row in long:
        groups.setdefault(row.work, []).append(row)
    same = max(groups.values(), key=len, default=[])  # of several, the first
    if len(same) < 2:
        return "", rows, []
    plain = [row for row in same if overrides_by_key(row.overrides).get("optimization") == "none"]
    reference = (plain or same)[0]
    rate = reference.samples_per_second or 1.0
    notes = [ONE_RUN_EACH]
    if len(same) < len(long):
        notes.append(f"of another data set, model or device than {reference.name}: no speed-up")
    if len(long) < len(able):
        notes.append(f"fewer than {SHORTEST} steps: no speed-up")
    rows = [
        replace(row, speedup=(row.samples_per_second or 0.0) / rate) if row in same else row
        for row in rows
    ]
    return reference.name, rows, notes
