"""Parsing of table columns as numbers, times or texts, with missing and bad cells."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from functools import partial
from typing import Any

import numpy as np

from runner.errors import DataError

MISSING_WORDS = {"", "na", "n/a", "nan", "none", "null"}  # how tables write an unknown value
FLOAT32_MAX = float(np.finfo(np.float32).max)  # models compute in float32
MAX_CELL_CHARS = 40  # characters of a cell, in a message
NUMERIC_TYPES = re.compile("u?int|float|half|double|decimal|bool")  # types of arrow
TICKS_PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}  # of a second
ID_NAME = re.compile(r"(?i:(^|[\W_])(u?u?id|guid|key)$)|[a-z](Id|ID|Key)$")  # customer_id, rowKey
ID_ROWS = 50  # fewer may all differ by chance
ID_SHARE = 0.99  # share of distinct cells in an id column: rows may be duplicates
ID_SAMPLE = 1_000  # cells looked at first: a column is no id …
ID_SAMPLE_SHARE = 0.9  # … if a smaller share of these is distinct
MIN_NUMBERS = 10
MAX_UNPARSED = 0.01
"""Share of a column's cells that may fail to parse as numbers (or dates) before it is read as
texts: typos and words for missing values are that rare, a category worth an input is not."""

ISO_DATE = re.compile(r"\d{4}-\d\d-\d\d")
YEAR = re.compile(r"(?<!\d)[12]\d{3}(?!\d)")
DATE_FORMATS = {  # strptime format: name in messages; of two that fit the first is used
    "%d/%m/%Y": "day/month/year",
    "%m/%d/%Y": "month/day/year",
    "%d.%m.%Y": "day.month.year",
    "%d-%m-%Y": "day-month-year",
    "%m-%d-%Y": "month-day-year",
    "%Y/%m/%d": "year/month/day",
    "%Y-%m-%d": "year-month-day",
    "%b %d, %Y": "Jan 5, 2020",
    "%B %d, %Y": "January 5, 2020",
    "%d %b %Y": "5 Jan 2020",
    "%d %B %Y": "5 January 2020",
    "%d-%b-%Y": "5-Jan-2020",
}
TIME_FORMATS = ("", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M:%S %p")
DATE_EXAMPLES = "2024-05-31, 31/05/2024, 05/31/2024, 31.05.2024, 2024/05/31 and May 31, 2024"
FORMAT_SAMPLE = 100  # texts from which candidate formats are chosen


class CellKind(Enum):
    """The type that a column is parsed as; values end messages: `12a is not a finite number`."""

    any = "anything"  # numbers or dates, if nearly all cells are
    numbers = "a finite number"
    times = "a date"
    texts = "a text"


TYPE_NAMES = {CellKind.numbers: "number", CellKind.times: "date"}  # as data.types names it


@dataclass(frozen=True)
class TextColumn:
    """A text column: its distinct `words`, and their index for each row (`codes`)."""

    words: tuple[str, ...]
    codes: np.ndarray


ColumnValues = np.ndarray | TextColumn
"""A column: float64 numbers that float32 can hold, datetime64[us], or texts.

