"""Csv and parquet files as arrow columns, read by pyarrow."""

from __future__ import annotations

import codecs
import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from runner.core.data.preprocessing import Preprocessing
from runner.core.device import memory
from runner.core.errors import ConfigError, DataError
from runner.core.findings import Choice, notice
from runner.core.format import count_noun
from runner.core.interfaces.batch import NumberFormat
from runner.core.schemas.data import CsvFormat, Tabular, Text, sign_of
from runner.datasets.cells import (
    MAX_WHOLE,
    MISSING_WORDS,
    CellKind,
    CellRules,
    cell_type,
    is_text,
    largest,
)
from runner.datasets.number_format import convert_numbers, sign_word, use_trained_format

# pyarrow's comparison is case-sensitive
MISSING_FORMS = [f for w in MISSING_WORDS for f in {w, w.upper(), w.title(), "NaN", "Na"}]
PARQUET_NAMES = (".parquet", ".pq")
PARQUET_BATCH_ROWS = 1 << 17  # decoded at a time
BLOCK_BYTES = 1 << 22  # of csv that are parsed at a time: fewer, larger pieces are freed faster
NUMBER_BYTES = 4  # of memory for a number
MEMORY_PER_BYTE = 4  # most bytes of memory per byte of csv: "," becomes a number
SAMPLE_BYTES = 1 << 20  # of csv, from which its memory is estimated; bytes that are never too many
MAX_ROW_BYTES = 2**31 - 1
HEADER_BYTES = 1 << 26  # a line of the header is shorter
COLUMN_BYTES = 1 << 10  # of a column that are parsed at a time, at least
CODEC_BY_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}  # by how a file begins
UTF16_BOMS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
FALLBACK_ENCODING = "cp1252"  # Western European Windows; 5 bytes are undefined
ENCODINGS = ("utf-8", "cp1252", "mac-roman", "cp850", "cp1250", "cp1251", "gb18030", "cp932")
SEPARATORS = ",;\t|"
POINT, ZERO, NINE = map(ord, ".09")
SCAN_BYTES = 1 << 18  # of csv that are scanned at a time, in the processor's cache
MAX_ENCODED_WORDS = 10_000  # of a text column; with more it is read as plain texts
MAX_CODE_CHARS = 40  # a longer whole number is beyond 2^53, too


@dataclass(frozen=True)
class TableContent:
    """A file's arrow columns, the line or row number of each row, and its malformed rows."""

    columns: dict[str, Any]  # pyarrow.ChunkedArray
    word: str  # line | row
    numbers: np.ndarray
    malformed: dict[int, str]
    choices: tuple[Choice, ...] = ()  # what was recognised
    formats: dict[str, NumberFormat] = field(default_factory=dict)  # of numbers, by column


Rules = Callable[[str], CellRules]
"""How each column is read, by name."""
Select = Callable[[Sequence[str], Mapping[str, Any]], list[str]]
"""Given the columns of a file, and the types of unreadable ones, returns those to read."""


def read_content(
    path: Path, select: Select, rules: Rules, config: CsvFormat, fitted: Preprocessing | None = None
) -> TableContent:
    """Read the selected columns of a csv or parquet file; `rules` say how, by name.

    With `fitted`, numbers of a csv have the format of the training file; after a csv so have those
    that are texts of a parquet file.
    """
    if path.is_dir():
        from runner.datasets.saved_dataset import read_saved

        table = read_saved(path)
        fix = "select some of them"
        selected = _select_readable(path, select, table.schema, len(table), fix, config)
        columns = {name: table.column(name) for name in selected}
        for name, column in columns.items():
            if _is_text(column.type):  # dictionary-encoded, as from parquet
                columns[name] = column.dictionary_encode().unify_dictionaries()
        return _as_content(columns, len(table), rules, path)
    with path.open("rb") as file:
        start = file.read(4)
    if not start:
        raise DataError(f"data.path: {path} is empty; it needs a header and a row for each sample")
    if start == b"PK\x03\x04":
        raise DataError(f"data.path: {path} is a workbook or a zip archive; save its table as csv")
    if start == b"PAR1" or path.suffix in PARQUET_NAMES:
        as_csv: Tabular | None = None
        if isinstance(config, Tabular) and fitted is not None and fitted.source:
            if Path(fitted.source).suffix not in PARQUET_NAMES:
                as_csv, _ = use_trained_format(config, fitted)
        return _read_parquet(path, select, rules, config, as_csv)
    signs: tuple[Choice, ...] = ()
    if isinstance(config, Tabular):
        config, signs = use_trained_format(config, fitted)
    content = _read_csv(path, select, rules, config)
    return replace(content, choices=(*content.choices, *signs))


