"""Csv and parquet files as arrow columns, read by pyarrow."""

from __future__ import annotations

import codecs
import io
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from runner.data.cells import MISSING_WORDS, CellKind, is_text
from runner.data.config import CsvFormat, Tabular, sign_of
from runner.data.number_format import convert_numbers, sign_word, use_trained_format
from runner.data.preprocessing import Preprocessing
from runner.device import memory
from runner.errors import ConfigError, DataError
from runner.format import count_noun
from runner.techniques.base import Choice

log = logging.getLogger(__name__)

# pyarrow's comparison is case-sensitive
MISSING_FORMS = [f for w in MISSING_WORDS for f in {w, w.upper(), w.title(), "NaN", "Na"}]
PARQUET_BATCH_ROWS = 1 << 17  # decoded at a time
BLOCK_BYTES = 1 << 22  # of csv that are parsed at a time: fewer, larger pieces are freed faster
MEMORY_PER_BYTE = 4  # bytes of memory per byte of csv: "1," becomes a float64
CODEC_BY_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}  # by how a file begins
UTF16_BOMS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
FALLBACK_ENCODING = "cp1252"  # Western European Windows; 5 bytes are undefined
SEPARATORS = ",;\t|"
NEWLINE = ord("\n")


@dataclass(frozen=True)
class TableContent:
    """A file's arrow columns, the line or row number of each row, and its malformed rows."""

    columns: dict[str, Any]  # pyarrow.ChunkedArray
    word: str  # line | row
    numbers: np.ndarray
    malformed: dict[int, str]
    choices: tuple[Choice, ...] = ()  # what was recognised


Select = Callable[[Sequence[str], Mapping[str, Any]], list[str]]
"""Given the columns of a file, and the types of unreadable ones, returns those to read."""


def read_content(
    path: Path,
    select: Select,
    kind: Callable[[str], CellKind],
    config: CsvFormat,
    fitted: Preprocessing | None = None,
) -> TableContent:
    """Read the selected columns of a csv or parquet file; `kind` gives the type by name.

    With `fitted`, numbers of a csv have the format of the training file.
    """
    if path.is_dir():
        from runner.data.saved_dataset import read_saved

        table = read_saved(path)
        selected = _select_readable(path, select, table.schema, len(table), "select some of them")
        columns = {name: table.column(name) for name in selected}
        for name, column in columns.items():
            if _is_text(column.type):  # dictionary-encoded, as from parquet
                columns[name] = column.dictionary_encode().unify_dictionaries()
        return TableContent(columns, "row", np.arange(1, len(table) + 1), {})
    with path.open("rb") as file:
        start = file.read(4)
    if not start:
        raise DataError(f"data.path: {path} is empty; it needs a header and a row for each sample")
    if start == b"PK\x03\x04":
        raise DataError(f"data.path: {path} is a workbook or a zip archive; save its table as csv")
    if start == b"PAR1" or path.suffix in (".parquet", ".pq"):
        return _read_parquet(path, select)
    signs: tuple[Choice, ...] = ()
    if isinstance(config, Tabular):
        config, signs = use_trained_format(config, fitted)
    content = _read_csv(path, select, kind, config)
    return replace(content, choices=(*content.choices, *signs))


def check_memory(path: Path, size: int, what: str, fix: str) -> None:
    """Raise DataError if `size` bytes exceed the memory available to this process."""
    if size > (available := memory.available_bytes()):
        raise DataError(
            f"data.path: {path}: refused: {what} take {size:,} bytes, but only {available:,} "
            f"are available; {fix}"
        )


# -- csv -------------------------------------------------------------------------------------------


