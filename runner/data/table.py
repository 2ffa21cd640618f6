"""Reading a table from a csv or parquet file, column by column."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runner.data.paths import existing, suggestion
from runner.errors import ConfigError, DataError

MISSING = {"", "na", "n/a", "nan", "none", "null"}  # what tables write where a value is not known


@dataclass(frozen=True)
class Table:
    """Columns by name, each a list of texts (csv) or of values (parquet)."""

    path: Path
    columns: dict[str, list[Any]]
    where: Callable[[int], str]  # what a message calls a row, such as `line 17`

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def column(self, name: str, key: str) -> list[Any]:
        """The column `name`, which the config key `key` asks for."""
        if name not in self.columns:
            near = suggestion(name, self.columns, "its columns are")
            raise ConfigError(key, f"{self.path} has no column {name!r}", near)
        return self.columns[name]

    def missing(self, name: str, row: int) -> DataError:
        """The error for a value that is not there."""
        return DataError(
            f"{self.path}: {self.where(row)}, column {name!r}: the value is missing; fill it in, "
            "drop the row, or leave the column out with data.ignore"
        )


def read_table(path: str) -> Table:
    """The table in a `.csv` (or `.tsv`) or `.parquet` file, with at least one row."""
    file = existing(path)
    if file.is_dir():
        raise ConfigError("data.path", f"{file} is a folder", "name the csv or parquet file in it")
    table = _read_parquet(file) if file.suffix in (".parquet", ".pq") else _read_csv(file)
    if not table.columns or not len(table):
        raise DataError(f"{file}: the table is empty")
    return table


def numbers(table: Table, name: str) -> np.ndarray | None:
    """The column as float64, or None where it holds texts. Raises DataError on a missing value.

    Texts such as NA count as missing only among numbers: elsewhere they may be a category.
    """
    values = table.columns[name]
    for row, value in enumerate(values):
        if value is None or value == "":
            raise table.missing(name, row)
    try:
        found = np.asarray(values, dtype=np.float64)
    except ValueError:
        rest = [v for v in values if str(v).strip().lower() not in MISSING]
        if len(rest) == len(values) or not rest or not _all_numbers(rest):
            return None
        row = next(r for r, v in enumerate(values) if str(v).strip().lower() in MISSING)
        raise table.missing(name, row) from None
    bad = np.flatnonzero(~np.isfinite(found))
    if len(bad):
        row = int(bad[0])
        if np.isnan(found[row]):
            raise table.missing(name, row)
        raise DataError(
            f"{table.path}: {table.where(row)}, column {name!r}: {values[row]} is not finite"
        )
    return found


def _all_numbers(values: list[Any]) -> bool:
    try:
        np.asarray(values, dtype=np.float64)
    except ValueError:
        return False
    return True


def _read_csv(path: Path) -> Table:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            first = file.readline()
            file.seek(0)
            # a header names columns, so the separator is what it has most of
            separator = max(",;\t", key=first.count)
            reader = csv.reader(file, delimiter=separator, strict=True)
            header = [name.strip() for name in next(reader, [])]
            _check_names(path, header)
            rows: list[list[str]] = []
            lines: list[int] = []
            for row in reader:
                if not row:
                    continue
                if len(row) != len(header):
                    raise DataError(
                        f"{path}: line {reader.line_num} has {len(row)} values, and the header "
                        f"names {len(header)} columns"
                    )
                rows.append(row)
                lines.append(reader.line_num)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})"
        ) from None
    except csv.Error as error:
        raise DataError(f"{path}: line {reader.line_num}: {error}") from None
    columns = dict(zip(header, map(list, zip(*rows, strict=True)), strict=True)) if rows else {}
    return Table(path, columns, lambda row: f"line {lines[row]}")


def _read_parquet(path: Path) -> Table:
    try:
        import pyarrow
        from pyarrow import parquet, types
    except ImportError:
        raise ConfigError(
            "data.path", "reading parquet needs pyarrow", 'pip install "runner[parquet]"'
        ) from None
    try:
        table = parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as parquet: {error}") from None
    _check_names(path, table.column_names)
    columns = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        kind = column.type.value_type if types.is_dictionary(column.type) else column.type
        checks = (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal)
        texts = (types.is_string, types.is_large_string)
        if not any(check(kind) for check in checks + texts):
            raise DataError(
                f"{path}: column {name!r} is of type {kind}, neither numbers nor texts; convert "
                "it, or leave it out when the file is written"
            )
        columns[name] = column.to_pylist()
    return Table(path, columns, lambda row: f"row {row + 1}")


def _check_names(path: Path, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1 or not name:
            problem = f"two columns are called {name!r}" if name else "a column has no name"
            raise DataError(f"{path}: {problem}; each needs a name of its own in the first line")
