"""Parsing of table columns as numbers, times or texts, with missing and bad cells.

Text is read first: a column is numbers or dates if nearly all of its cells are, in a strict
notation. Other notations are read only where the config declares the column's type.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from runner.core.errors import DataError
from runner.core.interfaces.batch import NumberFormat
from runner.datasets.date_format import (
    describe_form,
    detect_date_form,
    guess_form,
    has_zone,
    parse_time,
)

MISSING_WORDS = {"", "na", "n/a", "nan", "none", "null"}  # how tables write an unknown value
FLOAT32_MAX = float(np.finfo(np.float32).max)  # models compute in float32
MAX_WHOLE = 2**53  # float64 holds all whole numbers up to it
MAX_CELL_CHARS = 40  # characters of a cell, in a message
NUMERIC_TYPES = re.compile("u?int|float|half|double|decimal|bool")  # types of arrow
TICKS_PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}  # of a second
ID_NAME = re.compile(r"(?i:(^|[\W_])(u?u?id|guid|key)$)|[a-z](Id|ID|Key)$")  # customer_id, rowKey
ID_ROWS = 50  # fewer may all differ by chance
ID_SHARE = 0.99  # share of distinct cells in an id column: rows may be duplicates
MOST_BAD = 0.1  # default of data.most_bad

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?inf(inity)?", re.ASCII | re.I)
LEADING_ZEROS = re.compile(r"[+-]?0\d+", re.ASCII)  # of a code, such as a ZIP code
WHOLE = re.compile(r"([+-]?\d{16,})(\.0*)?", re.ASCII)  # may be beyond MAX_WHOLE
BRACKETS = re.compile(r"(\D{0,3})\((.+)\)")  # a negative number, in accounting
NOTATION = re.compile(  # €-1,234.5 | -1.5 kg | USD 12 | 12.5 m²
    r"(?P<sign>[+-]?)\s*(?P<prefix>[A-Z]{3}(?=\s)|[A-Z]{0,3}[$€£¥₹]|)\s*(?P<inner>[+-]?)\s*"
    r"(?P<number>\d+([.,'’ \u00a0\u202f]\d+)*([eE][+-]?\d+)?|[.,]\d+)"
    r"\s*(?P<suffix>[^\d\s.,;:()_/+-][^\s,;:()_]{0,11}( [^\W\d_]{1,8})?|)"
)
"""A number with a currency or per-cent sign, or a unit."""


class CellKind(Enum):
    """The type that a column is parsed as; values end messages: `12a is not a finite number`."""

    any = "anything"  # numbers or dates, if nearly all cells are
    numbers = "a finite number"
    times = "a date"
    texts = "a text"


@dataclass(frozen=True)
class TextColumn:
    """A text column: its distinct `words`, and their index for each row (`codes`)."""

    words: tuple[str, ...]
    codes: np.ndarray


Remedy = tuple[str, str]
"""A key and its value, by which a column is read otherwise; empty: none."""
ColumnValues = np.ndarray | TextColumn
"""A column: float64 numbers that float32 can hold, datetime64[us], or texts.

