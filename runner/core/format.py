"""Numbers, times and names as text, the same in messages, tables and pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

NONE = "–"  # shown where there is no number
MAX_NAMES = 4  # in a sentence; the rest is counted


def finite(value: Any) -> float | None:
    """Return a finite int or float as float; None for any other value."""
    try:
        return float(value) if type(value) in (int, float) and math.isfinite(value) else None
    except OverflowError:  # an integer of hundreds of digits
        return None


def _none_as_dash(show: Callable[[float], str]) -> Callable[[float | None], str]:
    return lambda value: NONE if value is None else show(value)


@_none_as_dash
def times(ratio: float) -> str:
    """Format a ratio, as `1.83×`."""
    return f"{_digits(ratio)}×"


def _digits(ratio: float) -> str:
    """Format with two decimals; three significant digits below 0.1."""
    if 0 < ratio < 0.1:
        return f"{ratio:.3g}"
    return f"{ratio:.2f}" if ratio < 100 else f"{ratio:,.0f}"


def interval(ends: tuple[float, float] | None) -> str:
    """Format a ratio's interval, as `1.79 to 1.86`."""
    if ends is None:
        return ""
    low, high = ends
    if high < 1e6:
        return f"{_digits(low)} to {_digits(high)}"
    return "too few blocks" if low == 0 else f"above {_digits(low)}"


def times_interval(ratio: float | None, ends: tuple[float, float] | None) -> str:
    """Format a ratio with its interval, as `1.83× (1.79 to 1.86)`."""
    return f"{times(ratio)} ({interval(ends)})" if ratio is not None and ends else times(ratio)


@_none_as_dash
def rate(value: float) -> str:
    """Format samples per second or milliseconds, with three digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


@_none_as_dash
def size(count: float) -> str:
    """Format bytes in KiB, MiB or GiB."""
    for unit, bytes_, digits in (("GiB", 2**30, 2), ("MiB", 2**20, 0), ("KiB", 2**10, 0)):
        if abs(count) >= bytes_:
            return f"{count / bytes_:.{digits}f} {unit}"
    return f"{count:.0f} bytes"


@_none_as_dash
def seconds(value: float) -> str:
    """Format a duration in seconds, minutes or hours."""
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


@_none_as_dash
def metric(value: float) -> str:
    """Format a loss or an accuracy."""
    if 1e5 <= abs(value) < 1e12:
        return f"{value:,.0f}"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e5 else f"{value:.4g}"


@_none_as_dash
def share(value: float) -> str:
    """Format a share as a percentage."""
    return f"{value * 100:.1f} %" if value < 0.1 else f"{value * 100:.0f} %"


def count_noun(count: int, noun: str) -> str:
    """Format a count with its noun, as `1 tensor` or `1,024 tensors`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def join_names(names: Iterable[str], max_names: int = MAX_NAMES) -> str:
    """Join names as `a, b and c`; beyond `max_names` the rest is counted."""
    all_names = list(names)
    if len(all_names) > max_names:
        return ", ".join(all_names[:max_names]) + f" and {len(all_names) - max_names:,} more"
    return " and ".join(filter(None, (", ".join(all_names[:-1]), *all_names[-1:])))


def nearest(word: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The one of `names` most like `word`, capitals aside: the one that it begins, if any."""
    folded = {name.casefold(): name for name in names}
    begun = [name for name in folded if name.startswith(word.casefold())] if word else []
    if begun and all(name.startswith(min(begun, key=len)) for name in begun):
        return folded[min(begun, key=len)]
    similar = get_close_matches(word.casefold(), folded, 1, cutoff)
    return folded[similar[0]] if similar else None


def short_path(folder: Path) -> str:
    """Return the path relative to the current folder if it lies in it, else absolute."""
    try:
        path, cwd = folder.absolute(), Path.cwd()
    except FileNotFoundError:  # the current folder was removed
        return str(folder)
    return str(path.relative_to(cwd)) if path.is_relative_to(cwd) else str(path)


def technique_status(entry: Mapping[str, Any]) -> str:
    """Return a technique's status from its summary entry, also of older versions."""
    if not entry.get("requested"):
        return "not requested"
    if entry.get("engaged"):
        return "engaged"
    status = entry.get("status")
    known = entry.get("known", True)
    return (status if isinstance(status, str) and status else "skipped") if known else "unknown"