def check_columns(path: Path, count: int, most: int | None) -> None:
    """Raise ConfigError for a table with more columns than allowed."""
    if most is not None and count > most:
        fix = "raise the limit, or data.most_columns=null"
        raise ConfigError("data.most_columns", f"{path} has more than {most:,} columns", fix)


def limit_cells(content: TableContent, config: CsvFormat, path: Path) -> None:
    """Cut the texts that data=text trains on; ConfigError for another cell that is too long."""
    from pyarrow import compute

    for name, column in content.columns.items():
        if not is_text(cell_type(column)):
            continue
        is_cut, most = False, config.most_cell_bytes
        if isinstance(config, Text) and name == config.text:
            is_cut, most = True, config.text_bytes
        parts = (getattr(chunk, "dictionary", chunk) for chunk in column.chunks)
        lengths = (compute.max(compute.binary_length(part)).as_py() or 0 for part in parts)
        if most is None or max(lengths, default=0) <= most:
            continue
        cells = column.cast(cell_type(column))
        if is_cut:
            content.columns[name] = compute.utf8_slice_codeunits(cells, 0, most)
            continue
        row = compute.index(compute.greater(compute.binary_length(cells), most), True).as_py()
        place = f"{content.word} {content.numbers[row]:,}, column {name!r}"
        raise long_cell_error(path, place, config)


def long_cell_error(path: Path, place: str, config: CsvFormat) -> ConfigError:
    """Return the error on a cell with more bytes than allowed."""
    problem = f"{path}: {place}: a cell has more than {config.most_cell_mb:g} MB"
    fix = "shorten it, raise the limit, or data.most_cell_mb=null"
    return ConfigError("data.most_cell_mb", problem, fix)


def check_memory(path: Path, size: int, what: str, fix: str) -> None:
    """Raise DataError if `size` bytes exceed the memory available to this process."""
    if size > (available := memory.available_bytes()):
        problem = f"{what} take {size:,} bytes, but only {available:,} are available"
        raise DataError(f"data.path: {path}: refused: {problem}; {fix}")


# -- csv -------------------------------------------------------------------------------------------


def _read_csv(path: Path, select: Select, rules: Rules, config: CsvFormat) -> TableContent:
    import pyarrow
    from pyarrow.types import is_binary

    try:
        file = _CsvFile(path, config, select, rules)
        table, malformed = _parse_csv(file, select, rules)
        decoded = not any(is_binary(cell_type(column)) for column in table.columns)
    except (UnicodeDecodeError, pyarrow.ArrowInvalid) as error:
        if isinstance(error, pyarrow.ArrowInvalid) and "invalid UTF8" not in str(error):
            raise DataError(f"{path}: cannot be read as csv: {error}") from None
        decoded = False
    except OSError as error:
        raise DataError(f"{path}: cannot be decompressed: {error}") from None
    if not decoded:
        choice = _choose_fallback_encoding(path, config.encoding)
        content = _read_csv(path, select, rules, replace(config, encoding=FALLBACK_ENCODING))
        return replace(content, choices=(choice, *content.choices))
    total = len(malformed) + len(table)
    one_line_each = file.lines == total
    if file.quotes % 2 and not one_line_each:
        raise DataError(f"{path}: unclosed quote, so one cell holds all lines after it")
    first_line = file.first_line if one_line_each else 1
    numbers = np.delete(np.arange(total), list(malformed)) + first_line
    problems = {record + first_line: problem for record, problem in malformed.items()}
    columns = dict(zip(table.column_names, table.columns, strict=True))
    choices, formats = file.choices, dict[str, NumberFormat]()
    if filled := [name for name in file.unnamed if not is_blank(columns.pop(name))]:
        problem = f"{len(filled)} columns have no name, but cells; name them in the first line"
        raise DataError(f"data.path: {path}: {problem}")
    if file.unnamed:
        reason = "at the end of each line: neither a name nor cells"
        choices = (*choices, Choice("data.ignore", f"{len(file.unnamed)} left out", reason))
    if isinstance(config, Tabular):
        columns |= _read_codes(file, columns, rules)
        formats, chosen = convert_numbers(columns, rules, path, config, file.separator)
        choices += chosen
    word = "line" if one_line_each else "row"
    return TableContent(columns, word, numbers, problems, choices, formats)


