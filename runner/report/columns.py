"""The columns of a comparison: the title of each, its text, and the number that sorts it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from runner.report import format
from runner.report.comparison import Comparison, Row, number

METRICS = 6  # of a run, beside the monitored one; comparison.json has them all
LEARNING = ("metric:best", "step_ms", "rate")  # come first where rows differ in what they learn


@dataclass(frozen=True)
class ReportColumn:
    """One column: the number that sorts it, None where a row has nothing in it, and its text."""

    key: str
    title: str
    number: Callable[[Row], float | None]
    text: Callable[[Row], str]


def _column(
    key: str,
    title: str,
    number: str | Callable[[Row], float | None],
    show: Callable[[float | None], str],
) -> ReportColumn:
    """A column of a number; by its name, it is one that a benchmark measures.

    Of the mean of several runs, its interval as well.
    """
    read = number if callable(number) else lambda row: row.number(number)
    name = key if callable(number) else number

    def text(row: Row) -> str:
        estimate = row.estimates.get(name)
        return show(read(row)) if estimate is None else format.estimate(estimate, show)

    return ReportColumn(key, title, read, text)


def _speedup(row: Row) -> float | None:
    return number(row.speedup) if row.finished else None


def _processes(row: Row) -> float | None:
    """That trained it together; one that says nothing of them is by itself."""
    return (number(row.summary, "distributed", "world_size") or 1.0) if row.summary else None


def _count(value: float | None) -> str:
    return format.NONE if value is None else f"{value:,.0f}"


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
    ReportColumn(
        "speedup",
        "speed-up",
        _speedup,
        lambda row: format.times_interval(_speedup(row), row.speedup_interval),
    ),
    _column("step_ms", "step, ms", "step_ms", format.rate),
    _column("rate", "samples/s", "samples_per_second", format.rate),
    _column("memory", "memory", "peak_process_bytes", format.size),
    ReportColumn("parity", "numbers", lambda row: 0.0 if row.parity else None, _parity_text),
    _column("device_memory", "device memory", "peak_device_bytes", format.size),
    _column("compile_seconds", "compile", "compile_seconds", format.seconds),
    ReportColumn(
        "break_even",
        "paid back after",
        lambda row: row.number("break_even_steps"),
        _break_even_text,
    ),
    _column("data_wait", "waits for data", "data_wait", format.share),
    _column("processes", "processes", _processes, _count),
)
"""By what they are worth: where there is no room, the last ones go. Metrics follow."""


def columns(comparison: Comparison) -> list[ReportColumn]:
    """The columns that at least one row has something in, the most telling first."""
    rows, speedup = comparison.rows, COLUMNS[0]
    if any(row.speedup_interval for row in rows):
        speedup = replace(speedup, title="speed-up (95 %)")
    title = f"best {comparison.monitor}"
    best = _column("metric:best", title, lambda row: row.best, format.metric)
    chosen = [speedup, *([best] if comparison.monitor else []), *COLUMNS[1:]]
    if comparison.about_learning:
        chosen.sort(key=lambda column: column.key not in LEARNING)
    chosen += [_metric(name) for name in _metric_names(comparison)]
    if len({_processes(row) for row in rows if row.summary}) < 2:
        chosen = [column for column in chosen if column.key != "processes"]
    return [column for column in chosen if any(column.number(row) is not None for row in rows)]


def _metric_names(comparison: Comparison) -> list[str]:
    """The metrics beside the monitored one; none in a benchmark."""
    if comparison.kind == "benchmark":
        return []
    names = dict.fromkeys(name for row in comparison.rows for name in row.metrics)
    return [x for x in names if x != comparison.monitor and x.count("/") < 2][:METRICS]


def _metric(name: str) -> ReportColumn:
    key = f"metric:{name}"

    def read(row: Row) -> float | None:
        return row.estimates[key].mean if key in row.estimates else row.metrics.get(name)

    return _column(key, name, read, format.metric)