def _read_csv(
    path: Path, select: Select, kind: Callable[[str], CellKind], config: CsvFormat
) -> TableContent:
    import pyarrow
    from pyarrow.types import is_binary

    check_memory(
        path, MEMORY_PER_BYTE * path.stat().st_size, "its cells", "split it, or leave out columns"
    )
    try:
        rows, table, malformed = _parse_csv(path, select, kind, config)
        decoded = not any(is_binary(column.type) for column in table.columns)
    except (UnicodeDecodeError, pyarrow.ArrowInvalid) as error:
        if isinstance(error, pyarrow.ArrowInvalid) and "invalid UTF8" not in str(error):
            raise DataError(f"{path}: cannot be read as csv: {error}") from None
        decoded = False
    except OSError as error:
        raise DataError(f"{path}: cannot be decompressed: {error}") from None
    if not decoded:
        choice = _choose_fallback_encoding(path, config.encoding)
        content = _read_csv(path, select, kind, replace(config, encoding=FALLBACK_ENCODING))
        return replace(content, choices=(choice, *content.choices))
    total = len(malformed) + len(table)
    one_line_each = rows.lines == total
    if rows.quotes % 2 and not one_line_each:
        raise DataError(f"{path}: unclosed quote, so one cell holds all lines after it")
    first_line = rows.first_line if one_line_each else 1
    numbers = np.delete(np.arange(total), list(malformed)) + first_line
    problems = {record + first_line: problem for record, problem in malformed.items()}
    columns = dict(zip(table.column_names, table.columns, strict=True))
    choices = rows.choices
    if isinstance(config, Tabular):
        numeric = {n: column for n, column in columns.items() if kind(n) is not CellKind.texts}
        choices += convert_numbers(numeric, path, rows.separator, config)
        columns |= numeric
    return TableContent(columns, "line" if one_line_each else "row", numbers, problems, choices)


def _parse_csv(
    path: Path,
    select: Select,
    kind: Callable[[str], CellKind],
    config: CsvFormat,
    quoted: bool = False,
) -> tuple[_CsvRows, Any, dict[int, str]]:
    """Parse a csv; return the reader, the arrow table, and the problems of malformed rows."""
    from pyarrow import ArrowInvalid, csv, string

    malformed: dict[int, str] = {}

    def skip(row: Any) -> str:
        header = f"and the header names {count_noun(row.expected_columns, 'column')}"
        malformed[row.number - 1] = f" has {count_noun(row.actual_columns, 'value')}, {header}"
        return "skip"

    with _CsvRows(path, config) as rows:
        selected = select(rows.names, {})
        convert = csv.ConvertOptions(
            column_types={name: string() for name in selected if kind(name) is CellKind.texts},
            include_columns=selected,
            true_values=[],
            false_values=[],
            null_values=MISSING_FORMS,
            decimal_point=rows.decimal,
        )
        read = partial(csv.ReadOptions, column_names=rows.names)
        parse = partial(csv.ParseOptions, delimiter=rows.separator)
        # only quoted cells contain line breaks; without quotes pyarrow splits blocks faster
        quoted = quoted or b'"' in rows.file.peek(BLOCK_BYTES)
        try:
            parse_options = parse(newlines_in_values=quoted)
            table = csv.read_csv(rows, read(block_size=BLOCK_BYTES), parse_options, convert)
            if quoted or not rows.quotes:
                return rows, table, malformed
        except ArrowInvalid:
            while rows.read(BLOCK_BYTES):  # count what is left
                pass
    if not rows.size:
        raise DataError(f"data.path: {path} has no rows below its header")
    if not quoted and rows.quotes:
        return _parse_csv(path, select, kind, config, quoted=True)
    # a row is longer than a block or malformed; with threads its number would be unknown
    one_block = read(use_threads=False, block_size=min(rows.size + 1, 2**31 - 1))
    with_handler = parse(newlines_in_values=quoted, invalid_row_handler=skip)
    with _CsvRows(path, config) as rows:
        return rows, csv.read_csv(rows, one_block, with_handler, convert), malformed


