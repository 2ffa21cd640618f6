"""The record as tables for other programs: csv, or parquet with the extra of that name."""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.record.config import TableKind
from runner.record.storage import open_regular

log = logging.getLogger("runner")

FOLDER = "debug/tables"
Rows = list[dict[str, Any]]


def export(folder: Path, kinds: Sequence[TableKind]) -> list[Path]:
    """Write metrics.jsonl and every debug/*.json of a run as tables, one for each list of rows.

    What is nested gets dotted column names. A disk that does not take them is only said.
    """
    written = []
    if kinds:
        for name, rows in _tables(folder):
            for kind in kinds:
                path = folder / FOLDER / f"{name}.{kind.name}"
                try:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    (_write_csv if kind is TableKind.csv else _write_parquet)(path, rows)
                    written.append(path)
                except OSError as error:
                    log.warning("%s is not written: %s", path.name, error)
    return written


def _tables(folder: Path) -> Iterator[tuple[str, Rows]]:
    """Each list of rows by its name: `metrics`, `history_faults`, …"""
    metrics = folder / "metrics.jsonl"
    if metrics.is_file():
        with open_regular(metrics) as lines:
            rows = [_flat(json.loads(line)) for line in lines if line.rstrip().endswith(b"}")]
        yield "metrics", rows
    for path in sorted(filter(Path.is_file, (folder / "debug").glob("*.json"))):
        with open_regular(path) as file:
            found = json.load(file)
        lists = found if isinstance(found, Mapping) else {"": found}
        for key, value in lists.items():
            if isinstance(value, list) and value and all(isinstance(x, Mapping) for x in value):
                yield "_".join(filter(None, (path.stem, key))), [_flat(row) for row in value]


def _flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = json.dumps(value) if isinstance(value, list) else value
    return found


def _columns(rows: Rows) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))


def _write_csv(path: Path, rows: Rows) -> None:
    with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        writer = csv.DictWriter(file, _columns(rows))
        writer.writeheader()
        writer.writerows(rows)


def _write_parquet(path: Path, rows: Rows) -> None:
    import pyarrow
    from pyarrow import parquet

    columns = {name: [row.get(name) for row in rows] for name in _columns(rows)}
    for name, values in columns.items():
        kinds = {type(value) for value in values if value is not None}
        if len(kinds - {int, float}) > 0 and len(kinds) > 1:
            columns[name] = [None if value is None else str(value) for value in values]
    parquet.write_table(pyarrow.table(columns), path)
