"""Csv and parquet files as arrow columns, read by pyarrow."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from runner.device import memory
from runner.errors import DataError

MISSING = {"", "na", "n/a", "nan", "none", "null"}  # how tables write an unknown value
PARQUET_ROWS = 1 << 17  # decoded at a time


@dataclass(frozen=True)
class Content:
    """What a file holds: arrow columns, the number of each row, and rows that are malformed."""

    columns: dict[str, Any]  # pyarrow.ChunkedArray
    word: str  # line | row
    numbers: np.ndarray
    malformed: dict[int, str]


class Kind(Enum):
    """What the cells of a column are read as; in a message, `12a is not a finite number`."""

    any = "anything"  # numbers or dates, where it holds such
    numbers = "a finite number"
    times = "a date"
    texts = "a text"


Select = Callable[[Sequence[str]], list[str]]
"""Given the columns of a file, returns those to read."""


def read_content(path: Path, select: Select, kind: Callable[[str], Kind]) -> Content:
    """The selected columns of a csv or parquet file; `kind` says what each is read as."""
    read = _read_parquet if path.suffix in (".parquet", ".pq") else _read_csv
    return read(path, select, kind)


def check_memory(path: Path, size: int, what: str, fix: str) -> None:
    """Refuse what does not fit into the memory that this process may still take."""
    if size > (available := memory.available_bytes()):
        raise DataError(
            f"data.path: {path}: refused: {what} take {size:,} bytes, and {available:,} are "
            f"available; {fix}"
        )


def _read_csv(path: Path, select: Select, kind: Callable[[str], Kind]) -> Content:
    from pyarrow import ArrowInvalid, csv, string

    size = path.stat().st_size
    if not size:
        raise DataError(f"data.path: {path} is empty; it needs a header and a row for each sample")
    check_memory(path, 4 * size, "its cells", "split it, or leave out columns")
    names, separator, lines, quotes = _scan(path)
    used, malformed = select(names), {}

    def skip(row: Any) -> str:
        header = f"and the header names {row.expected_columns} columns"
        malformed[row.number - 2] = f" has {row.actual_columns} values, {header}"
        return "skip"

    forms = [form for word in MISSING for form in {word, word.upper(), word.title(), "NaN", "Na"}]
    convert = csv.ConvertOptions(
        column_types={name: string() for name in used if kind(name) is Kind.texts},
        include_columns=used,
        true_values=[],
        false_values=[],
        null_values=forms,  # pyarrow compares letter for letter
    )
    parse = csv.ParseOptions(delimiter=separator, newlines_in_values=True, invalid_row_handler=skip)
    # one block, since a row may be of any length; with threads the numbers of rows are unknown
    block = min(size + 1, 2**31 - 1)
    read = csv.ReadOptions(use_threads=False, column_names=names, skip_rows=1, block_size=block)
    try:
        table = csv.read_csv(path, read, parse, convert)
    except ArrowInvalid as error:
        raise DataError(f"{path}: cannot be read as csv: {error}") from None
    total = len(malformed) + len(table)
    one_line_each = lines == total + 1
    if quotes % 2 and not one_line_each:
        raise DataError(f"{path}: a quote is not closed, so a cell holds all lines after it")
    first = 2 if one_line_each else 1
    numbers = np.delete(np.arange(total), list(malformed)) + first
    problems = {record + first: problem for record, problem in malformed.items()}
    columns = dict(zip(used, table.columns, strict=True))
    return Content(columns, "line" if one_line_each else "row", numbers, problems)


def _scan(path: Path) -> tuple[list[str], str, int, int]:
    """The header, the separator, and the numbers of lines and quotes of a csv file."""
    quotes, lines, part = 0, 0, b"\n"
    with path.open("rb") as file:
        first = file.readline()
        file.seek(0)
        for part in iter(partial(file.read, 1 << 22), b""):
            quotes, lines = quotes + part.count(b'"'), lines + part.count(b"\n")
    try:
        text = first.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{path}: line 1 is not UTF-8 text") from None
    separator = max(",;\t", key=text.count)  # a header names columns: what it has most of
    names = [name.strip() for name in next(csv.reader([text], delimiter=separator), [])]
    return names, separator, lines + (not part.endswith(b"\n")), quotes


def _read_parquet(path: Path, select: Select, kind: Callable[[str], Kind]) -> Content:
    """The columns; what the footer says, and what is then decoded, must fit into memory."""
    import pyarrow
    from pyarrow import parquet

    fix = "leave out rows or columns when it is written"
    try:
        with parquet.ParquetFile(path) as file:
            schema, rows = file.schema_arrow, file.metadata.num_rows
        used = select(schema.names)
        texts = [name for name in used if "string" in str(schema.field(name).type)]
        check_memory(path, 8 * rows * len(used), f"{rows:,} rows", fix)  # as float64
        batches, decoded = [], 0
        with parquet.ParquetFile(path, read_dictionary=texts) as file:
            for batch in file.iter_batches(PARQUET_ROWS, columns=used):
                batches.append(batch.select(used))
                decoded += batch.nbytes
                check_memory(path, batch.nbytes, f"{decoded:,} bytes of decoded rows", fix)
        table = pyarrow.Table.from_batches(batches, None if batches else schema)
        table = table.unify_dictionaries()
    except (pyarrow.ArrowException, OSError, IndexError) as error:
        raise DataError(f"{path}: cannot be read as parquet: {error}") from None
    columns = {name: table.column(name) for name in used}
    return Content(columns, "row", np.arange(1, len(table) + 1), {})