class _CsvRows(io.RawIOBase):
    """Byte stream of a csv's rows: decompressed, transcoded to UTF-8, with lines counted.

    The constructor reads the header: column names and separator.
    """

    def __init__(self, path: Path, config: CsvFormat) -> None:
        from pyarrow import BufferReader, csv

        super().__init__()
        self.path, self.limit = path, memory.available_bytes() // MEMORY_PER_BYTE
        self.size = self.lines = self.quotes = 0
        self.last_byte, self.first_line = b"\n", 1
        self.choices: tuple[Choice, ...] = ()
        self.scope = ExitStack()
        self.file, encoding = _open(path, config.encoding, self.scope)
        if encoding != "utf-8" and config.encoding is None:
            self._add_choice("data.encoding", encoding, "the file begins with its byte order mark")
        header, declared = self._read_record().removeprefix(codecs.BOM_UTF8), None
        if match := re.fullmatch(rb'"?sep=([^"])"?', header.rstrip(b"\r\n")):
            declared, header = match[1].decode(), self._read_record()
            self._add_choice("data.separator", declared, "set by its first line")
        if b"\0" in header:
            problem = "holds NUL bytes; it may be UTF-16 without a byte order mark:"
            raise DataError(f"{path}: line 1 {problem} data.encoding=utf-16-le")
        self.separator = (
            sign_of(config.separator) or declared or self._detect_separator(header.decode())
        )
        parse = csv.ParseOptions(delimiter=self.separator, newlines_in_values=True)
        read = csv.ReadOptions(block_size=len(header) + 2)
        names = csv.read_csv(BufferReader(header + b"\n"), read, parse).column_names
        self.names = [name.strip() for name in names]
        self._check_separator(config.separator, header.decode())
        self.size = 0  # of the rows alone
        self.decimal = "."
        if isinstance(config, Tabular):
            implied = "," if sign_of(config.thousands) == "." else "."
            self.decimal = sign_of(config.decimal) or implied

    def close(self) -> None:
        """Close the stream and its file."""
        self.scope.close()
        super().close()

    def readable(self) -> bool:
        """Return True."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes, counting lines and quotes."""
        part: bytes = self.file.read(size)
        self._count_memory(part)
        if b'"' in part:  # `in` is faster than count
            self.quotes += part.count(b'"')
        self.lines += int(np.count_nonzero(np.frombuffer(part, np.uint8) == NEWLINE))
        if part:
            self.last_byte = part[-1:]
        elif self.last_byte != b"\n":  # a last line without a line break
            self.lines, self.last_byte = self.lines + 1, b"\n"
        return part

    def _count_memory(self, part: bytes) -> None:
        self.size += len(part)
        if self.size > self.limit:
            check_memory(self.path, MEMORY_PER_BYTE * self.size, "its cells", "split it")

    def _read_record(self) -> bytes:
        """Read the next record: a line, or several if a quoted cell contains line breaks."""
        lines, quotes = [self._read_line()], 0
        while (quotes := quotes + lines[-1].count(b'"')) % 2:
            lines.append(self._read_line())
            if not lines[-1]:
                raise DataError(f"{self.path}: unclosed quote in the header")
        self.first_line += len(lines)
        return b"".join(lines)

    def _read_line(self) -> bytes:
        line = self.file.readline(self.limit + 1)
        self._count_memory(line)
        return line

    def _detect_separator(self, header: str) -> str:
        """Return the most frequent separator in the header, outside quotes."""
        separator, count = _most_frequent(header)
        if separator != ",":
            self._add_choice("data.separator", separator, f"the header has {count}")
        return separator

    def _check_separator(self, configured: str | None, header: str) -> None:
        """Raise ConfigError if the header lacks the configured separator but has another."""
        other, count = _most_frequent(header)
        if configured is not None and len(self.names) == 1 and count and other != self.separator:
            problem = f"the header of {self.path} has no {self.separator!r}"
            fix = f"it looks like {sign_word(other)}; leave data.separator out"
            raise ConfigError("data.separator", problem, fix)

    def _add_choice(self, key: str, sign: str, reason: str) -> None:
        self.choices = (*self.choices, Choice(key, sign_word(sign), reason))


def _most_frequent(header: str) -> tuple[str, int]:
    """Return the most frequent separator outside quotes, and its count."""
    text = re.sub('"[^"]*"', "", header)
    separator = max(SEPARATORS, key=text.count)
    return separator, text.count(separator)


def _open(path: Path, encoding: str | None, scope: ExitStack) -> tuple[io.BufferedReader, str]:
    """Open a file decompressed and transcoded to UTF-8; return it and its encoding."""
    import pyarrow

    encoding = encoding or _encoding(path)
    stream = scope.enter_context(_decompress(path))
    if codecs.lookup(encoding).name != "utf-8":
        stream = scope.enter_context(pyarrow.transcoding_input_stream(stream, encoding, "utf-8"))
    return io.BufferedReader(stream, BLOCK_BYTES), encoding