def _read_codes(file: _CsvFile, columns: Mapping[str, Any], rules: Rules) -> dict[str, Any]:
    """Read columns again as texts if pyarrow read whole numbers that are inexact, or codes.

    These are beyond 2^53, have leading zeros, or are hexadecimal; of codes the text is kept.
    """
    from pyarrow import compute, types

    names = list[str]()
    for name, column in columns.items():
        is_number = types.is_integer(column.type) or types.is_floating(column.type)
        if is_number and rules(name).kind is CellKind.any:
            parts = (chunk.to_numpy(zero_copy_only=False) for chunk in column.chunks)
            if file.has_codes or any(largest(part) >= MAX_WHOLE for part in parts):
                names.append(name)
    if not names:
        return {}
    table, _ = _parse_csv(file, lambda *_: names, lambda _: CellRules(CellKind.texts))
    texts = dict(zip(table.column_names, table.columns, strict=True))
    large_or_code = r"^\s*[+-]?(0[0-9xX]|[0-9]{16})"
    return {
        name: column
        for name, column in texts.items()
        if compute.any(compute.match_substring_regex(column, large_or_code)).as_py()
    }


def _parse_csv(file: _CsvFile, select: Select, rules: Rules) -> tuple[Any, dict[int, str]]:
    """Parse a csv; return the arrow table, and the problems of malformed rows."""
    from pyarrow import ArrowInvalid, csv

    malformed: dict[int, str] = {}

    def skip(row: Any) -> str:
        header = f"and the header names {count_noun(row.expected_columns, 'column')}"
        malformed[row.number - 1] = f" has {count_noun(row.actual_columns, 'value')}, {header}"
        return "skip"

    if not file.size:
        raise DataError(f"data.path: {file.path} has no rows below its header")
    selected = select([name for name in file.names if name not in file.unnamed], {})
    convert = _convert_options(file, selected, rules)
    read = partial(csv.ReadOptions, column_names=file.names)
    breaks = file.quotes > 0  # a cell may hold one; without, pyarrow splits blocks faster
    parse = partial(csv.ParseOptions, delimiter=file.separator, newlines_in_values=breaks)
    with suppress(ArrowInvalid), file.rows() as rows:
        block_bytes = max(BLOCK_BYTES, COLUMN_BYTES * len(file.names))  # each piece has an overhead
        table = csv.read_csv(rows, read(block_size=block_bytes), parse(), convert)
        return table.unify_dictionaries(), malformed
    # a row is longer than a block or malformed; with threads its number would be unknown
    one_block = read(use_threads=False, block_size=min(file.size + 1, MAX_ROW_BYTES))
    options = one_block, parse(invalid_row_handler=skip), convert
    with file.rows() as rows:
        return csv.read_csv(rows, *options), malformed


def _convert_options(file: _CsvFile, selected: list[str], rules: Rules) -> Any:
    from pyarrow import csv, string

    text_columns = list[str]()
    for name in selected:  # pyarrow's own conversion would lose what these need
        rule = rules(name)
        has_format = rule.format is not None and rule.format != NumberFormat()
        if rule.kind in (CellKind.texts, CellKind.times) or has_format:
            text_columns.append(name)
    return csv.ConvertOptions(
        column_types=dict.fromkeys([*text_columns, *file.unnamed], string()),
        include_columns=[*selected, *file.unnamed],
        true_values=[],
        false_values=[],
        null_values=MISSING_FORMS,
        auto_dict_encode=True,  # a third faster than texts that are encoded afterwards
        auto_dict_max_cardinality=MAX_ENCODED_WORDS,
        decimal_point=file.decimal,
    )


