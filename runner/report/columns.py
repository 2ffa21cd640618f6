"""The columns of a comparison: the title of each, its text, and the number that sorts it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from runner.report import format
from runner.report.comparison import Comparison, Row, number
from runner.report.naming import about_speed

METRICS = 6  # of a run, beside the monitored one; comparison.json has them all
LEARNING = ("best", "step_ms", "rate")  # come first where rows differ in what they learn
Number = Callable[[Row], float | None]


@dataclass(frozen=True)
class ReportColumn:
    """One column; `number` sorts it, and is None where a row has nothing in it."""

    key: str
    title: str
    number: Number
    text: Callable[[Row], str]


def _column(
    key: str, title: str, number: Number, show: Callable[[float | None], str]
) -> ReportColumn:
    return ReportColumn(key, title, number, lambda row: show(number(row)))


def _measured(key: str) -> Number:
    return lambda row: row.measured_number(key)


def _speedup(row: Row) -> float | None:
    return number(row.speedup) if row.finished else None


def _speedup_text(row: Row) -> str:
    return format.times_interval(_speedup(row), row.speedup_interval)


def _break_even_text(row: Row) -> str:
    """After how many steps compiling is paid back."""
    measured = row.measured
    if measured is None or measured.speedup is None or (measured.compile_seconds or 0.0) < 0.1:
        return format.NONE  # nothing was paid
    return "never" if measured.break_even_steps is None else f"{measured.break_even_steps:,}"


def _parity_text(row: Row) -> str:
    """Whether it is the same training, in a word or two."""
    text = row.parity or format.NONE
    if text == "explained by precision":
        text = row.low_precision or "rounding"
    other = row.other_work
    return f"{text}, other {other[0] if len(other) == 1 else 'work'}" if other else text


COLUMNS = (
    ReportColumn("speedup", "speed-up", _speedup, _speedup_text),
    _column("step_ms", "step, ms", lambda row: row.step_ms, format.rate),
    _column("rate", "samples/s", lambda row: row.samples_per_second, format.rate),
    _column("memory", "memory", lambda row: row.process_bytes, format.size),
    ReportColumn("parity", "numbers", lambda row: 0.0 if row.parity else None, _parity_text),
    _column("device_memory", "device memory", lambda row: row.device_bytes, format.size),
    _column("compile_seconds", "compile", _measured("compile_seconds"), format.seconds),
    ReportColumn("break_even", "paid back after", _measured("break_even_steps"), _break_even_text),
    _column("data_wait", "waits for data", _measured("data_wait"), format.share),
    _column("mfu", "MFU", _measured("mfu"), format.share),
    _column("to_target", "to the target loss", _measured("seconds_to_target"), format.seconds),
)
"""By what they are worth: where there is no room, the last ones go. Metrics follow."""


def columns(comparison: Comparison) -> list[ReportColumn]:
    """The columns that at least one row has something in, the most telling first."""
    best = _column("best", f"best {comparison.monitor}", lambda row: row.best, format.metric)
    speedup = COLUMNS[0]
    if any(row.speedup_interval for row in comparison.rows):
        speedup = replace(speedup, title="speed-up (95 %)")
    found = [speedup, *([best] if comparison.monitor else []), *COLUMNS[1:]]
    if comparison.kind != "benchmark" and not about_speed(row.overrides for row in comparison.rows):
        found.sort(key=lambda column: column.key not in LEARNING)
    found += _metrics(comparison)
    rows = comparison.rows
    return [column for column in found if any(column.number(row) is not None for row in rows)]


def _metrics(comparison: Comparison) -> list[ReportColumn]:
    """The metrics beside the monitored one; in a benchmark the user's own alone."""
    rows = comparison.rows
    if comparison.kind == "benchmark":
        found = dict.fromkeys(name for row in rows if row.measured for name in row.measured.metrics)
        return [_metric(name) for name in found]
    every = dict.fromkeys(name for row in rows for name in row.metrics)
    plain = [name for name in every if name != comparison.monitor and name.count("/") < 2]
    return [_metric(name) for name in plain[:METRICS]]


def _metric(name: str) -> ReportColumn:
    return _column(f"metric:{name}", name, lambda row: row.metrics.get(name), format.metric)
