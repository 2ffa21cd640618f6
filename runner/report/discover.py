"""What lies in finished folders, as rows: runs, sweeps, benchmarks. None is trusted to be whole."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from runner.benchmark.result import FILE as BENCHMARK
from runner.benchmark.result import BenchmarkResult
from runner.data.config import LOADING
from runner.errors import StorageError, UsageError
from runner.record.hydra_files import read_flat_config
from runner.report import row_fields
from runner.report.comparison import Comparison, Row, of_benchmark
from runner.report.naming import keys, names
from runner.report.read_run import TROUBLE, is_run, of_job, of_run, read_json, refused
from runner.training.summary import FILE as SUMMARY

SWEEP = "sweep.json"
DEPTH = 6  # of folders within folders: outputs/benchmarks/<name>/<time>/<arm>
NOT_RUNS = {"checkpoints", "debug", "comparison", "__pycache__"}
SHORTEST = 10  # steps of a run whose speed says something; the first three are not counted
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
        try:
            if not folder.is_dir():
                problem = "not a folder" if folder.exists() else "no such folder"
                raise UsageError(f"{folder}: {problem}")
        except OSError as error:
            raise UsageError(f"{folder}: cannot be read: {error.strerror}") from None
        here = list(_walk(folder.absolute(), seen, DEPTH))
        if not here and folder.resolve() not in seen:
            raise UsageError(
                f"{folder}: nothing to compare: no {SUMMARY}, {SWEEP} or {BENCHMARK} in it; "
                "name a folder of outputs/runs, outputs/sweeps or outputs/benchmarks"
            )
        found += here
    if not any(one.rows or one.result for one in found):
        why = "; ".join(note for one in found for note in one.notes) or "no job in it has begun"
        raise UsageError(f"{folders[0]}: nothing to compare: {why}")
    if len(found) == 1 and found[0].result is not None:
        return of_benchmark(found[0].result, found[0].folder)
    if len(found) == 1 and found[0].kind == "benchmark":
        return _of_damaged(found[0])
    if len(found) == 1 and found[0].kind == "sweep":
        return _of_sweep(found[0])
    return _together(found, [folder.absolute() for folder in folders])


def _walk(folder: Path, seen: set[Path], depth: int) -> Iterator[Found]:
    """What `folder` is, or else what is in it; a folder reached twice counts once."""
    resolved = folder.resolve()
    if resolved in seen:
        return
    seen.add(resolved)
    try:
        found = _one(folder, seen)
    except TROUBLE as error:
        told = error.strerror if isinstance(error, OSError) else str(error)
        yield Found("nothing", folder, notes=[f"{folder.name} is passed over: {told}"])
        return
    if found is not None:
        yield found
    elif depth:
        for inside in _folders(folder):
            yield from _walk(inside, seen, depth - 1)


def _one(folder: Path, seen: set[Path]) -> Found | None:
    """What it is by itself; None where it may hold something."""
    os.listdir(folder)  # says why it cannot be read
    if (folder / BENCHMARK).exists():
        return _benchmark(folder, seen)
    if (folder / SWEEP).exists() or (folder / "multirun.yaml").exists():
        return _sweep(folder, seen)
    return Found("run", folder, [of_run(folder)]) if is_run(folder) else None


def _folders(folder: Path) -> list[Path]:
    """The folders in it, numbered ones in the order of their numbers."""
    try:
        inside = [path for path in folder.iterdir() if path.is_dir()]
    except OSError:
        return []
    visible = [p for p in inside if not p.name.startswith(".") and p.name not in NOT_RUNS]
    return sorted(visible, key=lambda p: (len(p.name) if p.name.isdigit() else 99, p.name))


def _benchmark(folder: Path, seen: set[Path]) -> Found:
    """Its result; where that is damaged, the runs of its arms."""
    runs = [inside for inside in _folders(folder) if is_run(inside)]
    seen.update(run.resolve() for run in runs)
    try:
        return Found("benchmark", folder, result=BenchmarkResult.read(folder))
    except StorageError as error:
        told = str(error).replace(f"{folder}/", "")
        note = f"{told}; its arms are shown as the runs they were, without what was measured"
        rows = [replace(of_run(run), name=run.name) for run in runs]
        rows = rows or [Row([], "failed", told, name=_title(folder))]
        return Found("benchmark", folder, rows, notes=[note])


def _sweep(folder: Path, seen: set[Path]) -> Found:
    """Its jobs in their order; those that never began are rows as well."""
    told = read_json(folder / SWEEP)
    jobs = told.get("jobs") if isinstance(told, dict) else None
    rows, known = [], set()
    for number, job in enumerate(jobs if isinstance(jobs, list) else []):
        row = of_job(number, job if isinstance(job, dict) else {}, folder)
        rows.append(row)
        if row.folder:
            known.add(Path(row.folder).resolve())
    for inside in _folders(folder):
        if inside.resolve() not in known and is_run(inside):
            rows.append(of_run(inside))
    seen.update(path.resolve() for path in _folders(folder))
    notes = []
    if (folder / SWEEP).exists() and told is None:
        notes.append(f"{SWEEP} is damaged: the jobs are those whose folders are there")
    return Found("sweep", folder, rows, command=row_fields.text(told, "command"), notes=notes)


def _of_damaged(found: Found) -> Comparison:
    """A benchmark's arms without what was measured: their runs trained apart, one by one."""
    title, rows = _title(found.folder), _placed(found.rows, found.folder)
    return Comparison(title, rows, kind="benchmark", notes=found.notes, home=found.folder)