def is_blank(column: Any) -> bool:
    """Whether all cells of an arrow column are missing, or texts without letters."""
    from pyarrow import compute

    if not is_text(cell_type(column)):
        return bool(column.null_count == len(column))
    column = column.cast(cell_type(column))
    return not compute.any(compute.greater(compute.utf8_length(column), 0)).as_py()


class _CsvFile:
    """A csv as bytes: its header, and counts of lines and quotes; `rows` streams what follows."""

    def __init__(self, path: Path, config: CsvFormat, select: Select, rules: Rules) -> None:
        from pyarrow import ArrowInvalid

        self.path, self.config, self.select, self.rules = path, config, select, rules
        self.disk_bytes = path.stat().st_size if _codec(path) else 0  # of a compressed file
        self.available = memory.available_bytes()
        self.memory_per_byte: float | None = None  # estimated when needed
        self.encoding = config.encoding or _encoding(path)
        self.choices: tuple[Choice, ...] = ()
        self.size = self.header_bytes = self.lines = self.quotes = 0
        self.first_line, self.has_codes = 1, False
        self.decimal = "."
        if isinstance(config, Tabular):
            implied = "," if sign_of(config.thousands) == "." else "."
            self.decimal = sign_of(config.decimal) or implied
        with self._open() as stream:
            file = io.BufferedReader(stream, SCAN_BYTES)
            header = self._read_header(file, config)
            header_bytes, self.size = self.size, 0
            record, line_end, _ = file.peek(1).partition(b"\n")
            is_whole = line_end and record.count(b'"') % 2 == 0
            for line in (header, record if is_whole else b""):
                unquoted = re.sub(b'"[^"]*"', b"", line)
                cells = unquoted.count(self.separator.encode()) + 1
                check_columns(path, cells, config.most_columns)
            first_cells = list[str]()
            with suppress(ArrowInvalid):  # a quote within a cell, such as 5", hides an open one
                first_cells = self._split(record) if is_whole else []
            self.names, self.unnamed = _name_columns(self._split(header), first_cells)
            self.header_bytes = header_bytes
            if max(map(len, self.names)) > (config.most_cell_bytes or math.inf):
                raise long_cell_error(path, "line 1", config)
            other, count = _most_frequent(header.decode())
            if config.separator and len(self.names) == 1 and count and other != self.separator:
                problem = f"the header of {path} has no {self.separator!r}"
                fix = f"it looks like {sign_word(other)}; leave data.separator out"
                raise ConfigError("data.separator", problem, fix)
            if not self.disk_bytes and not self.encoding.lower().startswith("utf-16"):
                self._check_size(path.stat().st_size - self.header_bytes)
            self._scan_rows(file, isinstance(config, Tabular))

    @contextmanager
    def rows(self) -> Iterator[Any]:
        """Open the rows for pyarrow, in UTF-8, after the header."""
        with self._open() as stream:
            left = self.header_bytes
            while left and (part := stream.read(min(left, SCAN_BYTES))):
                left -= len(part)
            yield stream

    @contextmanager
    def _open(self) -> Iterator[Any]:
        """Open the file decompressed, in UTF-8, and with line feeds."""
        import pyarrow

        with ExitStack() as scope:
            start = scope.enter_context(_decompress(self.path)).read(SCAN_BYTES)
            stream = scope.enter_context(_decompress(self.path))
            if codecs.lookup(self.encoding).name != "utf-8":
                transcoded = pyarrow.transcoding_input_stream(stream, self.encoding, "utf-8")
                stream = scope.enter_context(transcoded)
            # lines of old Macs, which pyarrow counts as one
            if b"\r" in start and b"\n" not in start:
                content = bytearray()
                while part := stream.read(SCAN_BYTES):
                    content += part.replace(b"\r", b"\n")
                    self._check_expansion(len(content))
                    if len(content) > self.available:
                        check_memory(self.path, len(content), "its lines", "split it")
                stream = pyarrow.BufferReader(content)
            yield stream

    def _check_size(self, size: int) -> None:
        """Raise ConfigError or DataError if a csv of `size` bytes, when decompressed, is too large.

        Its memory is estimated from its first rows, and only if it might not suffice.
        """
        self._check_expansion(size)
        if MEMORY_PER_BYTE * size > self.available:
            if self.memory_per_byte is None and self.header_bytes:
                self.memory_per_byte = self._estimate_memory()
            needed = int(size * (self.memory_per_byte or 1))
            if needed > self.available:
                fix = "split it, or leave out columns: data.ignore=[…]"
                check_memory(self.path, needed, "its cells", fix)

    def _check_expansion(self, size: int) -> None:
        """Raise ConfigError if a compressed file has `size` bytes or more, and too many."""
        most = self.config.most_expansion or math.inf
        limit = max(most * self.disk_bytes, SAMPLE_BYTES)
        if self.disk_bytes and size > limit:
            times = f"more than {most:g} times its {self.disk_bytes:,} bytes"
            fix = "raise the limit, or data.most_expansion=null"
            raise ConfigError("data.most_expansion", f"{self.path} decompresses to {times}", fix)

    def _estimate_memory(self) -> float:
        """Return the memory of the selected columns per byte of the first rows, in bytes."""
        from pyarrow import ArrowInvalid, BufferReader, csv

        with self.rows() as stream:
            sample = stream.read(SAMPLE_BYTES)
        sample = sample[: sample.rfind(b"\n") + 1]
        selected = self.select([name for name in self.names if name not in self.unnamed], {})
        read = csv.ReadOptions(column_names=self.names, block_size=len(sample) + 2)
        parse = csv.ParseOptions(
            delimiter=self.separator, newlines_in_values=True, invalid_row_handler=lambda _: "skip"
        )
        convert = _convert_options(self, selected, self.rules)
        try:
            table = csv.read_csv(BufferReader(sample), read, parse, convert)
        except ArrowInvalid:
            return 1.0
        needed = (
            column.nbytes if is_text(cell_type(column)) else NUMBER_BYTES * len(column)
            for column in table.columns
        )
        return sum(needed) / len(sample)

    def _read_header(self, file: io.BufferedReader, config: CsvFormat) -> bytes:
        """Read and return the header, without a byte order mark; find the separator."""
        if self.encoding != "utf-8" and config.encoding is None:
            reason = "the file begins with its byte order mark"
            self._add_choice("data.encoding", self.encoding, reason)
        header, declared = self._read_record(file).removeprefix(codecs.BOM_UTF8), None
        if match := re.fullmatch(rb'"?sep=([^"])"?', header.rstrip(b"\r\n")):
            declared, header = match[1].decode(), self._read_record(file)
            self._add_choice("data.separator", declared, "set by its first line")
        if b"\0" in header:
            problem = "holds NUL bytes; it may be UTF-16 without a byte order mark:"
            raise DataError(f"{self.path}: line 1 {problem} data.encoding=utf-16-le")
        self.separator, count = _most_frequent(header.decode())
        if configured := sign_of(config.separator) or declared:
            self.separator = configured
        elif self.separator != ",":
            self._add_choice("data.separator", self.separator, f"the header has {count}")
        return header

    def _scan_rows(self, file: io.BufferedReader, finds_codes: bool) -> None:
        """Count lines and quotes of the rows; find out whether a cell may be a code."""
        separator, most_bytes = self.separator.encode(), self.config.most_cell_bytes or math.inf
        cell_bytes, tail, part = 0, b"\n", b"\n"
        while following := file.read(SCAN_BYTES):
            part = following
            self.size += len(part)
            self._check_size(self.size)
            # bytes since a line break, or since a separator in a line longer than a part
            end = -1 if b"\n" in part else part.rfind(separator)
            cell_bytes = 0 if b"\n" in part else len(part) - 1 - end + cell_bytes * (end < 0)
            line = f"line {self.first_line + self.lines:,}"
            if cell_bytes > MAX_ROW_BYTES:
                problem = "is longer than 2 GB, the most that can be read"
                raise DataError(f"{self.path}: {line} {problem}")
            if cell_bytes > most_bytes and finds_codes:  # data=text cuts its texts
                raise long_cell_error(self.path, line, self.config)
            self.lines += part.count(b"\n")
            self.quotes += part.count(b'"') if b'"' in part else 0  # `in` is faster
            if finds_codes and not self.has_codes:
                self.has_codes = _holds_code(tail + part, self.separator)
            tail = part[-MAX_CODE_CHARS:]
        self.lines += part[-1:] != b"\n"  # a last line without a line break
        self.has_codes |= finds_codes and _holds_code(tail + b"\n", self.separator)

    def _split(self, record: bytes) -> list[str]:
        from pyarrow import BufferReader, csv

        if not record.strip():
            return []
        parse = csv.ParseOptions(delimiter=self.separator, newlines_in_values=True)
        read = csv.ReadOptions(block_size=len(record) + 2)
        names = csv.read_csv(BufferReader(record + b"\n"), read, parse).column_names
        return [name.strip() for name in names]

    def _read_record(self, file: io.BufferedReader) -> bytes:
        """Read the next record: a line, or several if a quoted cell contains line breaks."""
        lines, quotes = [self._read_line(file)], 0
        while (quotes := quotes + lines[-1].count(b'"')) % 2:
            lines.append(self._read_line(file))
            if not lines[-1]:
                raise DataError(f"{self.path}: unclosed quote in the header")
        self.first_line += len(lines)
        return b"".join(lines)

    def _read_line(self, file: io.BufferedReader) -> bytes:
        line = file.readline(HEADER_BYTES)
        self.size += len(line)
        self._check_size(self.size)
        if len(line) == HEADER_BYTES:
            problem = f"line 1 has {HEADER_BYTES >> 20} MiB or more, and must name the columns"
            raise DataError(f"data.path: {self.path}: {problem}")
        return line

    def _add_choice(self, key: str, sign: str, reason: str) -> None:
        self.choices = (*self.choices, Choice(key, sign_word(sign), reason))


