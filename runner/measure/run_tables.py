"""Write the records of runs as tables: `python -m runner.report RUN… --tables csv|parquet`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.core.errors import StorageError, UsageError
from runner.core.format import count_noun, short_path
from runner.core.record.history import HISTORY_FILE
from runner.core.record.hydra_files import CONFIG
from runner.core.record.json_records import read_json
from runner.core.record.storage import (
    LONGEST_ROW,
    METRICS,
    HashedFile,
    guard_folder,
    link_refusal,
    make_folder,
    open_regular,
    remove_file,
    rename,
    write_file,
)
from runner.core.record.summary import SUMMARY_FILE
from runner.core.stability.anomalies import ANOMALIES_FILE

if TYPE_CHECKING:
    import pyarrow

Row = dict[str, Any]

FORMATS = ("csv", "parquet")
SOURCES = {
    "metrics": (METRICS, ()),
    "faults": (HISTORY_FILE, ("faults",)),
    "anomalies": (ANOMALIES_FILE, ("anomalies",)),
    "gradients": ("debug/gradients.json", ("layers",)),
    "memory": ("debug/memory.json", ("account", "rows")),
    "operators": ("debug/profile.json", ("trace", "operators")),
    "modules": ("debug/profile.json", ("modules",)),
}
"""File of a run by table, and the keys under which its rows are; metrics.jsonl has a row a line."""
FOLDER = "debug/tables"  # of one run's tables
MAX_DEPTH = 6  # of folders within folders, as in a comparison
MAX_EXACT = 2**53  # integers up to this one are exact as float64
MAX_INTEGER = 2**63


def write_tables(folders: Sequence[Path], kind: str, out: Path) -> tuple[list[str], list[str]]:
    """Write one file a table into `out`; a table without rows has no file.

    Columns of nested values have dotted names; lists are JSON. With several runs a column `run`
    has the folder. Returns descriptions of the written files, and notes on what is not in them.
    Raises UsageError if there is no run, SecurityError for a link, StorageError.
    """
    runs = list(dict.fromkeys(run for folder in folders for run in require_runs(folder)))
    if out.is_symlink():
        raise link_refusal(out)
    guard_folder(runs[0] if out == runs[0] / FOLDER else out)
    written, missing, notes = [], [], list[str]()
    try:
        make_folder(out)
        for name in SOURCES:
            rows = list(read_rows(runs, name, notes))
            path = out / f"{name}.{kind}"
            if rows:
                _write_table(path, rows, kind)
                written.append(f"{path.name} ({count_noun(len(rows), 'row')})")
            else:
                remove_file(path)  # of an earlier call
                missing.append(name)
    except OSError as error:
        raise StorageError(f"{out}: not written: {error.strerror or error}") from error
    return written, notes + ([f"nothing recorded: {', '.join(missing)}"] if missing else [])


def find_runs(folder: Path, depth: int = MAX_DEPTH) -> Iterator[Path]:
    """Yield the folder if it is a run, else the runs in its subfolders; links are not followed."""
    try:
        names = sorted(os.listdir(folder), key=lambda name: (len(name) * name.isdigit(), name))
    except OSError as error:
        raise UsageError(f"{folder}: cannot be read: {error.strerror}") from None
    if is_run(folder):
        yield folder
    elif depth:
        for name in names:
            path = folder / name
            if path.is_dir() and not (path.is_symlink() or name.startswith(".")):
                yield from find_runs(path, depth - 1)


def require_runs(folder: Path) -> list[Path]:
    """Return the folders of the runs in a folder, or that folder; UsageError if there is none."""
    if runs := list(find_runs(folder)):
        return runs
    fix = "name a folder of a run, or of several such as a sweep"
    raise UsageError(f"{folder}: no run in it; {fix}")


def is_run(folder: Path) -> bool:
    """Whether the folder has the record of a run, perhaps of one that was killed."""
    return any((folder / name).exists() for name in (METRICS, SUMMARY_FILE, CONFIG))


def read_rows(runs: Sequence[Path], name: str, notes: list[str]) -> Iterator[Row]:
    """Yield the rows of a table of all runs, flat; what is damaged is counted in `notes`."""
    file, keys = SOURCES[name]
    for run in runs:
        for path in (run / "debug", run / file):
            if path.is_symlink():
                raise link_refusal(path)
        if not (run / file).exists():
            continue
        rows = [*_read_lines(run / file)] if not keys else _read_list(run / file, keys)
        damaged = sum(not isinstance(row, dict) for row in rows)
        if damaged:
            unit = "row" if keys else "line"
            notes.append(f"{short_path(run / file)}: {count_noun(damaged, f'damaged {unit}')}")
        first = {"run": short_path(run)} if len(runs) > 1 else {}
        yield from (first | _flatten(row) for row in rows if isinstance(row, dict))


def _read_lines(path: Path) -> Iterator[Any]:
    """Yield the value of each JSON line; None for one that is damaged."""
    with open_regular(path) as file:
        while line := file.readline(LONGEST_ROW):
            try:
                yield json.loads(line) if line.endswith(b"\n") else None
            except (ValueError, RecursionError):
                yield None


def _read_list(path: Path, keys: Iterable[str]) -> list[Any]:
    """Return the list under `keys`; [None] if the file is damaged, [] without the keys."""
    tree = read_json(path)
    if not isinstance(tree, dict):
        return [None]
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree if isinstance(tree, list) else []


def _flatten(row: Mapping[str, Any], prefix: str = "") -> Row:
    """Return nested values under dotted names; NaN and Inf, null in JSON, are numbers again."""
    flat: Row = {}
    for key, value in row.items():
        if isinstance(value, dict) and key != "nonfinite":
            flat |= _flatten(value, f"{prefix}{key}.")
        elif key != "nonfinite":
            flat[prefix + key] = json.dumps(value) if isinstance(value, list) else value
    replaced = row.get("nonfinite")
    for key, text in replaced.items() if isinstance(replaced, dict) else ():
        if text in ("nan", "inf", "-inf") and flat.get(prefix + key) is None:
            flat[prefix + key] = float(text)
    return flat


def _as_column(values: list[Any]) -> pyarrow.Array:
    """Return a column of booleans, integers, numbers or, where none fits each value, texts."""
    import pyarrow

    present = [value for value in values if value is not None]
    types = {type(value) for value in present}
    if types == {bool}:
        return pyarrow.array(values, pyarrow.bool_())
    if types == {int} and all(-MAX_INTEGER <= value < MAX_INTEGER for value in present):
        return pyarrow.array(values, pyarrow.int64())
    whole = (value for value in present if isinstance(value, int))
    if types and types <= {int, float} and all(abs(value) <= MAX_EXACT for value in whole):
        numbers = [None if value is None else float(value) for value in values]
        return pyarrow.array(numbers, pyarrow.float64(), from_pandas=False)
    texts = [x if isinstance(x, str | None) else json.dumps(x) for x in values]
    # lone surrogates can come from JSON, and are no UTF-8
    texts = [x and x.encode("utf-8", "backslashreplace").decode() for x in texts]
    return pyarrow.array(texts, pyarrow.string())


def _write_table(path: Path, rows: Sequence[Row], kind: str) -> None:
    """Replace a file by one with the rows, atomically; columns are in order of occurrence."""
    import pyarrow

    def write_contents(file: HashedFile) -> None:
        file.write(buffer.getvalue())

    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: _as_column([row.get(name) for row in rows]) for name in names}
    buffer, table = pyarrow.BufferOutputStream(), pyarrow.table(columns)
    if kind == "csv":
        from pyarrow import csv

        csv.write_csv(table, buffer)
    else:
        from pyarrow import parquet

        parquet.write_table(table, buffer)
    temporary = path.with_name(f".{path.name}.tmp")
    remove_file(temporary)
    write_file(temporary, write_contents)
    rename(temporary, path)
