"""Formats of dates in texts: ISO 8601, formats that are detected, and those worth declaring."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from heapq import nsmallest
from itertools import permutations
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
MONTHS = "jan feb mar apr may jun jul aug sep oct nov dec".split()
WEEKDAYS = "mon tue wed thu fri sat sun".split()
LIKE_A_DATE = re.compile(
    r"\d{4}[-/.]\d|\d{1,2}[-/.]\d{1,2}[-/.]\d\d|\d:\d\d|\d.{0,2}\b(?:MONTH)|(?:MONTH)[a-z]*\W+\d"
    r"|\d{1,2}\.? ?[^\W\d]{3,12} \d{4}".replace("MONTH", "|".join(MONTHS)),
    re.I,
)
CLOCK = re.compile(r"(?<!\d)\d{1,2}:\d\d(?P<seconds>:\d\d)?(?P<fraction>\.\d{1,6})?")
ZONE = re.compile(r"(?<=\d)\s*[+-]\d\d:?\d\d$|(?<=\d)Z$")
DIGITS_OR_LETTERS = re.compile(r"\d+|[^\W\d_]+")
YEAR_ORDERS = {True: ("%m %d", "%d %m"), False: ("%d %m", "%m %d")}  # whether the year is first
PACKED = {8: ("%Y%m%d", "%d%m%Y", "%m%d%Y"), 14: ("%Y%m%d%H%M%S",)}  # by number of digits


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
    if not sample:
        return "", ""
    clock_forms = TIME_FORMATS[1:] if any(":" in word for word in sample) else TIME_FORMATS[:1]
    forms = [day_form + clock_form for day_form in DATE_FORMATS for clock_form in clock_forms]
    fits = {form: int((~np.isnat(_times(sample, form))).sum()) for form in forms}
    candidates = [form for form in forms if fits[form] and 2 * fits[form] >= max(fits.values())]
    parsed = {form: _times(words, form) for form in ("", *candidates)}
    cells = {form: int(counts[~np.isnat(times)].sum()) for form, times in parsed.items()}
    best, *tied = [form for form in parsed if cells[form] == max(cells.values())]
    other = (f for f in tied if not np.array_equal(parsed[f], parsed[best], equal_nan=True))
    return best, next(other, "")


def guess_form(words: Sequence[str]) -> str:
    """Return a strptime format that parses most of the texts, of those not detected; "": none."""
    sample = _sample(word.strip() for word in words if LIKE_A_DATE.search(word[:MAX_DATE_CHARS]))
    forms = dict.fromkeys(form for word in sample[:5] for form in _forms_like(word))
    fits = {form: int((~np.isnat(_times(sample, form))).sum()) for form in forms}
    best = max(fits, key=fits.__getitem__, default="")
    return best if best and 2 * fits[best] >= len(sample) else ""


def describe_form(form: str) -> str:
    """Return the name of a date format in messages, such as `day/month/year`."""
    names = (name for day_form, name in DATE_FORMATS.items() if form.startswith(day_form))
    return next(names, form)


def _forms_like(word: str) -> Iterator[str]:
    """Yield strptime formats that may parse a text, by what its letters and digits look like."""
    text = word.replace("%", "%%")
    zone = ZONE.search(text)
    text = f"{text[: zone.start()]}{' ' * (zone[0][0] == ' ')}%z" if zone else text
    if clock := CLOCK.search(text):
        is_half_day = re.search(r"(?i)\b[ap]m\b|\d[ap]m\b", text)
        hour = "%I" if is_half_day else "%H"
        fields = f"{hour}:%M{':%S' * bool(clock['seconds'])}{'.%f' * bool(clock['fraction'])}"
        text = text[: clock.start()] + fields + text[clock.end() :]
    numbers, has_month, has_year = list[str](), False, False

    def replace_token(match: re.Match[str]) -> str:
        nonlocal has_month, has_year
        token, lower = match[0], match[0].lower()
        if text[: match.start()].endswith("%"):
            return token
        if lower in ("am", "pm"):
            return "%p"
        if lower[:3] in MONTHS and not has_month and not token.isdigit():
            has_month = True
            return "%B" if len(token) > 3 else "%b"
        if lower[:3] in WEEKDAYS and not token.isdigit():
            return "%A" if len(token) > 3 else "%a"
        if not token.isdigit():
            return token
        if len(token) in PACKED or len(token) <= 2:
            numbers.append(token)
            return "\0"
        has_year |= len(token) == 4
        return "%Y" if len(token) == 4 else token

    text = DIGITS_OR_LETTERS.sub(replace_token, text)
    orders: Sequence[str]
    if len(numbers) == 1 and len(numbers[0]) in PACKED:
        orders = PACKED[len(numbers[0])]
    elif has_month:
        orders = ("%d",) if has_year else ("%d %y", "%y %d")
    elif has_year:
        orders = YEAR_ORDERS[text.find("%Y") < text.find("\0")] if len(numbers) > 1 else ("%m",)
    else:
        orders = ("%d %m %y", "%m %d %y", *map(" ".join, permutations(("%y", "%m", "%d"))))
    for order in orders:
        codes = order.split() if " " in order or len(numbers) == 1 else [order]
        if len(codes) == len(numbers):
            parts = text.split("\0")
            yield parts[0] + "".join(map("".join, zip(codes, parts[1:], strict=True)))
    if not numbers and (has_year or clock):
        yield text


def _sample(words: Iterator[str]) -> list[str]:
    """Return FORMAT_SAMPLE of the texts, which do not depend on their order."""
    return nsmallest(FORMAT_SAMPLE, words, key=lambda word: (crc32(word.encode()), word))


def _times(words: Sequence[str], form: str) -> np.ndarray:
    return np.array([parse_time(word, form) for word in words], "M8[us]")