def _name_columns(names: list[str], first_cells: list[str]) -> tuple[list[str], list[str]]:
    """Return the names of all columns, and of those that only separators at line ends make.

    The header, the rows, or both may end with separators.
    """
    named = len(names)
    while named and not names[named - 1]:
        named -= 1
    cells = len(first_cells) or len(names)
    trailing = range(named, max(named, cells)) if any(names) else range(0)
    if len(trailing) == 1 and cells == len(names):  # its cells may be row numbers
        return names, []
    if named > cells or any(first_cells[named:]):
        return names, []
    unnamed = [f"\0{place}" for place in trailing]
    return [*names[:named], *unnamed], unnamed


@cache
def _byte_set(chars: str) -> np.ndarray:
    """Return a mask of the 256 bytes: those of `chars`."""
    mask = np.zeros(256, bool)
    mask[[*chars.encode()]] = True
    return mask


def _holds_code(text: bytes, separator: str) -> bool:
    """Whether a cell is a whole number with leading zeros, or hexadecimal."""
    chars = np.frombuffer(text, np.uint8)
    starts = chars[:-2] - POINT > NINE - POINT  # wraps around: neither a digit nor a point …
    starts &= chars[1:-1] == ZERO  # … before a zero …
    starts &= chars[2:] > POINT  # … before what may be a digit
    places = np.flatnonzero(starts)
    if not len(places):
        return False
    is_edge, is_digit = _byte_set('\n\r" \t' + separator), _byte_set("0123456789")
    before = chars[places]
    is_sign = (before == ord("+")) | (before == ord("-"))
    before = np.where(is_sign, chars[np.maximum(places - 1, 0)], before)
    ends = places[is_edge[before]] + 2
    if ((chars[ends] | ord(" ")) == ord("x")).any():  # 0x or 0X
        return True
    while len(ends := ends[is_digit[chars[ends]]]):
        ends = ends[ends + 1 < len(chars)] + 1
        if is_edge[chars[ends]].any():
            return True
    return False


