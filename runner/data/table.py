"""Tables from csv and parquet files, read column-wise by pyarrow."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from runner.data.batch import RowNames
from runner.data.paths import existing, suggestion
from runner.device import memory
from runner.errors import ConfigError, DataError

MISSING = {"", "na", "n/a", "nan", "none", "null"}  # what tables write where a value is not known
LARGEST = float(np.finfo(np.float32).max)  # models compute in it; the square is a float64 still
LONGEST = 40  # characters of a cell, in a message
ROWS = 1 << 17  # of a parquet file that are decoded at a time
NUMBER = 8  # bytes of a float64
LEAVE_OUT = (
    "leave such rows out with data.bad_samples=drop, or the column with data.ignore"  # both ways
)


@dataclass(frozen=True)
class LineNames(RowNames):
    """The line of each row of a csv file; counted only where a message needs it."""

    word: str = "line"
    path: Path = Path()
    separator: str = ","
    one_line_each: bool = True  # no blank lines, no line breaks in cells

    def __call__(self, index: int) -> str:
        """The name of that sample."""
        record = index if self.numbers is None else int(self.numbers[index])
        line = record + 2 if self.one_line_each else self._lines[record]
        return f"line {line}"

    @cached_property
    def _lines(self) -> list[int]:
        return [line for line, row in _python_rows(self.path, self.separator) if row][1:]


@dataclass(frozen=True)
class Table:
    """Arrow columns by name: numbers, or texts (dictionary-encoded where parquet has them so)."""

    path: Path
    columns: dict[str, Any]  # pyarrow.ChunkedArray
    where: RowNames  # what a message calls a row, such as `line 17`
    problems: list[str] = field(default_factory=list)  # a line for each row that was left out

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def column(self, name: str, key: str) -> Any:
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
        columns = {name: column.take(stay) for name, column in self.columns.items()}
        numbers = stay if self.where.numbers is None else self.where.numbers[stay]
        problems = [f"{self.where(row)}{bad[row]}" for row in sorted(bad)]
        where = replace(self.where, numbers=numbers)
        return Table(self.path, columns, where, self.problems + problems)

    def missing(self, name: str, row: int) -> DataError:
        """The error for a value that is not there."""
        return DataError(
            f"{self.path}: {self.where(row)}, column {name!r}: the value is missing; fill it in, "
            + LEAVE_OUT
        )


def read_table(path: str, drop: bool = False, texts: Sequence[str] = ()) -> Table:
    """The table in a `.csv` (or `.tsv`) or `.parquet` file, with at least one row.

    With `drop`, lines of a csv that are no row of it are left out; else the first is a DataError.
    Columns of a csv named in `texts` stay as they are written.
    """
    file = existing(path)
    if file.is_dir():
        raise ConfigError("data.path", f"{file} is a folder", "name the csv or parquet file in it")
    parquet = file.suffix in (".parquet", ".pq")
    table = _read_parquet(file) if parquet else _read_csv(file, drop, texts)
    if not table.columns or not len(table):
        raise DataError(f"{file}: the table is empty")
    return table


def check_memory(path: Path, size: int, what: str, fix: str) -> None:
    """Refuse what does not fit into the memory that this process may still take."""
    if size > (available := memory.available_bytes()):
        raise DataError(
            f"data.path: {path}: refused: {what} take {size:,} bytes, and {available:,} are "
            f"available; {fix}"
        )


# -- cells -----------------------------------------------------------------------------------------


def words_of(column: Any) -> tuple[np.ndarray, list[str | None]]:
    """Codes of a text column, and the different texts that they stand for; None: no value."""
    import pyarrow

    if not pyarrow.types.is_dictionary(column.type):
        column = column.cast(pyarrow.string()).dictionary_encode()
    encoded = column.combine_chunks()
    words = encoded.dictionary.to_pylist()
    codes = encoded.indices.fill_null(len(words)).to_numpy(zero_copy_only=False)
    return codes, [*words, None]


def numbers(table: Table, name: str) -> np.ndarray | None:
    """The column as float64, or None where it holds texts. Raises DataError on a missing value.

    Texts such as NA count as missing only among numbers: elsewhere they may be a category.
    """
    column = table.columns[name]
    if not is_text(column):
        found = _floats(column)
    else:
        codes, words = words_of(column)
        _check_no_empty(table, name, codes, words)
        parsed = np.array([_number(word) for word in words])
        used = [w for w in np.unique(codes).tolist() if not _is_missing(words[w])]
        if not used or np.isnan(parsed[used]).any():
            return None
        found = parsed[codes]
    bad = np.flatnonzero(~_usable(found))
    if len(bad):
        row = int(bad[0])
        if np.isnan(found[row]):
            raise table.missing(name, row)
        wrong = "too large for float32" if np.isfinite(found[row]) else "not finite"
        raise DataError(
            f"{table.path}: {table.where(row)}, column {name!r}: {found[row]:g} is {wrong}; "
            f"correct it, {LEAVE_OUT}"
        )
    return found


def bad_cells(table: Table, names: Sequence[str], most_bad: float) -> dict[int, str]:
    """What is wrong with each row that has a cell which cannot be used, by the row's index.

    A column holds numbers where no more than the share `most_bad` of its cells is anything else;
    in one of texts only an empty cell is bad.
    """
    bad: dict[int, str] = {}
    for name in names:
        column = table.columns[name]
        codes, words = words_of(column) if is_text(column) else (None, [])
        found = _floats(column) if codes is None else np.array([_number(w) for w in words])[codes]
        if codes is not None and np.isnan(found).sum() > most_bad * len(found):
            found = np.where([w is None or w == "" for w in words], np.nan, 0.0)[codes]
        for row in np.flatnonzero(~_usable(found)).tolist():
            cell = f"{found[row]:g}" if codes is None else words[codes[row]]
            what = "too large for float32" if np.isfinite(found[row]) else "no finite number"
            wrong = "is missing" if _is_missing(cell) else f"{str(cell)[:LONGEST]!r} is {what}"
            bad.setdefault(row, f", column {name!r}: the value {wrong}")
    return bad


def is_text(column: Any) -> bool:
    """Whether a column holds texts, or nothing at all."""
    from pyarrow import types

    kind = column.type
    return bool(types.is_dictionary(kind) or types.is_string(kind) or types.is_null(kind))


def _floats(column: Any) -> np.ndarray:
    """float64, NaN where there is no value."""
    import pyarrow

    found: np.ndarray = column.cast(pyarrow.float64(), safe=False).to_numpy()
    return found


def _check_no_empty(
    table: Table, name: str, codes: np.ndarray, words: Sequence[str | None]
) -> None:
    empty = [code for code, word in enumerate(words) if word is None or word == ""]
    rows = np.flatnonzero(np.isin(codes, empty))
    if len(rows):
        raise table.missing(name, int(rows[0]))


def _is_missing(word: str | None) -> bool:
    return word is None or word.strip().lower() in MISSING


def _usable(found: np.ndarray) -> np.ndarray:
    """Which of the numbers are finite, and stay so as float32."""
    usable: np.ndarray = np.abs(found) <= LARGEST  # NaN is not
    return usable


def _number(word: str | None) -> float:
    try:
        return float(word or "nan")
    except ValueError:
        return float("nan")


# -- csv -------------------------------------------------------------------------------------------


def _read_csv(path: Path, drop: bool, texts: Sequence[str]) -> Table:
    from pyarrow import ArrowInvalid

    check_memory(path, 4 * path.stat().st_size, "its cells", "split it, or leave out columns")
    head, separator, one_line_each = _scan(path)
    _check_names(path, head)
    where = LineNames(path=path, separator=separator, one_line_each=one_line_each)
    invalid: list[Any] = []
    try:
        table = _parse(path, separator, texts)
    except ArrowInvalid as error:
        if "CSV parse error" not in str(error):
            raise DataError(f"{path}: cannot be read as csv: {error}") from None
        table = _parse(path, separator, texts, invalid, stop=not drop)
    wrong = {row.number - 2: _count_problem(row) for row in invalid}
    if wrong and not drop:
        record = min(wrong)
        raise DataError(f"{path}: {where(record)}{wrong[record]}")
    records = np.delete(np.arange(len(wrong) + (0 if table is None else len(table))), list(wrong))
    problems = [f"{where(record)}{wrong[record]}" for record in sorted(wrong)]
    columns = dict(zip(head, () if table is None else table.columns, strict=False))
    result = Table(path, columns, replace(where, numbers=records), problems)
    return _without_bad_bytes(result, drop)


def _scan(path: Path) -> tuple[list[str], str, bool]:
    """Header, separator, and whether each row is on one line; refuses an unclosed quote."""
    quotes = breaks = blank = 0
    tail = b""
    with path.open("rb") as file:
        first = file.readline()
        file.seek(0)
        while part := file.read(1 << 22):
            quotes, breaks = quotes + part.count(b'"'), breaks + part.count(b"\n")
            joined = (tail + part).replace(b"\r", b"")
            blank, tail = blank + joined.count(b"\n\n"), joined[-1:]
    try:
        # a header names columns, so the separator is what it has most of
        text = first.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{path}: line 1 is not UTF-8 text") from None
    separator = max(",;\t", key=text.count)
    header = [name.strip() for name in next(csv.reader([text], delimiter=separator), [])]
    if quotes % 2:  # which may stand for inches as well
        _check_quotes(path, separator)
    return header, separator, not blank and not quotes


def _check_quotes(path: Path, separator: str) -> None:
    lines = [0]
    try:
        lines.extend(line for line, _ in _python_rows(path, separator, strict=True))
    except csv.Error as error:
        if "unexpected end" in str(error):
            raise DataError(f"{path}: line {lines[-1] + 1}: a quote is not closed") from None


def _python_rows(
    path: Path, separator: str, strict: bool = False
) -> Iterator[tuple[int, list[str]]]:
    """Each row with its last line, slowly: for what pyarrow does not tell."""
    before = csv.field_size_limit(sys.maxsize)
    try:
        with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
            reader = csv.reader(file, delimiter=separator, strict=strict)
            for row in reader:
                yield reader.line_num, row
    finally:
        csv.field_size_limit(before)


def _parse(
    path: Path,
    separator: str,
    texts: Sequence[str],
    invalid: list[Any] | None = None,
    stop: bool = False,
) -> Any:
    """The arrow table; `invalid` collects rows of a wrong length, the first ends it with `stop`."""
    from pyarrow import ArrowInvalid, csv, string, types

    def take_note(row: Any) -> str:
        if invalid is not None:
            invalid.append(row)
        return "error" if stop or invalid is None else "skip"

    def parse(block: int, kinds: dict[str, Any]) -> Any:
        return csv.read_csv(
            path,
            read_options=csv.ReadOptions(use_threads=invalid is None, block_size=block),
            parse_options=csv.ParseOptions(
                delimiter=separator, newlines_in_values=True, invalid_row_handler=take_note
            ),
            convert_options=csv.ConvertOptions(
                column_types=kinds, true_values=[], false_values=[], null_values=_nulls()
            ),
        )

    block, kinds = 1 << 20, dict.fromkeys(texts, string())
    try:
        try:
            table = parse(block, kinds)
        except ArrowInvalid as error:
            if "straddling" not in str(error):  # a row longer than a block
                raise
            block = min(path.stat().st_size + 1, 2**31 - 1)
            table = parse(block, kinds)
        kept = (types.is_int64, types.is_float64, types.is_string, types.is_null, types.is_binary)
        dates = {f.name: string() for f in table.schema if not any(k(f.type) for k in kept)}
        return parse(block, kinds | dates) if dates else table
    except ArrowInvalid:
        if stop and invalid:
            return None
        raise


def _nulls() -> list[str]:
    """How tables write a missing number; pyarrow compares letter for letter."""
    return [form for word in MISSING for form in {word, word.upper(), word.title(), "NaN", "Na"}]


def _count_problem(row: Any) -> str:
    return f" has {row.actual_columns} values, and the header names {row.expected_columns} columns"


def _without_bad_bytes(table: Table, drop: bool) -> Table:
    """Texts where pyarrow found bytes that are none; such rows dropped, or the first refused."""
    from pyarrow import string, types

    binary = [name for name, column in table.columns.items() if types.is_binary(column.type)]
    bad = {
        row: " is not UTF-8 text"
        for name in binary
        for row, cell in enumerate(table.columns[name].to_pylist())
        if cell is not None and not _is_utf8(cell)
    }
    if bad and not drop:
        raise DataError(f"{table.path}: {table.where(min(bad))} is not UTF-8 text")
    table = table.without(bad)
    for name in binary:
        table.columns[name] = table.columns[name].cast(string())
    return table


def _is_utf8(cell: bytes) -> bool:
    try:
        cell.decode()
    except UnicodeDecodeError:
        return False
    return True


def _check_names(path: Path, names: list[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen or not name:
            problem = (
                f"two columns are called {name[:LONGEST]!r}" if name else "a column is unnamed"
            )
            raise DataError(f"{path}: {problem}; each needs a name of its own in the first line")
        seen.add(name)


# -- parquet ---------------------------------------------------------------------------------------


def _read_parquet(path: Path) -> Table:
    """The columns; what its footer says, and what is then decoded, must fit into memory."""
    import pyarrow
    from pyarrow import parquet

    fix = "leave out rows or columns when it is written"
    try:
        with parquet.ParquetFile(path) as file:
            names, rows = file.schema_arrow.names, file.metadata.num_rows
            _check_names(path, names)
            texts = [column.name for column in file.schema_arrow if _is_text_type(path, column)]
            check_memory(path, NUMBER * rows * len(names), f"{rows:,} rows", fix)
        batches, decoded = [], 0
        with parquet.ParquetFile(path, read_dictionary=texts) as file:
            for batch in file.iter_batches(ROWS):
                batches.append(batch)
                decoded += batch.nbytes
                check_memory(path, batch.nbytes, f"{decoded:,} bytes of decoded rows", fix)
            table = pyarrow.Table.from_batches(batches, batches[0].schema if batches else None)
    except (pyarrow.ArrowException, OSError, IndexError) as error:
        raise DataError(f"{path}: cannot be read as parquet: {error}") from None
    columns = dict(zip(names, table.unify_dictionaries().columns, strict=True))
    return Table(path, columns, RowNames("row", np.arange(1, len(table) + 1)))


def _is_text_type(path: Path, column: Any) -> bool:
    """Whether a column holds texts; a DataError where it holds neither these nor numbers."""
    from pyarrow import types

    kind = column.type.value_type if types.is_dictionary(column.type) else column.type
    if types.is_string(kind) or types.is_large_string(kind):
        return True
    numeric = (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal)
    if not any(check(kind) for check in numeric):
        raise DataError(
            f"{path}: column {column.name!r} is of type {kind}, neither numbers nor texts; convert "
            "it, or leave it out when the file is written"
        )
    return False
