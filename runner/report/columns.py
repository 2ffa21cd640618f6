"""The columns of a comparison: the title of each, its text, and the number that sorts it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from runner.report import format, row_fields
from runner.report.comparison import Comparison, Row

METRICS = 6  # of a run, beside the monitored one; results.csv has them all
Number = Callable[[Row], float | None]


@dataclass(frozen=True)
class Column:
    """One column; `number` sorts it, and is None where a row has nothing in it."""

    key: str
    title: str
    number: Number
    text: Callable[[Row], str]


def _column(key: str, title: str, number: Number, show: Callable[[float | None], str]) -> Column:
    return Column(key, title, number, lambda row: show(number(row)))


def _measured(key: str) -> Number:
    return lambda row: row_fields.measured(row, key)


def _speedup(row: Row) -> float | None:
    return row_fields.number(vars(row), "speedup") if row.finished else None


def _low_end(row: Row) -> float | None:
    return row.speedup_interval[0] if row.speedup_interval else None


def speedup_text(row: Row) -> str:
    """A row's ratio with its interval, as `1.83× (1.79 to 1.86)`."""
    return format.times_interval(row.speedup if row.finished else None, row.speedup_interval)


def _break_even_text(row: Row) -> str:
    """After how many steps compiling is paid back."""
    measured = row.measured
    if measured is None or measured.speedup is None or (measured.compile_seconds or 0.0) < 0.1:
        return format.NONE  # nothing was paid
    return "never" if measured.break_even_steps is None else f"{measured.break_even_steps:,}"


def _parity_text(row: Row) -> str:
    """Whether it is the same training, in a word or two."""
    if row.parity is None:
        return format.NONE
    text = row.parity
    if text == "explained by precision":
        text = row_fields.low_precision(row) or "rounding"
    other = row.measured.other_work if row.measured is not None else []
    return f"{text}, other {other[0] if len(other) == 1 else 'work'}" if other else text


COLUMNS = (
    _column("speedup", "speed-up", _speedup, format.times),
    Column(
        "interval", "95 % interval", _low_end, lambda row: format.interval(row.speedup_interval)
    ),
    _column("step_ms", "step, ms", row_fields.step_ms, format.milliseconds),
    _column("rate", "samples/s", row_fields.samples_per_second, format.rate),
    Column("parity", "numbers", lambda row: None if row.parity is None else 0.0, _parity_text),
    _column("memory", "memory", row_fields.process_bytes, format.size),
    _column("device_memory", "device memory", row_fields.device_bytes, format.size),
    _column("compile_seconds", "compile", _measured("compile_seconds"), format.seconds),
    Column("break_even", "paid back after", _measured("break_even_steps"), _break_even_text),
    _column("data_wait", "waits for data", _measured("data_wait"), format.share),
    _column("mfu", "MFU", _measured("mfu"), format.share),
    _column("to_target", "to the target loss", _measured("seconds_to_target"), format.seconds),
)
"""In the order in which they are read; those of metrics follow."""


def columns(comparison: Comparison) -> list[Column]:
    """The columns that at least one row has something in."""
    every = [*COLUMNS, *_metrics(comparison)]
    rows = comparison.rows
    return [column for column in every if any(column.number(row) is not None for row in rows)]


def document_columns(comparison: Comparison) -> list[Column]:
    """The same, with speed-up and interval as one: that is how they should be read."""
    found = [column for column in columns(comparison) if column.key != "interval"]
    if not any(row.speedup_interval for row in comparison.rows):
        return found
    return [
        replace(column, title="speed-up (95 %)", text=speedup_text)
        if column.key == "speedup"
        else column
        for column in found
    ]


def _metrics(comparison: Comparison) -> list[Column]:
    """The monitored metric's best value, then others; in a benchmark the user's own alone."""
    rows = comparison.rows
    if comparison.kind == "benchmark":
        own = [name for row in rows if row.measured for name in row.measured.metrics]
        return [_metric(name) for name in dict.fromkeys(own)]
    monitor = row_fields.monitored([row for row in rows if row.finished])
    best = _column("best", f"best {monitor}", row_fields.best, format.metric)
    others = dict.fromkeys(name for row in rows for name in row_fields.metrics(row))
    plain = [name for name in others if name != monitor and name.count("/") < 2]
    return [*([best] if monitor else []), *(_metric(name) for name in plain[:METRICS])]


def _metric(name: str) -> Column:
    return _column(
        f"metric:{name}", name, lambda row: row_fields.metrics(row).get(name), format.metric
    )