def _most_frequent(header: str) -> tuple[str, int]:
    text = re.sub('"[^"]*"', "", header)
    separator = max(SEPARATORS, key=text.count)
    return separator, text.count(separator)


def _encoding(path: Path) -> str:
    with _decompress(path) as stream:
        return "utf-16" if stream.read(2) in UTF16_BOMS else "utf-8"


def _decompress(path: Path) -> Any:
    import pyarrow

    return pyarrow.input_stream(str(path), _codec(path))


def _codec(path: Path) -> str | None:
    """Return the codec of a compressed file, None for other files."""
    with path.open("rb") as file:
        start = file.read(4)
    return next((name for magic, name in CODEC_BY_MAGIC.items() if start.startswith(magic)), None)


def _choose_fallback_encoding(path: Path, encoding: str | None) -> Choice:
    """Fall back to cp1252 if it fits and no encoding is configured; DataError otherwise."""
    line = _undecodable_line(path, tried := encoding or _encoding(path))
    is_mixed = tried == "utf-8" and _is_mostly_utf8(path)
    if encoding is None and tried == "utf-8" and not is_mixed:
        if not _undecodable_line(path, FALLBACK_ENCODING):
            fix = "set data.encoding=… if letters look wrong"
            reason = f"{path} is not UTF-8 from line {line}; {fix}"
            return notice("data.encoding", FALLBACK_ENCODING, reason)
    others = [e for e in ENCODINGS if e not in (tried, "utf-8" if encoding is None else "")]
    fitting = [other for other in others if not _undecodable_line(path, other)]
    fix = "correct it, as other lines are" if is_mixed else "save it as UTF-8"
    if fitting and not is_mixed:
        best = max(fitting, key=partial(_count_letters, path))
        fix = f"set its encoding, e.g. data.encoding={best}"
    raise DataError(f"{path}: line {line} is not {tried.upper()} text; {fix}")