A missing value is NaN, NaT or ""."""


@dataclass(frozen=True)
class CellRules:
    """How the cells of a column are read; the defaults are those of a column without a type."""

    kind: CellKind = CellKind.any
    most_bad: float = MOST_BAD  # share of its cells that may have another type, with CellKind.any
    declared: bool = False  # by data.types: texts among numbers or dates are missing values
    missing: Sequence[str] = ()  # texts that are missing values, too
    form: str | None = None  # of dates, for strptime; "": ISO 8601; None: detected
    format: NumberFormat | None = None  # of its numbers; None: detected
    is_target: bool = False  # a label, whose text stays as it is written


@dataclass(frozen=True)
class ParsedColumn:
    """A parsed column, with its bad and unparsed cells by row."""

    values: ColumnValues
    bad: dict[int, str] = field(default_factory=dict)  # problem of the cell
    wrong: int = 0  # how many of the bad ones have another type
    unparsed: dict[int, str] = field(default_factory=dict)  # a text that is read as missing
    form: str = ""  # of dates that are not ISO 8601, for strptime
    note: str = ""  # what the cells look like, and were not read as; or what was changed
    remedy: Remedy = ("", "")  # that changes it

    @property
    def kind(self) -> CellKind:
        """The type of the values."""
        if isinstance(self.values, TextColumn):
            return CellKind.texts
        return CellKind.numbers if self.values.dtype.kind == "f" else CellKind.times

    def missing(self) -> dict[int, str]:
        """Return the problems of missing and unparsed cells, by row; not of those in `bad`."""
        rows: list[int] = np.flatnonzero(missing_cells(self.values)).tolist()
        gaps = {row: "the value is missing" for row in rows if row not in self.bad}
        wrong = {row: _describe_wrong_kind(text, self.kind) for row, text in self.unparsed.items()}
        return gaps | wrong


def parse_column(column: Any, rules: CellRules = CellRules()) -> ParsedColumn:
    """Parse an arrow column by `rules`; with CellKind.any as the type of nearly all of its cells.

    With CellKind.any, cells of another type are bad cells if their share is at most `most_bad`,
    otherwise all are texts. They are texts, too, if dates fit two formats, or if two whole numbers
    have leading zeros or are beyond 2^53 (of a target: one). Words such as NA are missing among
    numbers and dates only: elsewhere they may be a category.
    Raises DataError with the arrow type of a column that cannot be read as any of these.
    """
    import pyarrow
    from pyarrow import types

    kind = rules.kind
    if types.is_dictionary(column.type) and not is_text(column.type.value_type):
        column = column.cast(column.type.value_type)
    values = None if kind is CellKind.texts else _typed_values(column, kind)
    is_exact = types.is_integer(column.type) or types.is_decimal(column.type)
    if values is not None and kind is CellKind.any and is_exact and largest(values) >= MAX_WHOLE:
        values = None  # float64 cannot hold it
    if values is not None:
        bad = {i: _describe_bad_number(f"{values[i]:g}", values[i]) for i in _not_float32(values)}
        return ParsedColumn(values, bad)
    try:
        words, codes = _encode_texts(column)
    except (pyarrow.ArrowException, UnicodeDecodeError):
        raise DataError(str(column.type)) from None
    cells = _TextCells(words, codes, rules)
    if kind is not CellKind.any:
        if kind is CellKind.texts:
            return _as_texts(cells)
        return _as_column(cells, kind, _parse_words(cells, kind))
    exceptions = _find_codes(cells)
    if len(exceptions) > 1 or (exceptions and rules.is_target):
        is_number = ~np.isnan([parse_number(word) for word in words])
        if 2 * cells.count(is_number) >= cells.present:
            return _as_texts(cells, _describe_codes(cells, exceptions), ("data.types", "number"))
        return _as_texts(cells, *_describe_unread(cells))
    for candidate in (CellKind.numbers, CellKind.times):
        parsed = _parse_words(cells, candidate, exceptions)
        if cells.count(parsed.wrong) <= rules.most_bad * cells.present < cells.present:
            if parsed.is_ambiguous:
                return _as_texts(cells, parsed.note, parsed.remedy)
            return _as_column(cells, candidate, parsed)
    return _as_texts(cells, *_describe_unread(cells))


def _typed_values(column: Any, kind: CellKind) -> np.ndarray | None:
    """Return the values of an arrow column of numbers, dates or durations (s), else None."""
    import pyarrow
    from pyarrow import types

    arrow = column.type
    if types.is_date(arrow) or types.is_timestamp(arrow):
        if kind is CellKind.numbers:
            return None
        times: np.ndarray = column.cast(pyarrow.timestamp("us"), safe=False).to_numpy()
        return times
    per_second = 1.0
    if types.is_time(arrow) or types.is_duration(arrow):
        column = column.cast(pyarrow.int32() if types.is_time32(arrow) else pyarrow.int64())
        per_second = TICKS_PER_SECOND[arrow.unit]
    numeric = NUMERIC_TYPES.match(str(column.type)) and kind is not CellKind.times
    if not numeric or (kind is CellKind.any and types.is_boolean(arrow)):
        return None
    numbers: np.ndarray = column.cast(pyarrow.float64(), safe=False).to_numpy()
    return numbers if per_second == 1.0 else numbers / per_second


def id_reason(name: str, column: Any) -> str:
    """Return why an arrow column is a row identifier: its name *and* its distinct cells; or ""."""
    import pyarrow
    from pyarrow import compute, types

    value_type = cell_type(column)
    if not ID_NAME.search(name) or not (types.is_integer(value_type) or is_text(value_type)):
        return ""
    cells = column.cast(value_type).drop_null()
    if is_text(value_type):
        words = compute.utf8_lower(compute.utf8_trim_whitespace(cells))
        missing = compute.is_in(words, pyarrow.array(sorted(MISSING_WORDS), words.type))
        cells = cells.filter(compute.invert(missing))
    distinct = compute.count_distinct(cells).as_py()
    if len(cells) < ID_ROWS or distinct < ID_SHARE * len(cells):
        return ""
    nearly = "" if distinct == len(cells) else "nearly "
    return f"its cells are {nearly}all different, and its name suggests ids"


def missing_cells(values: ColumnValues) -> np.ndarray:
    """Return a boolean mask of the rows without a value."""
    if isinstance(values, TextColumn):
        return np.asarray(np.array([not word for word in values.words])[values.codes])
    missing: np.ndarray = np.isnat(values) if values.dtype.kind == "M" else np.isnan(values)
    return missing


def select_rows(values: ColumnValues, rows: np.ndarray | slice) -> ColumnValues:
    """Return the column at `rows`; texts keep only the words that occur, sorted."""
    if isinstance(values, np.ndarray):
        return values[rows]
    codes = values.codes[rows]
    present = np.flatnonzero(np.bincount(codes, minlength=len(values.words)))
    words = sorted({values.words[code] for code in present.tolist()})
    code_of = {word: code for code, word in enumerate(words)}
    return TextColumn(tuple(words), np.array([code_of.get(w, 0) for w in values.words])[codes])


def parse_number(word: str) -> float:
    """Parse a number in a strict notation; NaN if `word` is not one."""
    word = word.strip()
    return float(word) if NUMBER.fullmatch(word) else float("nan")


def plain_number(word: str) -> tuple[str, str] | None:
    """Return a number with another notation in Python's, and its unit or currency; else None.

    Brackets and U+2212 are minus signs; decimal and thousands signs stay.
    """
    text = word.strip().replace("\u2212", "-")
    if NUMBER.fullmatch(text):
        return text, ""
    negative = BRACKETS.fullmatch(text)
    match = NOTATION.fullmatch(f"{negative[1]}{negative[2]}" if negative else text)
    if match is None or (match["sign"] and match["inner"]):
        return None
    sign = "-" if negative else match["sign"] or match["inner"]
    if negative and (match["sign"] or match["inner"]):
        return None
    return f"{sign}{match['number']}", f"{match['prefix']}{match['suffix'] or ''}"


def commonest_unit(numbers: Sequence[tuple[str, str] | None], counts: np.ndarray) -> str:
    """Return the unit of most cells, given plain numbers with units, and the cells of each."""
    cells = Counter[str]()
    for number, count in zip(numbers, counts.tolist(), strict=False):
        if number is not None:
            cells[number[1]] += count
    return max(sorted(cells), key=cells.__getitem__, default="")


DATE_PARTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "year": lambda times: times.astype("M8[Y]").astype(int) + 1970,
    "month": lambda times: times.astype("M8[M]").astype(int) % 12 + 1,
    "weekday": lambda times: (times.astype("M8[D]").astype(int) + 3) % 7,  # Monday: 0
    "hour": lambda times: times.astype("M8[h]").astype(int) % 24,
    "days": lambda times: times.astype("M8[D]").astype(int),  # since 1970
}
"""Numeric features of dates, from datetime64 arrays."""
MISSING_FLAG = "missing"  # this part is 1 where the value is missing


def extract_part(values: np.ndarray, part: str) -> np.ndarray:
    """Return `part` of each date, or the numbers unchanged, as float64; NaN if missing."""
    if part == MISSING_FLAG:
        return missing_cells(values).astype(np.float64)
    if part not in DATE_PARTS:
        return values
    numbers: np.ndarray = np.where(np.isnat(values), np.nan, DATE_PARTS[part](values))
    return numbers


def cell_type(column: Any) -> Any:
    """Return the type of an arrow column's cells, dictionary-encoded or not."""
    return getattr(column.type, "value_type", column.type)