def _of_sweep(found: Found) -> Comparison:
    rows = _named(found.rows, found.folder)
    reference, rows, notes = _held_against(rows, found.folder)
    return Comparison(
        _title(found.folder),
        rows,
        kind="sweep",
        reference=reference,
        notes=[*found.notes, *notes],
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
    found, unbegun = _begun(found)
    plain = [row for one in found if one.kind != "benchmark" for row in one.rows]
    rows = _named(plain, home)
    reference, rows, notes = _held_against(rows, home)
    told = [*unbegun, *(note for one in found for note in one.notes), *notes]
    notes = list(dict.fromkeys(told))
    several = len({result.name for result in results}) > 1
    for one in found:
        if one.kind == "benchmark":  # those of a damaged one
            rows += _placed(
                [replace(r, name=f"{one.folder.name} {r.name}") for r in one.rows], home
            )
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


def _begun(found: list[Found]) -> tuple[list[Found], list[str]]:
    """Without the runs that ended before they began, unless nothing else is there; a note instead.
    Those of a sweep were asked for together, and stay.
    """
    left = [one for one in found if one.kind != "run" or not all(map(refused, one.rows))]
    gone = [row for one in found if one not in left for row in one.rows]
    if not gone or not any(one.rows or one.result for one in left):
        return found, []
    runs = "1 run is" if len(gone) == 1 else f"{len(gone)} runs are"
    return left, [f"{runs} left out that ended before training began; the last: {gone[-1].reason}"]


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


def _placed(rows: list[Row], home: Path) -> list[Row]:
    """Rows with their folders relative to `home`."""
    return [
        replace(row, folder=os.path.relpath(row.folder, home)) if row.folder else row
        for row in rows
    ]


def _named(rows: list[Row], home: Path) -> list[Row]:
    """Rows with their names, and folders relative to `home`."""
    placed = _placed(rows, home)
    made = names([row.overrides for row in placed], [row.folder for row in placed])
    return [replace(row, name=name) for row, name in zip(placed, made, strict=True)]


def _held_against(rows: list[Row], home: Path) -> tuple[str, list[Row], list[str]]:
    """The row that others are compared with, the rows with their ratios to it, and notes.

    The plain one if there is one, else the first that is done. Only runs of the same data, model
    and device have a ratio, and only those that were long enough.
    """
    able = [row for row in rows if row.finished and row_fields.samples_per_second(row)]
    long = [row for row in able if (row_fields.number(row.summary, "steps") or 0) >= SHORTEST]
    groups: dict[object, list[Row]] = {}
    for row in long:
        groups.setdefault(_work(row, home), []).append(row)
    same = max(groups.values(), key=len, default=[])  # of several, the first
    if len(same) < 2:
        return "", rows, []  # there is nothing to hold anything against
    plain = [row for row in same if keys(row.overrides).get("optimization") == "none"]
    reference = (plain or same)[0]
    rate = row_fields.samples_per_second(reference) or 1.0
    notes = [ONE_RUN_EACH]
    if len(same) < len(long):
        notes.append(f"of another data set, model or device than {reference.name}: no speed-up")
    if len(long) < len(able):
        notes.append(f"fewer than {SHORTEST} steps: no speed-up")
    compared = {row.name for row in same}
    rows = [
        replace(row, speedup=(row_fields.samples_per_second(row) or 0.0) / rate)
        if row.name in compared
        else row
        for row in rows
    ]
    return reference.name, rows, notes


def _work(row: Row, home: Path) -> tuple[object, ...]:
    """What there was to compute: samples of something else take another time."""
    found = read_flat_config(home / row.folder) if row.folder else {}
    if "data.kind" not in found:
        found = {"data.name": row_fields.text(row.summary, "name"), **keys(row.overrides)}
    told = {
        key: str(found[key])
        for key in sorted(found)
        if key.partition(".")[0] in ("data", "model") and key.removeprefix("data.") not in LOADING
    }
    device = (
        row_fields.text(row.summary, "device", "kind"),
        row_fields.text(row.summary, "device", "name"),
    )
    return (*device, *told.items())
