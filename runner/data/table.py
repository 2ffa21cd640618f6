"""Tables from csv and parquet files, read by pyarrow; rows that cannot be used are found here."""

from __future__ import annotations

import csv
import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runner.data.batch import RowNames
from runner.data.config import Tabular, Text
from runner.data.dataset import drops_bad_samples, usable_samples
from runner.data.paths import existing, suggestion
from runner.device import memory
from runner.errors import ConfigError, DataError
from runner.techniques.base import Choice

log = logging.getLogger("runner")

MISSING = {"", "na", "n/a", "nan", "none", "null"}  # how tables write an unknown value
LARGEST = float(np.finfo(np.float32).max)  # models compute in float32
LONGEST = 40  # characters of a cell, in a message
PARQUET_ROWS = 1 << 17  # decoded at a time
DECIMAL_COMMA = re.compile(r"-?[0-9.]*[0-9],[0-9]+")


@dataclass(frozen=True)
class Texts:
    """A column of texts: the different ones, sorted, and which of them each row has."""

    words: tuple[str, ...]
    codes: np.ndarray


Values = np.ndarray | Texts
"""A column: float64 numbers that float32 can hold, or texts."""


@dataclass(frozen=True)
class Table:
    """Columns by name, without the rows that cannot be used."""

    path: Path
    columns: dict[str, Values]
    rows: RowNames  # what a message calls a row, such as `line 17`
    choices: tuple[Choice, ...]  # which rows were left out


@dataclass(frozen=True)
class _Content:
    """What a file holds: arrow columns, the number of each row, and rows that are malformed."""

    columns: dict[str, Any]  # pyarrow.ChunkedArray
    word: str  # line | row
    numbers: np.ndarray
    malformed: dict[int, str]


Select = Callable[[Sequence[str]], list[str]]
"""Given the columns of a file, returns those to read."""


def read_table(
    config: Tabular | Text, needed: dict[str, str], ignore: Sequence[str] | None = None
) -> Table:
    """The columns `needed` (by config key) of the table at `data.path`, all as texts.

    With `ignore`, every column but those, as numbers where it holds numbers. A row with a cell
    that cannot be used is a DataError, or is left out with `data.bad_samples=drop`.
    """
    from pyarrow import ArrowException

    path = existing(config.path)
    if path.is_dir():
        raise ConfigError("data.path", f"{path} is a folder", "name the csv or parquet file in it")

    def select(names: Sequence[str]) -> list[str]:
        _check_names(path, names)
        for key, name in [*needed.items(), *(("data.ignore", name) for name in ignore or ())]:
            if name not in names:
                near = suggestion(name, names, "its columns are")
                raise ConfigError(key, f"{path} has no column {name!r}", near)
        wanted = list(needed.values())
        return wanted if ignore is None else [n for n in names if n in wanted or n not in ignore]

    read = _read_parquet if path.suffix in (".parquet", ".pq") else _read_csv
    content = read(path, select, ignore is None)
    total = len(content.numbers) + len(content.malformed)
    if not total:
        raise DataError(f"{path}: the table is empty")
    share = config.most_bad if drops_bad_samples(config) else 0.0
    problems, values = dict(content.malformed), {}
    for name in list(content.columns):
        column = content.columns.pop(name)  # its memory is free once it is parsed
        try:
            values[name], bad = _parse(column, share, all_texts=ignore is None)
        except ArrowException:
            raise DataError(
                f"{path}: column {name!r} is of type {column.type}, neither numbers nor texts; "
                f"convert it, or leave it out with data.ignore=[{name}]"
            ) from None
        for row, problem in bad.items():
            problems.setdefault(int(content.numbers[row]), f", column {name!r}: {problem}")
    named = {number: f"{content.word} {number}{text}" for number, text in problems.items()}
    choices = usable_samples(named, total, config, str(path), ", or the column with data.ignore")
    usable = ~np.isin(content.numbers, list(problems)) if problems else slice(None)
    rows = RowNames(content.word, content.numbers[usable])
    columns = {name: _select_rows(column, usable) for name, column in values.items()}
    _warn_of_decimal_commas(path, columns)
    return Table(path, columns, rows, choices)