def _encoding(path: Path) -> str:
    with _decompress(path) as stream:
        return "utf-16" if stream.read(2) in UTF16_BOMS else "utf-8"


def _decompress(path: Path) -> Any:
    """Open a file as a decompressed byte stream."""
    import pyarrow

    with path.open("rb") as file:
        start = file.read(4)
    codec = next((name for magic, name in CODEC_BY_MAGIC.items() if start.startswith(magic)), None)
    return pyarrow.input_stream(str(path), codec)


def _choose_fallback_encoding(path: Path, encoding: str | None) -> Choice:
    """Fall back to cp1252 if it fits and no encoding is configured; DataError otherwise."""
    line = _undecodable_line(path, tried := encoding or _encoding(path))
    if encoding is None and tried == "utf-8" and not _undecodable_line(path, FALLBACK_ENCODING):
        fix = "set data.encoding=… if letters look wrong"
        choice = Choice("data.encoding", FALLBACK_ENCODING, f"not UTF-8 from line {line}; {fix}")
        log.warning("%s: read as %s: %s", path, FALLBACK_ENCODING, choice.reason)
        return choice
    fix = f"set its encoding, e.g. data.encoding={FALLBACK_ENCODING}"
    raise DataError(f"{path}: line {line} is not {tried.upper()} text; {fix}")


def _undecodable_line(path: Path, encoding: str) -> int:
    """Return the first line that `encoding` cannot decode, 0 if there is none."""
    decoder, line = codecs.getincrementaldecoder(encoding)(), 1
    with _decompress(path) as stream:
        try:
            while part := stream.read(BLOCK_BYTES):
                decoder.decode(part)
                line += part.count(b"\n")
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            return line + error.object[: error.start].count(b"\n")
    return 0


# -- parquet ---------------------------------------------------------------------------------------


def _read_parquet(path: Path, select: Select) -> TableContent:
    """Read columns of a parquet file; DataError if they do not fit into memory."""
    import pyarrow
    from pyarrow import parquet

    fix = "write fewer rows or columns"
    try:
        with parquet.ParquetFile(path) as file:
            schema, rows = file.schema_arrow, file.metadata.num_rows
        selected = _select_readable(path, select, schema, rows, fix)
        texts = [name for name in selected if _is_text(schema.field(name).type)]
        batches, decoded = [], 0
        with parquet.ParquetFile(path, read_dictionary=texts) as file:
            for batch in file.iter_batches(PARQUET_BATCH_ROWS, columns=selected):
                batches.append(batch.select(selected))
                decoded += batch.nbytes
                check_memory(path, batch.nbytes, f"{decoded:,} bytes of decoded rows", fix)
        table = pyarrow.Table.from_batches(batches, None if batches else schema)
        table = table.unify_dictionaries()
    except (pyarrow.ArrowException, OSError, IndexError) as error:
        raise DataError(f"{path}: cannot be read as parquet: {error}") from None
    columns = {name: table.column(name) for name in selected}
    return TableContent(columns, "row", np.arange(1, len(table) + 1), {})


def _select_readable(path: Path, select: Select, schema: Any, rows: int, fix: str) -> list[str]:
    """Return the columns to read; DataError if they do not fit into memory as float64."""
    unreadable = {field.name: field.type for field in schema if not _is_readable(field.type)}
    selected = select(schema.names, unreadable)
    check_memory(path, 8 * rows * len(selected), f"{rows:,} rows", fix)
    return selected


def _is_readable(arrow: Any) -> bool:
    """Whether each cell is a single number, time or text."""
    from pyarrow import types

    if types.is_dictionary(arrow):
        return _is_readable(arrow.value_type)
    single = types.is_primitive(arrow) or types.is_decimal(arrow) or types.is_null(arrow)
    return single or _is_text(arrow)


def _is_text(arrow: Any) -> bool:
    from pyarrow import types

    return is_text(arrow) or bool(types.is_string_view(arrow))
