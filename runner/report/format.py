"""Numbers, times and names as text, the same in every table and on every page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

NONE = "–"  # where there is no number
MOST_NAMES = 4  # in a sentence; what is beyond is counted


def times(ratio: float | None) -> str:
    """A ratio, as `1.83×`."""
    return NONE if ratio is None else f"{_digits(ratio)}×"


def _digits(ratio: float) -> str:
    """Two digits after the point; three significant ones of a ratio near 0."""
    if 0 < ratio < 0.1:
        return f"{ratio:.3g}"
    return f"{ratio:.2f}" if ratio < 100 else f"{ratio:,.0f}"


def interval(ends: tuple[float, float] | None) -> str:
    """The two ends of a ratio's interval, as `1.79 to 1.86`."""
    if ends is None:
        return ""
    low, high = ends
    if high < 1e6:
        return f"{_digits(low)} to {_digits(high)}"
    return "too few blocks" if low == 0 else f"above {_digits(low)}"


def times_interval(ratio: float | None, ends: tuple[float, float] | None) -> str:
    """A ratio with its interval, as `1.83× (1.79 to 1.86)`."""
    return f"{times(ratio)} ({interval(ends)})" if ratio is not None and ends else times(ratio)


def milliseconds(value: float | None) -> str:
    """Three digits of a time."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def rate(value: float | None) -> str:
    """Samples a second, three digits or more."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def size(count: float | None) -> str:
    """Bytes, as KiB, MiB or GiB."""
    if count is None:
        return NONE
    sign, count = ("-" if count < 0 else ""), abs(count)
    if count >= 2**30:
        return f"{sign}{count / 2**30:.2f} GiB"
    if count >= 2**20:
        return f"{sign}{count / 2**20:.0f} MiB"
    return f"{sign}{count / 2**10:.0f} KiB" if count >= 2**10 else f"{sign}{count:.0f} bytes"


def seconds(value: float | None) -> str:
    """A duration in seconds, minutes or hours."""
    if value is None:
        return NONE
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def metric(value: float | None) -> str:
    """A loss or an accuracy."""
    if value is None:
        return NONE
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e5 else f"{value:.4g}"


def share(value: float | None) -> str:
    """A part of one, in per cent."""
    if value is None:
        return NONE
    return f"{value * 100:.1f} %" if value < 0.1 else f"{value * 100:.0f} %"


def tick_label(value: float) -> str:
    """A tick's label."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.0e}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")
    if abs(value) >= 10_000:
        return f"{value / 1000:,.6g}k"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def when(moment: str) -> str:
    """An ISO 8601 time, to the minute."""
    try:
        return f"{datetime.fromisoformat(moment):%Y-%m-%d %H:%M %Z}".strip()
    except ValueError:
        return moment


def listed(names: Sequence[str]) -> str:
    """`a, b and c`, and how many more there are."""
    shown = list(names[:MOST_NAMES])
    if len(names) > MOST_NAMES:
        return ", ".join(shown) + f" and {len(names) - MOST_NAMES} more"
    return shown[0] if len(shown) == 1 else ", ".join(shown[:-1]) + f" and {shown[-1]}"


def technique_status(entry: Mapping[str, Any]) -> str:
    """A technique's status from its entry in a summary, also one of an older version.

    not requested, engaged, not applicable, skipped, failed, fell back or unknown.
    """
    if not entry.get("requested"):
        return "not requested"
    if entry.get("engaged"):
        return "engaged"
    if not entry.get("known", True):
        return "unknown"
    status = entry.get("status")
    return status if isinstance(status, str) and status else "skipped"