def check_memory(path: Path, size: int, what: str, fix: str) -> None:
    """Refuse what does not fit into the memory that this process may still take."""
    if size > (available := memory.available_bytes()):
        raise DataError(
            f"data.path: {path}: refused: {what} take {size:,} bytes, and {available:,} are "
            f"available; {fix}"
        )


# -- cells -----------------------------------------------------------------------------------------


def _parse(column: Any, share: float, all_texts: bool) -> tuple[Values, dict[int, str]]:
    """Numbers or texts, and what is wrong with each row that cannot be used.

    A column of texts holds numbers where at most `share` of its cells is neither a number nor
    missing. Texts such as NA are missing among numbers only: elsewhere they may be a category.
    """
    import pyarrow

    kinds = ("integer", "floating", "decimal", "boolean")
    if not all_texts and any(getattr(pyarrow.types, f"is_{k}")(column.type) for k in kinds):
        numbers = column.cast(pyarrow.float64(), safe=False).to_numpy()
        return numbers, {row: _problem(numbers[row]) for row in _not_float32(numbers)}
    words, codes = _encode(column)
    parsed = np.array([_number(word) for word in words])
    if not all_texts and not np.isnan(parsed[codes]).all():
        text = [np.isnan(n) and not _is_missing(w) for n, w in zip(parsed, words, strict=True)]
        if np.array(text)[codes].mean() <= share:
            numbers = parsed[codes]
            bad = _not_float32(numbers)
            return numbers, {row: _problem(numbers[row], words[codes[row]]) for row in bad}
    wrong = {code: "the value is missing" for code, word in enumerate(words) if not word.strip()}
    if pyarrow.types.is_binary(column.type):
        wrong |= {c: "the value is not UTF-8 text" for c, w in enumerate(words) if "\ufffd" in w}
    rows = np.flatnonzero(np.isin(codes, list(wrong))) if wrong else ()
    return Texts(tuple(words), codes), {int(row): wrong[codes[row]] for row in rows}


def _encode(column: Any) -> tuple[list[str], np.ndarray]:
    """The different texts of a column, and which of them each row has; no value is ""."""
    import pyarrow

    if pyarrow.types.is_binary(column.type):  # a csv column with bytes that are not UTF-8
        cells = [None if c is None else c.decode(errors="replace") for c in column.to_pylist()]
        column = pyarrow.chunked_array([cells], pyarrow.string())
    if not pyarrow.types.is_dictionary(column.type):
        column = column.cast(pyarrow.string()).dictionary_encode()
    encoded = column.combine_chunks()
    words = [word or "" for word in encoded.dictionary.to_pylist()]
    codes = encoded.indices.fill_null(len(words)).to_numpy(zero_copy_only=False)
    return [*words, ""], codes


def _select_rows(values: Values, rows: np.ndarray | slice) -> Values:
    """The column at those rows; of texts only the words that occur, sorted."""
    if isinstance(values, np.ndarray):
        return values[rows]
    codes = values.codes[rows]
    words = sorted({values.words[code] for code in np.unique(codes).tolist()})
    place = {word: number for number, word in enumerate(words)}
    return Texts(tuple(words), np.array([place.get(word, 0) for word in values.words])[codes])


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        return float("nan")


def _is_missing(word: str) -> bool:
    return word.strip().lower() in MISSING


def _not_float32(numbers: np.ndarray) -> list[int]:
    rows: list[int] = np.flatnonzero(~(np.abs(numbers) <= LARGEST)).tolist()  # NaN is not
    return rows


def _problem(number: float, word: str | None = None) -> str:
    word = f"{number:g}" if word is None else word
    if _is_missing(word):
        return "the value is missing"
    what = "too large for float32" if np.isfinite(number) else "not a finite number"
    return f"{word[:LONGEST]} is {what}"