def _is_mostly_utf8(path: Path) -> bool:
    """Whether letters beyond ASCII are UTF-8 in some lines of a file, and not in others.

    In text of one byte per letter, a few pairs of letters look like UTF-8 by chance.
    """
    letters = others = 0
    with _decompress(path) as stream:
        while part := stream.read(BLOCK_BYTES):
            text = part.decode("utf-8", "surrogateescape")
            letters += len(re.findall(r"[\x80-\ud7ff\ue000-\U0010ffff]", text))
            others += len(re.findall(r"[\udc80-\udcff]", text))
    return letters > 0.1 * others


def _count_letters(path: Path, encoding: str) -> int:
    """Return how many letters beyond ASCII are lower-case in an encoding, minus the others."""
    with _decompress(path) as stream:
        text = stream.read(BLOCK_BYTES).decode(encoding, "replace")
    beyond = [letter for letter in text if not letter.isascii()]
    return sum(1 if letter.islower() else -1 for letter in beyond)


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


def _read_parquet(
    path: Path, select: Select, rules: Rules, config: CsvFormat, as_csv: Tabular | None
) -> TableContent:
    """Read columns of a parquet file; DataError if they do not fit into memory."""
    import pyarrow
    from pyarrow import parquet

    fix = "write fewer rows or columns"
    try:
        with parquet.ParquetFile(path) as file:
            schema, rows = file.schema_arrow, file.metadata.num_rows
        selected = _select_readable(path, select, schema, rows, fix, config)
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
    return _as_content(columns, len(table), rules, path, as_csv)


def _as_content(
    columns: dict[str, Any], rows: int, rules: Rules, path: Path, as_csv: Tabular | None = None
) -> TableContent:
    """Return the columns; numbers that are texts are read as those of a csv."""
    formats, choices = convert_numbers(columns, rules, path, as_csv, ",")
    return TableContent(columns, "row", np.arange(1, rows + 1), {}, choices, formats)


def _select_readable(
    path: Path, select: Select, schema: Any, rows: int, fix: str, config: CsvFormat
) -> list[str]:
    """Return the columns to read; an error if they are too many, or do not fit into memory."""
    check_columns(path, len(schema.names), config.most_columns)
    unreadable = {field.name: field.type for field in schema if not _is_readable(field.type)}
    selected = select(schema.names, unreadable)
    what = f"{rows:,} rows of {count_noun(len(selected), 'column')}"
    check_memory(path, NUMBER_BYTES * rows * len(selected), what, fix)
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