def is_text(arrow: Any) -> bool:
    """Whether `arrow` is a string type."""
    from pyarrow import types

    return bool(types.is_string(arrow) or types.is_large_string(arrow))


def _encode_texts(column: Any) -> tuple[list[str], np.ndarray]:
    """Return the distinct texts of a column and the code of each row; null becomes ""."""
    import pyarrow

    if not pyarrow.types.is_dictionary(column.type):
        column = column.cast(pyarrow.string()).dictionary_encode()
    encoded = column.combine_chunks()
    words = [word or "" for word in encoded.dictionary.to_pylist()]
    codes = encoded.indices.fill_null(len(words)).to_numpy(zero_copy_only=False)
    return [*words, ""], codes


def largest(numbers: np.ndarray) -> float:
    """Return the largest absolute value; reductions avoid a copy, as slow as reading the column."""
    if numbers.dtype.kind == "M":
        return 0.0
    high, low = np.fmax.reduce(numbers, initial=0), np.fmin.reduce(numbers, initial=0)
    return max(float(high), -float(low))  # -low overflows for the lowest int64


def _not_float32(numbers: np.ndarray) -> list[int]:
    if largest(numbers) <= FLOAT32_MAX:  # NaN is missing
        return []
    rows: list[int] = np.flatnonzero(np.abs(numbers) > FLOAT32_MAX).tolist()
    return rows


