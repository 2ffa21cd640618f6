"""Numbers in words, the same in every table and on every page."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from runner.benchmark.result import BenchmarkResult, Effect
from runner.report import facts
from runner.report.comparison import Comparison, Row

NONE = "–"  # where there is no number
NOISY = 0.5  # a noise floor above it leaves nothing to tell apart
WIDE = 0.05  # a noise floor above it belongs beside every ratio
BUSY = 0.1  # and so does it where other processes took more than this share of the CPUs
MOST = 4  # names in a sentence; what is beyond is counted

STATISTICS = (
    "In each block every arm had one turn, in an order drawn by lot, and what is compared is the "
    "time per sample of its median step (with data workers the mean one) as a ratio to the "
    "reference's in the same block, so that a drift of the machine hits both alike. An interval "
    "holds the true ratio 95 times in 100 "
    "although measuring stops once it is narrow, and nothing is claimed within 2 %, nor within the "
    "noise floor: what the reference differed by from itself, run a second time in a process of "
    "its own. That is true of these processes: the same work started anew, in other memory, may "
    "be a per cent or two faster or slower, which no number of blocks shows."
)
ONE_RUN = (
    "Each row is one run, and the runs were not taken in turn: whatever else the machine did "
    "meanwhile is in these numbers, so a ratio here has no interval and is a hint. "
    "job=benchmark measures the same arms in randomised blocks, with intervals."
)


def times(ratio: float | None) -> str:
    """A ratio, as `1.83×`."""
    if ratio is None:
        return NONE
    return f"{_digits(ratio)}×"


def _digits(ratio: float) -> str:
    """Two digits after the point; three that mean something of one that is almost nothing."""
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


def speedup(row: Row) -> str:
    """A row's ratio with its interval, as `1.83× (1.79 to 1.86)`."""
    if not row.finished or row.speedup_interval is None:
        return times(row.speedup if row.finished else None)
    return f"{times(row.speedup)} ({interval(row.speedup_interval)})"


def milliseconds(value: float | None) -> str:
    """Three digits of a time."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def rate(value: float | None) -> str:
    """Samples a second, without digits that mean nothing."""
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
    """A duration, as short as it can be said."""
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


def break_even(row: Row) -> str:
    """After how many steps compiling is paid back."""
    measured = row.measured
    if measured is None or measured.speedup is None or (measured.compile_seconds or 0.0) < 0.1:
        return NONE  # nothing was paid
    return "never" if measured.break_even_steps is None else f"{measured.break_even_steps:,}"


def parity(row: Row) -> str:
    """Whether it is the same training, in a word or two."""
    if row.parity is None:
        return NONE
    said = row.parity
    if said == "explained by precision":
        said = facts.low_precision(row) or "rounding"
    other = row.measured.other_work if row.measured is not None else []
    return f"{said}, other {other[0] if len(other) == 1 else 'work'}" if other else said


def effect(found: Effect, side: str) -> str:
    """What one technique is worth, `side` being added or removed: `1.10× (1.08 to 1.12)`."""
    ratio = found.added if side == "added" else found.removed
    ends = found.added_interval if side == "added" else found.removed_interval
    return f"{times(ratio)} ({interval(ends)})" if ratio is not None and ends else times(ratio)


def method(comparison: Comparison) -> str:
    """How the numbers came about."""
    if comparison.damaged:
        return "Each arm's own record of its steps; what was measured of them together is lost."
    if all(row.measured is not None for row in comparison.rows):
        return STATISTICS
    if not any(row.measured is not None for row in comparison.rows):
        return ONE_RUN
    return f"{STATISTICS} This holds for the benchmarks; the other rows are one run each, a hint."


def machine(comparison: Comparison) -> list[tuple[str, str]]:
    """The machine, how busy it was, and how long it was measured."""
    found = comparison.benchmark
    if found is None:
        return [("device", ", ".join(devices))] if (devices := facts.device(comparison)) else []
    rows = [(str(key).replace("_", " "), _plain(value)) for key, value in found.machine.items()]
    load = found.load
    if load.others is not None:
        rows.append(("other processes", f"{share(load.others)} of the CPUs"))
    if load.mhz is not None:
        spread = f", varying by {share(load.mhz_spread)}" if load.mhz_spread is not None else ""
        rows.append(("clock", f"{load.mhz:,.0f} MHz{spread}"))
    if load.device_mhz is not None:
        rows.append(("device's clock", f"{load.device_mhz:,.0f} MHz"))
    if load.stolen is not None:
        rows.append(("stolen by other machines", share(load.stolen)))
    if found.control is not None:
        told = f"{times(found.control.ratio)} ({interval(found.control.interval)})"
        rows.append(("reference against itself", told))
    floor = "not known" if found.noise_floor is None else f"± {share(found.noise_floor)}"
    rows.append(("noise floor", floor))
    stopped = f"; {found.stopped}" if found.stopped else ""
    rows.append(("measured", f"{found.blocks} blocks in {seconds(found.seconds)}{stopped}"))
    if found.started:
        rows.append(("started", when(found.started)))
    if found.git.get("commit"):
        dirty = ", with changes not committed" if found.git.get("dirty") else ""
        rows.append(("code", f"{str(found.git['commit'])[:12]}{dirty}"))
    known = {name for name, _ in rows}
    rows += [(name, version) for name, version in found.versions.items() if name not in known]
    return rows


def unclaimed(found: BenchmarkResult) -> str:
    """Within what nothing is claimed, as a part of a sentence."""
    if found.noise_floor is None:
        return "nothing is claimed: the noise floor is not known"
    noisy = "too noisy for more: " if too_noisy(found) else ""
    return f"{noisy}nothing within ± {share(found.unclaimed)} is claimed"


def unsteady(found: BenchmarkResult | None) -> str:
    """What a headline may not leave out of the machine, as a part of a sentence; "" if nothing."""
    told = []
    if found is not None and (found.load.others or 0.0) > BUSY:
        told.append(f"other processes took {share(found.load.others)} of the CPUs")
    if found is not None and (found.noise_floor or 0.0) > WIDE:
        told.append(f"noise floor ± {share(found.noise_floor)}")
    return f", on an unsteady machine ({', '.join(told)})" if told else ""


def too_noisy(found: BenchmarkResult | None) -> bool:
    """Whether the reference differed from itself so much that few ratios say anything."""
    return found is not None and (found.noise_floor or 0.0) > NOISY


def when(moment: str) -> str:
    """An ISO 8601 time, as people write it."""
    try:
        return f"{datetime.fromisoformat(moment):%Y-%m-%d %H:%M %Z}".strip()
    except ValueError:
        return moment


def _plain(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(_plain(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    return str(value)


def listed(names: Sequence[str]) -> str:
    """`a, b and c`, and how many more there are."""
    shown = list(names[:MOST])
    if len(names) > MOST:
        return ", ".join(shown) + f" and {len(names) - MOST} more"
    return shown[0] if len(shown) == 1 else ", ".join(shown[:-1]) + f" and {shown[-1]}"
