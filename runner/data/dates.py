"""Dates in texts: ISO 8601, or one other form for a whole column."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np

ISO_DATE = re.compile(r"\d{4}-\d\d-\d\d")
YEAR = re.compile(r"(?<!\d)[12]\d{3}(?!\d)")
DAYS = {  # by how strptime names it, what a message calls it; of two that fit the first is taken
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
CLOCKS = ("", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M:%S %p")
READABLE = "2024-05-31, 31/05/2024, 05/31/2024, 31.05.2024, 2024/05/31 and May 31, 2024"
SAMPLE = 100  # texts that tell which forms a column may have


def parse_time(word: str, form: str = "") -> np.datetime64:
    """The time that a text says as ISO 8601, in UTC, or in that form of strptime; NaT: none."""
    word, none = word.strip(), np.datetime64("NaT", "us")
    iso = ISO_DATE.match(word)
    if not iso and not form:
        return none
    try:
        time = datetime.fromisoformat(word) if iso else datetime.strptime(word, form)
    except ValueError:
        return none
    return np.datetime64(time.astimezone(UTC).replace(tzinfo=None) if time.tzinfo else time, "us")


def date_form(words: Sequence[str], counts: np.ndarray) -> tuple[str, str]:
    """The form that most cells of a column can be read in, and another one that fits as well.

    Of the different `words` there are so many cells. "" is ISO 8601, or no other form: one that
    fits as well counts only where it makes other dates of the texts.
    """
    sample = [word for word in words if YEAR.search(word) and not ISO_DATE.match(word)][:SAMPLE]
    if not sample:
        return "", ""
    clocks = CLOCKS[1:] if ":" in sample[0] else CLOCKS[:1]
    forms = [day + clock for day in DAYS for clock in clocks]
    fits = {form: int((~np.isnat(_parse(sample, form))).sum()) for form in forms}
    likely = [form for form in forms if fits[form] and 2 * fits[form] >= max(fits.values())]
    parsed = {form: _parse(words, form) for form in ("", *likely)}
    cells = {form: int(counts[~np.isnat(times)].sum()) for form, times in parsed.items()}
    best, *tied = [form for form in parsed if cells[form] == max(cells.values())]
    other = (f for f in tied if not np.array_equal(parsed[f], parsed[best], equal_nan=True))
    return best, next(other, "")


def describe_form(form: str) -> str:
    """What a message calls a form: `day/month/year`."""
    return next(name for day, name in DAYS.items() if form.startswith(day))


def _parse(words: Sequence[str], form: str) -> np.ndarray:
    return np.array([parse_time(word, form) for word in words], "M8[us]")