def _describe_bad_number(word: str, value: float) -> str:
    what = "too large for float32" if np.isfinite(value) else "not a finite number"
    return f"{word[:MAX_CELL_CHARS]} is {what}"


def _describe_wrong_kind(word: str, kind: CellKind) -> str:
    return f"{word[:MAX_CELL_CHARS]} is not {kind.value}"


# -- cells as texts --------------------------------------------------------------------------------


@dataclass
class _TextCells:
    """The cells of a column as texts: distinct `words`, and their index for each row."""

    words: list[str]
    codes: np.ndarray
    rules: CellRules

    def __post_init__(self) -> None:
        missing = {*self.rules.missing}
        empty = (w.strip().lower() in MISSING_WORDS or w in missing for w in self.words)
        self.empty = np.array([*empty])
        self.counts = np.bincount(self.codes, minlength=len(self.words)) * ~self.empty
        self.present = int(self.counts.sum())

    def count(self, matches: Sequence[bool] | np.ndarray) -> int:
        """Return the number of cells whose word matches."""
        return int(self.counts[np.asarray(matches, bool)].sum())

    def example(self, matches: Sequence[bool] | np.ndarray) -> str:
        """Return a word that matches; the same in any order of the rows."""
        is_shown = np.asarray(matches, bool) & (self.counts > 0)
        words = [self.words[i] for i in np.flatnonzero(is_shown).tolist()]
        return repr(min(words)[:MAX_CELL_CHARS])


def _as_texts(cells: _TextCells, note: str = "", remedy: Remedy = ("", "")) -> ParsedColumn:
    stripped = tuple(word if word.strip() else "" for word in cells.words)
    return ParsedColumn(TextColumn(stripped, cells.codes), note=note, remedy=remedy)


@dataclass(frozen=True)
class _ParsedWords:
    """The distinct words of a column as numbers or times."""

    values: np.ndarray  # of each word
    wrong: np.ndarray  # whether it is another text
    form: str = ""  # of dates, for strptime
    note: str = ""
    remedy: Remedy = ("", "")
    is_ambiguous: bool = False  # the dates fit two formats
    inexact: str = ""  # the whole number beyond 2^53


def _parse_words(cells: _TextCells, kind: CellKind, exceptions: Sequence[str] = ()) -> _ParsedWords:
    words, rules = cells.words, cells.rules
    form, other_form, inexact, note, remedy = "", "", "", "", ("", "")
    if kind is CellKind.times:
        form = rules.form or ""
        if rules.form is None:
            form, other_form = detect_date_form(words, cells.counts)
        values = np.array([parse_time(word, form) for word in words])
        if other_form:
            note = f"its dates fit {describe_form(form)} and {describe_form(other_form)}"
            other = ("data.date_formats", other_form)
            remedy = other if rules.declared else ("data.types", "date")
        elif zones := _describe_zones(cells, ~np.isnat(values)):
            note, remedy = zones, ("data.types", "text")
    else:
        values = np.array([parse_number(word) for word in words])
        if exceptions and LEADING_ZEROS.fullmatch(exceptions[0]):
            note, remedy = _describe_codes(cells, exceptions), ("data.types", "text")
        if exceptions and abs(int(exceptions[0].partition(".")[0][:20])) > MAX_WHOLE:
            inexact = exceptions[0]
    values[cells.empty] = np.nan if kind is CellKind.numbers else np.datetime64("NaT")
    wrong = missing_cells(values) & ~cells.empty
    return _ParsedWords(values, wrong, form, note, remedy, bool(other_form), inexact)