A missing value is NaN, NaT or ""."""


@dataclass(frozen=True)
class ParsedColumn:
    """A parsed column, with its bad and unparsed cells by row."""

    values: ColumnValues
    bad: dict[int, str] = field(default_factory=dict)  # problem of the cell
    unparsed: dict[int, str] = field(default_factory=dict)  # a text that is read as missing
    form: str = ""  # of dates that are not ISO 8601, for strptime
    note: str = ""  # why numbers or dates were read as texts, or which format is assumed
    remedy: tuple[str, str] = ("", "")  # the type to declare, and its effect on the cells

    @property
    def kind(self) -> CellKind:
        """The type of the values."""
        if isinstance(self.values, TextColumn):
            return CellKind.texts
        return CellKind.numbers if self.values.dtype.kind == "f" else CellKind.times

    def missing(self) -> dict[int, str]:
        """Return the problems of missing and unparsed cells, by row."""
        rows = np.flatnonzero(missing_cells(self.values)).tolist()
        wrong = {row: _describe_wrong_kind(text, self.kind) for row, text in self.unparsed.items()}
        return dict.fromkeys(rows, "the value is missing") | wrong


def parse_column(
    column: Any,
    kind: CellKind,
    *,
    max_unparsed: float = MAX_UNPARSED,
    bad_share: float = 0.0,
    missing: Sequence[str] = (),
    marker: bool = False,
    form: str | None = None,
) -> ParsedColumn:
    """Parse an arrow column as `kind`; with CellKind.any as the type of nearly all of its cells.

    Texts among numbers or dates are missing values if they are in `missing` or at most the share
    `max_unparsed` of the cells. If there are more they are bad cells, and with CellKind.any the
    column is read as texts unless they are at most `bad_share`. With `marker`, one word beside
    numbers, such as "unknown", counts as missing up to half of the cells. Dates are ISO 8601 or
    have the strptime format `form`; None detects it, and with CellKind.any ambiguous dates are read
    as texts.
    Words such as NA are missing among numbers and dates only: elsewhere they may be a category.
    Raises DataError with the arrow type of a column that cannot be read as any of these.
    """
    import pyarrow
    from pyarrow import types

    if types.is_dictionary(column.type) and not is_text(column.type.value_type):
        column = column.cast(column.type.value_type)
    values = None if kind is CellKind.texts else _typed_values(column, kind)
    if values is not None:
        bad = {i: _describe_bad_number(f"{values[i]:g}", values[i]) for i in _not_float32(values)}
        return ParsedColumn(values, bad)
    try:
        words, codes = _encode_texts(column)
    except (pyarrow.ArrowException, UnicodeDecodeError):
        raise DataError(str(column.type)) from None
    note, remedy = "", ("", "")
    empty = np.array([word.strip().lower() in MISSING_WORDS or word in missing for word in words])
    present = len(codes) - int(empty[codes].sum())
    kinds: dict[CellKind, tuple[CellKind, ...]] = {
        CellKind.any: (CellKind.numbers, CellKind.times),
        CellKind.texts: (),
    }
    for candidate in kinds.get(kind, (kind,)):
        parse, used_form, other_form = _choose_parser(candidate, form, words, codes)
        parsed = np.array([parse(word) for word in words])
        unparsed = np.flatnonzero((missing_cells(parsed) & ~empty)[codes])
        if marker and kind is CellKind.any and _is_marker(words, codes[unparsed], present):
            max_unparsed = 1.0
        share = max(max_unparsed * present, bad_share * len(codes))
        fits = len(unparsed) <= share and len(unparsed) < present
        if other_form and (fits or kind is candidate):
            note = f"its dates fit {describe_form(used_form)} and {describe_form(other_form)}"
            remedy, fits = ("date", f"they are {describe_form(used_form)}"), False
        if kind is candidate or fits:
            texts = {row: words[codes[row]] for row in unparsed.tolist()}
            values = parsed[codes]
            bad = {
                i: _describe_bad_number(words[codes[i]], values[i]) for i in _not_float32(values)
            }
            if len(unparsed) > max_unparsed * present:
                wrong = {row: _describe_wrong_kind(text, candidate) for row, text in texts.items()}
                bad, texts = wrong | bad, {}
            return ParsedColumn(values, bad, texts, used_form, note)
        if 2 * len(unparsed) < present and not other_form:
            example = repr(words[codes[unparsed[0]]][:MAX_CELL_CHARS])
            cells = f"{len(unparsed):,} of {present:,} cells, such as {example}"
            note = f"{cells}, are not {candidate.value}"
            remedy = (TYPE_NAMES[candidate], "those are missing values")
    stripped = tuple(word if word.strip() else "" for word in words)
    return ParsedColumn(TextColumn(stripped, codes), note=note, remedy=remedy)


def _choose_parser(
    kind: CellKind, form: str | None, words: list[str], codes: np.ndarray
) -> tuple[Callable[[str], Any], str, str]:
    """Return a parser for `kind`, the date format it uses, and another format that fits."""
    if kind is CellKind.numbers:
        return parse_number, "", ""
    other_form = ""
    if form is None:
        form, other_form = detect_date_form(words, np.bincount(codes, minlength=len(words)))
    return partial(parse_time, form=form), form, other_form if form else ""


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
    """Return why an arrow column is a row identifier, or "" if it is not."""
    from pyarrow import types

    has_id_name, value_type = ID_NAME.search(name), getattr(column.type, "value_type", column.type)
    if types.is_integer(column.type):
        steps = np.diff(column.to_numpy()) if not column.null_count else np.zeros(0)
        if len(steps) + 1 >= ID_ROWS and steps[0] and (steps == steps[0]).all():
            return "it counts the rows"
        distinctness = has_id_name and _describe_distinct(column.drop_null())
        return f"its integers are {distinctness}, and its name suggests ids" if distinctness else ""
    if not is_text(value_type):
        return ""
    words = _without_missing(column.slice(0, ID_SAMPLE).cast(value_type)).to_pylist()
    if len({*words}) < ID_SAMPLE_SHARE * len(words) or not words:
        return ""
    form, _ = detect_date_form(words, np.ones(len(words)))
    for parse in (parse_number, partial(parse_time, form=form)):
        if not has_id_name:
            unparsed = missing_cells(np.array([parse(word) for word in words])).sum()
            if 2 * unparsed < len(words):
                return ""
    distinctness = _describe_distinct(_without_missing(column.cast(value_type)))
    return f"its texts are {distinctness}" if distinctness else ""


def _without_missing(texts: Any) -> Any:
    """Return the texts of an arrow column without missing values."""
    import pyarrow
    from pyarrow import compute

    words = compute.utf8_lower(compute.utf8_trim_whitespace(texts))
    missing = compute.is_in(words, pyarrow.array(sorted(MISSING_WORDS), words.type))
    return texts.filter(compute.invert(missing)).drop_null()


def _describe_distinct(cells: Any) -> str:
    """Return "all different" or "nearly all different" if the cells are, else ""."""
    from pyarrow import compute

    distinct = compute.count_distinct(cells).as_py()
    if len(cells) < ID_ROWS or distinct < ID_SHARE * len(cells):
        return ""
    return "all different" if distinct == len(cells) else "nearly all different"


def missing_cells(values: ColumnValues) -> np.ndarray:
    """Return a boolean mask of the rows without a value."""
    if isinstance(values, TextColumn):
        empty = np.array([not word for word in values.words])
        return np.asarray(empty[values.codes])
    missing: np.ndarray = np.isnat(values) if values.dtype.kind == "M" else np.isnan(values)
    return missing


def select_rows(values: ColumnValues, rows: np.ndarray | slice) -> ColumnValues:
    """Return the column at `rows`; texts keep only the words that occur, sorted."""
    if isinstance(values, np.ndarray):
        return values[rows]
    codes = values.codes[rows]
    words = sorted({values.words[code] for code in np.unique(codes).tolist()})
    code_of = {word: code for code, word in enumerate(words)}
    return TextColumn(tuple(words), np.array([code_of.get(w, 0) for w in values.words])[codes])


def parse_number(word: str) -> float:
    """Parse a number; NaN if `word` is not one."""
    try:
        return float(word)
    except ValueError:
        return float("nan")


def parse_time(word: str, form: str = "") -> np.datetime64:
    """Parse ISO 8601 or the strptime format `form`, converted to UTC; NaT if neither fits."""
    word, nat = word.strip(), np.datetime64("NaT", "us")
    iso = ISO_DATE.match(word)
    if not iso and not form:
        return nat
    try:
        time = datetime.fromisoformat(word) if iso else datetime.strptime(word, form)
    except ValueError:
        return nat
    return np.datetime64(time.astimezone(UTC).replace(tzinfo=None) if time.tzinfo else time, "us")


def detect_date_form(words: Sequence[str], counts: np.ndarray) -> tuple[str, str]:
    """Return the strptime format that parses most cells, and another that parses as many.

    `counts` are the cells per distinct word. "" stands for ISO 8601, or for no second format: one
    counts only if it parses a text to another date.
    """
    sample = [w for w in words if YEAR.search(w) and not ISO_DATE.match(w)][:FORMAT_SAMPLE]
    if not sample:
        return "", ""
    clock_forms = TIME_FORMATS[1:] if ":" in sample[0] else TIME_FORMATS[:1]
    forms = [day_form + clock_form for day_form in DATE_FORMATS for clock_form in clock_forms]
    fits = {form: int((~np.isnat(_times(sample, form))).sum()) for form in forms}
    candidates = [form for form in forms if fits[form] and 2 * fits[form] >= max(fits.values())]
    parsed = {form: _times(words, form) for form in ("", *candidates)}
    cells = {form: int(counts[~np.isnat(times)].sum()) for form, times in parsed.items()}
    best, *tied = [form for form in parsed if cells[form] == max(cells.values())]
    other = (f for f in tied if not np.array_equal(parsed[f], parsed[best], equal_nan=True))
    return best, next(other, "")


def describe_form(form: str) -> str:
    """Return the name of a date format in messages, such as `day/month/year`."""
    return next(name for day_form, name in DATE_FORMATS.items() if form.startswith(day_form))


def _times(words: Sequence[str], form: str) -> np.ndarray:
    return np.array([parse_time(word, form) for word in words], "M8[us]")


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


def _not_float32(numbers: np.ndarray) -> list[int]:
    if numbers.dtype.kind == "M":
        return []
    # NaN is missing; reductions avoid a copy, which costs as much as reading the column
    if np.fmax.reduce(numbers, initial=0.0) <= FLOAT32_MAX >= -np.fmin.reduce(numbers, initial=0.0):
        return []
    rows: list[int] = np.flatnonzero(np.abs(numbers) > FLOAT32_MAX).tolist()
    return rows


def _describe_bad_number(word: str, value: float) -> str:
    what = "too large for float32" if np.isfinite(value) else "not a finite number"
    return f"{word[:MAX_CELL_CHARS]} is {what}"


def _describe_wrong_kind(word: str, kind: CellKind) -> str:
    return f"{word[:MAX_CELL_CHARS]} is not {kind.value}"


def _is_marker(words: Sequence[str], codes: np.ndarray, present: int) -> bool:
    """Whether these cells all hold one word without digits, and are under half of those present.

    Beside few distinct numbers, such as the codes 1, 2 and c, the word is a category.
    """
    marker_words = {words[code].strip().lower() for code in np.unique(codes)}
    has_few_numbers = len(words) < MIN_NUMBERS or 2 * len(codes) >= present
    return not has_few_numbers and len(marker_words) == 1 and not re.search(r"\d", *marker_words)