def _warn_of_decimal_commas(path: Path, columns: dict[str, Values]) -> None:
    for name, column in columns.items():
        if isinstance(column, Texts) and all(map(DECIMAL_COMMA.fullmatch, column.words)):
            log.warning(
                "%s: column %r is taken for texts, and all look like numbers with a decimal comma, "
                "such as %r: save the table with decimal points",
                path,
                name,
                column.words[0][:LONGEST],
            )


# -- csv -------------------------------------------------------------------------------------------


def _read_csv(path: Path, select: Select, all_texts: bool) -> _Content:
    from pyarrow import ArrowInvalid, csv, string

    check_memory(path, 4 * path.stat().st_size, "its cells", "split it, or leave out columns")
    names, separator, lines, quotes = _scan(path)
    used, malformed = select(names), {}

    def skip(row: Any) -> str:
        malformed[row.number - 2] = (
            f" has {row.actual_columns} values, and the header names {row.expected_columns} columns"
        )
        return "skip"

    forms = [form for word in MISSING for form in {word, word.upper(), word.title(), "NaN", "Na"}]
    convert = csv.ConvertOptions(
        column_types=dict.fromkeys(used, string()) if all_texts else {},
        include_columns=used,
        true_values=[],
        false_values=[],
        null_values=forms,  # pyarrow compares letter for letter
    )
    parse = csv.ParseOptions(delimiter=separator, newlines_in_values=True, invalid_row_handler=skip)
    # with threads pyarrow does not tell the numbers of rows
    read = csv.ReadOptions(use_threads=False, column_names=names, skip_rows=1)
    try:
        try:
            table = csv.read_csv(path, read, parse, convert)
        except ArrowInvalid as error:
            if "straddling" not in str(error):  # a row longer than a block
                raise
            read.block_size = min(path.stat().st_size + 1, 2**31 - 1)
            table = csv.read_csv(path, read, parse, convert)
    except ArrowInvalid as error:
        raise DataError(f"{path}: cannot be read as csv: {error}") from None
    total = len(malformed) + len(table)
    one_line_each = lines == total + 1
    if quotes % 2 and not one_line_each:
        raise DataError(f"{path}: a quote is not closed, so a cell holds all lines after it")
    first = 2 if one_line_each else 1
    numbers = np.delete(np.arange(total), list(malformed)) + first
    named = {record + first: problem for record, problem in malformed.items()}
    columns = dict(zip(used, table.columns, strict=True))
    return _Content(columns, "line" if one_line_each else "row", numbers, named)


def _scan(path: Path) -> tuple[list[str], str, int, int]:
    """The header, the separator, and the numbers of lines and quotes of a csv file."""
    quotes = lines = 0
    with path.open("rb") as file:
        first, part = file.readline(), b"\n"
        file.seek(0)
        while more := file.read(1 << 22):
            part = more
            quotes, lines = quotes + part.count(b'"'), lines + part.count(b"\n")
    try:
        text = first.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{path}: line 1 is not UTF-8 text") from None
    separator = max(",;\t", key=text.count)  # a header names columns: what it has most of
    names = [name.strip() for name in next(csv.reader([text], delimiter=separator), [])]
    return names, separator, lines + (not part.endswith(b"\n")), quotes


def _check_names(path: Path, names: Sequence[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1 or not name:
            problem = (
                f"{count} columns are called {name[:LONGEST]!r}" if name else "a column is unnamed"
            )
            raise DataError(f"{path}: {problem}; each needs a name of its own in the first line")


# -- parquet ---------------------------------------------------------------------------------------


def _read_parquet(path: Path, select: Select, all_texts: bool) -> _Content:
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
        empty = None if batches else schema
        table = pyarrow.Table.from_batches(batches, empty).unify_dictionaries()
    except (pyarrow.ArrowException, OSError, IndexError) as error:
        raise DataError(f"{path}: cannot be read as parquet: {error}") from None
    columns = {name: table.column(name) for name in used}
    return _Content(columns, "row", np.arange(1, len(table) + 1), {})