def _as_column(cells: _TextCells, kind: CellKind, parsed: _ParsedWords) -> ParsedColumn:
    """Return a column of parsed words; others are bad cells, or missing values if declared."""
    words, codes = cells.words, cells.codes
    wrong = {row: words[codes[row]] for row in np.flatnonzero(parsed.wrong[codes]).tolist()}
    values = parsed.values[codes]
    bad = {i: _describe_bad_number(words[codes[i]], values[i]) for i in _not_float32(values)}
    if parsed.inexact:
        rows = np.flatnonzero(np.array([w.strip() == parsed.inexact for w in words])[codes])
        problem = f"{parsed.inexact} is beyond 2^53, the limit of exact numbers"
        bad |= dict.fromkeys(rows.tolist(), problem)
    texts = parsed.form, parsed.note, parsed.remedy
    if cells.rules.declared:
        return ParsedColumn(values, bad, 0, wrong, *texts)
    bad |= {row: _describe_wrong_kind(text, kind) for row, text in wrong.items()}
    return ParsedColumn(values, bad, len(wrong), {}, *texts)


def _describe_zones(cells: _TextCells, is_time: np.ndarray) -> str:
    """Return what is said of times if some name a time zone and some do not."""
    zones = [has_zone(w) if ok else None for w, ok in zip(cells.words, is_time, strict=True)]
    with_zone = [zone is True for zone in zones]
    if False not in zones or not any(with_zone):
        return ""
    count, example = cells.count(with_zone), cells.example(with_zone)
    lacking = cells.example([zone is False for zone in zones])
    note = f"{count:,} of {cells.present:,} times have a time zone, such as {example}"
    return f"{note}; others, such as {lacking}, are taken as UTC"


def _find_codes(cells: _TextCells) -> list[str]:
    """Return the distinct whole numbers with leading zeros, or beyond 2^53.

    Python converts at most 4,300 digits; the first 20 tell.
    """
    words = {word.strip() for word in cells.words}
    return sorted(
        word
        for word in words
        if LEADING_ZEROS.fullmatch(word)
        or ((match := WHOLE.fullmatch(word)) and abs(int(match[1][:20])) > MAX_WHOLE)
    )


def _describe_codes(cells: _TextCells, codes: Sequence[str]) -> str:
    count = cells.count([word.strip() in codes for word in cells.words])
    has_zeros = any(LEADING_ZEROS.fullmatch(code) for code in codes)
    what = "have leading zeros" if has_zeros else "are beyond 2^53"
    examples = ", ".join(repr(word[:MAX_CELL_CHARS]) for word in codes[:2])
    return f"{count:,} of {cells.present:,} cells are whole numbers that {what}, such as {examples}"


def _describe_unread(cells: _TextCells) -> tuple[str, Remedy]:
    """Return what most cells of a text column look like, and the key and value that read them."""
    if not cells.present:
        return "", ("", "")
    numbers = [plain_number(word) for word in cells.words]
    unit = commonest_unit(numbers, cells.counts)
    looks_numeric = [number is not None and number[1] == unit for number in numbers]
    if 2 * cells.count(looks_numeric) >= cells.present:
        unread = np.isnan([parse_number(word) for word in cells.words])
        count, example = cells.count(unread), cells.example(unread)
        note = f"{count:,} of {cells.present:,} cells, such as {example}, are not plain numbers"
        return note, ("data.types", "number")
    if form := guess_form([w for w, n in zip(cells.words, cells.counts, strict=True) if n]):
        fits = ~np.isnat([parse_time(word, form) for word in cells.words])
        if 2 * cells.count(fits) >= cells.present:
            note = f"{cells.count(fits):,} of {cells.present:,} cells look like dates"
            return f"{note}, such as {cells.example(fits)}", ("data.date_formats", form)
    return "", ("", "")
