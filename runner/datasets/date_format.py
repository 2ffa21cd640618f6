"""Formats of dates in texts: ISO 8601, formats that are detected, and those worth declaring."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from heapq import nsmallest
from zlib import crc32

import numpy as np

ISO_DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
YEAR = re.compile(r"(?<!\d)[12]\d{3}(?!\d)", re.ASCII)
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
MAX_DATE_CHARS = 40
OTHER_DAYS = (
    *("%Y-%m-%d", *(form.replace("Y", "y") for form in DATE_FORMATS)),
    *("%d/%b/%Y", "%Y-%m", "%m/%Y"),
)  # those of ISO are read whatever the format
OTHER_TIMES = (
    *("%Y-%m-%d %H:%M:%S UTC", "%a %b %d %H:%M:%S %Y", "%a, %d %b %Y %H:%M:%S %z"),
    *("%d/%b/%Y:%H:%M:%S %z", "%H:%M", "%H:%M:%S"),
)
"""Formats that only a declaration reads: two digits for a year, say, may be those of another."""
MONTHS = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
LIKE_A_DATE = re.compile(
    r"\d{4}[-/.]\d|\d{1,2}[-/.]\d{1,2}[-/.]\d\d|\d:\d\d|\d/\d{4}"
    rf"|\d.{{0,2}}\b(?:{MONTHS})|(?:{MONTHS})[a-z]*\W+\d",
    re.I,
)
CLOCK = re.compile(r"(?<!\d)\d{1,2}:\d\d")
ZONE = re.compile(r"(?<=\d)\s*[+-]\d\d:?\d\d$|(?<=\d)Z$")


def parse_time(word: str, form: str = "") -> np.datetime64:
    """Parse ISO 8601 or the strptime format `form`, converted to UTC; NaT if neither fits."""
    word, nat = word.strip(), np.datetime64("NaT", "us")
    iso = ISO_DATE.match(word)
    if not iso and not form:
        return nat
    try:
        time = datetime.strptime(word, form) if form else datetime.fromisoformat(word)
    except ValueError:
        if not (form and iso):
            return nat
        return parse_time(word)
    return np.datetime64(time.astimezone(UTC).replace(tzinfo=None) if time.tzinfo else time, "us")


def has_zone(word: str) -> bool | None:
    """Whether a time names its time zone; None for a date without a clock."""
    return bool(ZONE.search(word.strip())) if CLOCK.search(word) else None


def detect_date_form(words: Sequence[str], counts: np.ndarray) -> tuple[str, str]:
    """Return the strptime format that parses most cells, and another that parses as many.

    `counts` are the cells per distinct word. "" stands for ISO 8601, or for no second format: one
    counts only if it parses a text to another date.
    """
    sample = _sample(w for w in words if YEAR.search(w) and not ISO_DATE.match(w))
    fits = _count_fits(sample, _with_clocks(DATE_FORMATS, sample))
    candidates = [form for form, count in fits.items() if count and 2 * count >= max(fits.values())]
    if not candidates:
        return "", ""
    parsed = {form: _times(words, form) for form in ("", *candidates)}
    cells = {form: int(counts[~np.isnat(times)].sum()) for form, times in parsed.items()}
    best, *tied = [form for form in parsed if cells[form] == max(cells.values())]
    other = (f for f in tied if not np.array_equal(parsed[f], parsed[best], equal_nan=True))
    return best, next(other, "")


def guess_form(words: Sequence[str]) -> str:
    """Return a common strptime format that parses most texts, of those not detected; "": none."""
    sample = _sample(word.strip() for word in words if LIKE_A_DATE.search(word[:MAX_DATE_CHARS]))
    fits = _count_fits(sample, [*_with_clocks(OTHER_DAYS, sample), *OTHER_TIMES])
    best = max(fits, key=fits.__getitem__)
    return best if sample and 2 * fits[best] >= len(sample) else ""


def describe_form(form: str) -> str:
    """Return the name of a date format in messages, such as `day/month/year`."""
    names = (name for day_form, name in DATE_FORMATS.items() if form.startswith(day_form))
    return next(names, form)


def _with_clocks(day_forms: Iterable[str], sample: Sequence[str]) -> list[str]:
    clock_forms = TIME_FORMATS[1:] if any(":" in word for word in sample) else TIME_FORMATS[:1]
    return [day_form + clock_form for day_form in day_forms for clock_form in clock_forms]


def _count_fits(sample: Sequence[str], forms: Iterable[str]) -> dict[str, int]:
    """Return how many of the texts each format parses."""
    return {form: int((~np.isnat(_times(sample, form))).sum()) for form in forms}


def _sample(words: Iterator[str]) -> list[str]:
    """Return FORMAT_SAMPLE of the texts, which do not depend on their order."""
    return nsmallest(FORMAT_SAMPLE, words, key=lambda word: (crc32(word.encode()), word))


def _times(words: Sequence[str], form: str) -> np.ndarray:
    return np.array([parse_time(word, form) for word in words], "M8[us]")
