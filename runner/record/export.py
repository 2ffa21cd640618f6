"""The record as tables for other programs: csv or parquet."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.record.config import TableKind
from runner.record.storage import open_regular, read_record

log = logging.getLogger("runner")

FOLDER = "debug/tables"
Rows = list[dict[str, Any]]


def export(folder: Path, kinds: Sequence[TableKind]) -> list[Path]:
    """Write metrics.jsonl and every debug/*.json of a run as tables, one for each list of rows.

    What is nested gets dotted column names. A disk that does not take them is only said.
    """
    written = []
    for name, rows in _tables(folder) if kinds else ():
        for kind in kinds:
            path = folder / FOLDER / f"{name}.{kind.name}"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                _write(path, rows, kind)
                written.append(path)
            except OSError as error:
                log.warning("%s is not written: %s", path.name, error)
    return written


def _tables(folder: Path) -> Iterator[tuple[str, Rows]]:
    """Each list of rows by its name: `metrics`, `history_faults`, …"""
    metrics = folder / "metrics.jsonl"
    if metrics.is_file():
        with open_regular(metrics) as lines:
            yield "metrics", [_flat(json.loads(x)) for x in lines if x.rstrip().endswith(b"}")]
    for path in sorted(filter(Path.is_file, (folder / "debug").glob("*.json"))):
        found = json.loads(read_record(path))
        for key, value in (found if isinstance(found, Mapping) else {"": found}).items():
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


def _write(path: Path, rows: Rows, kind: TableKind) -> None:
    import pyarrow
    from pyarrow import csv, parquet

    columns = {}
    for name in dict.fromkeys(key for row in rows for key in row):
        values = [row.get(name) for row in rows]
        kinds = {type(value) for value in values if value is not None}
        mixed = len(kinds) > 1 and kinds != {int, float}  # a column has one type
        columns[name] = [str(x) if mixed and x is not None else x for x in values]
    table = pyarrow.table(columns)
    if kind is TableKind.csv:
        csv.write_csv(table, path)
    else:
        parquet.write_table(table, path)
