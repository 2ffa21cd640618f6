"""Reading a table from a csv or parquet file, column by column."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from runner.batch import RowNames
from runner.data.budget import CELL, Budget
from runner.data.parquet import read_parquet
from runner.data.paths import existing, suggestion
from runner.errors import ConfigError, DataError

MISSING = {"", "na", "n/a", "nan", "none", "null"}  # what tables write where a value is not known
SURROGATE = re.compile(r"[\ud800-\udfff]")
LARGEST = float(np.finfo(np.float32).max)  # models compute in it; the square is a float64 still
LONGEST = 40  # characters of a cell, in a message
SMALLER = "split it, or leave out columns"


@dataclass(frozen=True)
class Table:
    """Columns by name, each a list of texts (csv) or of values (parquet)."""

    path: Path
    columns: dict[str, list[Any]]
    where: RowNames  # what a message calls a row, such as `line 17`
    budget: Budget  # what it takes, and may take
    problems: list[str] = field(default_factory=list)  # a line for each row that was left out

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def column(self, name: str, key: str) -> list[Any]:
        """The column `name`, which the config key `key` asks for."""
        if name not in self.columns:
            near = suggestion(name, self.columns, "its columns are")
            raise ConfigError(key, f"{self.path} has no column {name!r}", near)
        return self.columns[name]

    def without(self, bad: dict[int, str]) -> Table:
        """The same without those rows; what is wrong with each is kept."""
        if not bad:
            return self
        stay = np.delete(np.arange(len(self)), list(bad))
        columns = {name: [values[i] for i in stay] for name, values in self.columns.items()}
        numbers = stay if self.where.numbers is None else self.where.numbers[stay]
        problems = [f"{self.where(row)}, {bad[row]}" for row in sorted(bad)]
        where = RowNames(self.where.word, numbers)
        return Table(self.path, columns, where, self.budget, self.problems + problems)

    def missing(self, name: str, row: int) -> DataError:
        """The error for a value that is not there."""
        return DataError(
            f"{self.path}: {self.where(row)}, column {name!r}: the value is missing; fill it in, "
            "leave such rows out with data.bad_samples=drop, or the column with data.ignore"
        )


def read_table(path: str, drop: bool = False) -> Table:
    """The table in a `.csv` (or `.tsv`) or `.parquet` file, with at least one row.

    With `drop`, lines of a csv that are no row of it are left out; else the first is a DataError.
    """
    file = existing(path)
    if file.is_dir():
        raise ConfigError("data.path", f"{file} is a folder", "name the csv or parquet file in it")
    budget = Budget(file)
    if file.suffix in (".parquet", ".pq"):
        columns = read_parquet(file, budget, _check_names)
        count = len(next(iter(columns.values()), []))
        table = Table(file, columns, RowNames("row", np.arange(1, count + 1)), budget)
    else:
        table = _read_csv(file, budget, drop)
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
    bad = np.flatnonzero(~_usable(found))
    if len(bad):
        row = int(bad[0])
        if np.isnan(found[row]):
            raise table.missing(name, row)
        wrong = "too large for float32" if np.isfinite(found[row]) else "not finite"
        raise DataError(
            f"{table.path}: {table.where(row)}, column {name!r}: {_cut(values[row])} is {wrong}; "
            "correct it, leave such rows out with data.bad_samples=drop, or the column with "
            "data.ignore"
        )
    return found


def bad_cells(table: Table, names: Sequence[str], most_bad: float) -> dict[int, str]:
    """What is wrong with each row that has a cell which cannot be used, by the row's index.

    A column holds numbers where no more than the share `most_bad` of its cells is anything else;
    in one of texts only an empty cell is bad.
    """
    bad: dict[int, str] = {}
    for name in names:
        values = table.columns[name]
        try:
            found = np.asarray([np.nan if v == "" else v for v in values], dtype=np.float64)
        except (ValueError, OverflowError):
            found = np.array([_number(value) for value in values])
            if np.isnan(found).sum() > most_bad * len(values):
                found = np.array([np.nan if v is None or v == "" else 0.0 for v in values])
        for row in np.flatnonzero(~_usable(found)).tolist():
            value = values[row]
            missing = value is None or str(value).strip().lower() in MISSING
            what = "too large for float32" if np.isfinite(found[row]) else "no finite number"
            wrong = "is missing" if missing else f"{_cut(value)!r} is {what}"
            bad.setdefault(row, f"column {name!r}: the value {wrong}")
    return bad


def _usable(found: np.ndarray) -> np.ndarray:
    """Which of the numbers are finite, and stay so as float32."""
    usable: np.ndarray = np.abs(found) <= LARGEST  # NaN is not
    return usable


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return np.nan


def _all_numbers(values: list[Any]) -> bool:
    try:
        np.asarray(values, dtype=np.float64)
    except ValueError:
        return False
    return True


def _read_csv(path: Path, budget: Budget, drop: bool) -> Table:
    problems: list[str] = []
    try:
        # bytes that are no text come as lone surrogates, so that one line does not cost the file
        errors = "surrogateescape" if drop else "strict"
        with path.open(newline="", encoding="utf-8-sig", errors=errors) as file:
            first = file.readline()
            file.seek(0)
            # a header names columns, so the separator is what it has most of
            separator = max(",;\t", key=first.count)
            reader = csv.reader(file, delimiter=separator, strict=True)
            header = [name.strip() for name in next(reader, [])]
            _check_names(path, header)
            rows: list[list[str]] = []
            lines: list[int] = []
            while (row := _next_row(reader, problems if drop else None)) is not None:
                if not row:
                    continue
                wrong = _wrong(row, len(header), drop)
                if not wrong:
                    size = CELL * len(row) + sum(map(len, row))
                    budget.take(size, f"{len(rows) + 1:,} rows", SMALLER)
                    rows.append(row)
                    lines.append(reader.line_num)
                elif drop:
                    problems.append(f"line {reader.line_num} {wrong}")
                else:
                    raise DataError(f"{path}: line {reader.line_num} {wrong}")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})"
        ) from None
    except csv.Error as error:
        raise DataError(f"{path}: line {reader.line_num}: {error}") from None
    columns = dict(zip(header, map(list, zip(*rows, strict=True)), strict=True)) if rows else {}
    return Table(path, columns, RowNames("line", np.array(lines)), budget, problems)


def _next_row(reader: Any, problems: list[str] | None) -> list[str] | None:
    """The next row, empty where it was a bad one that `problems` takes note of; None at the end."""
    begun = reader.line_num
    try:
        row: list[str] | None = next(reader, None)
    except csv.Error as error:
        # an open quote takes in whatever follows: more than the one row would be lost
        if problems is None or reader.line_num != begun + 1 or "unexpected end" in str(error):
            raise
        problems.append(f"line {reader.line_num}: {error}")
        return []
    return row


def _wrong(row: list[str], columns: int, drop: bool) -> str:
    """What is wrong with a row as such."""
    if len(row) != columns:
        return f"has {len(row)} values, and the header names {columns} columns"
    if drop and any(SURROGATE.search(value) for value in row if not value.isascii()):
        return "is not UTF-8 text"
    return ""


def _check_names(path: Path, names: list[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen or not name:
            problem = f"two columns are called {_cut(name)!r}" if name else "a column has no name"
            raise DataError(f"{path}: {problem}; each needs a name of its own in the first line")
        seen.add(name)


def _cut(value: Any) -> str:
    """As much of a cell as a message has room for."""
    return str(value)[:LONGEST]
