"""The columns of a comparison: title, text, and the number to sort by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from runner.core import format
from runner.measure.comparison import Comparison
from runner.measure.comparison_row import (
    BEST_KEY,
    METRIC_PREFIX,
    SUMMARY_PATHS,
    ComparisonRow,
    number_at,
)

MAX_METRICS = 6  # beside the monitored one; comparison.json has all
# first if rows differ in what they learn
LEARNING_COLUMNS = (BEST_KEY, "step_ms", "samples_per_second")
ReadNumber = Callable[[ComparisonRow], float | None]


@dataclass(frozen=True)
class ReportColumn:
    """One column: the number to sort by (None where the cell is empty), and the cell's text."""

    key: str
    title: str
    number: ReadNumber
    text: Callable[[ComparisonRow], str]


def _numeric_column(
    key: str, title: str, show: Callable[[float | None], str], read: ReadNumber | None = None
) -> ReportColumn:
    """Return a numeric column; for rows of several runs it shows the mean with its interval."""
    read_number = read or (lambda row: row.number(key))

    def text(row: ComparisonRow) -> str:
        estimate = row.estimates.get(key)
        if estimate is None:
            return show(read_number(row))
        return estimate.text(show, positive=key in SUMMARY_PATHS)

    return ReportColumn(key, title, read_number, text)


def _process_count(row: ComparisonRow) -> float | None:
    """Return the number of processes that trained the run; 1 if its summary does not say."""
    return (number_at(row.summary, "distributed", "world_size") or 1.0) if row.summary else None


def _break_even_text(row: ComparisonRow) -> str:
    measured = row.measured
    if measured is None or measured.speedup is None or (measured.compile_seconds or 0.0) < 0.1:
        return format.NONE  # it did not compile
    return "never" if measured.break_even_steps is None else f"{measured.break_even_steps:,}"


def _parity_text(row: ComparisonRow) -> str:
    text, other = row.parity or format.NONE, row.other_work
    if text == "explained by precision":
        text = row.low_precision or "rounding"
    return f"{text}, other {other[0] if len(other) == 1 else 'work'}" if other else text


COLUMNS = (
    ReportColumn(
        "speedup",
        "speed-up",
        lambda row: row.speedup if row.finished else None,
        lambda row: format.times_interval(
            row.speedup if row.finished else None, row.speedup_interval
        ),
    ),
    _numeric_column("step_ms", "step, ms", format.rate),
    _numeric_column("samples_per_second", "samples/s", format.rate),
    _numeric_column(
        "other_cpu_share",
        "others' CPU",
        format.share,
        lambda row: number_at(row.summary, "throughput", "other_cpu_share"),
    ),
    _numeric_column("peak_process_bytes", "memory", format.size),
    ReportColumn("parity", "numbers", lambda row: 0.0 if row.parity else None, _parity_text),
    _numeric_column("peak_device_bytes", "device memory", format.size),
    _numeric_column("compile_seconds", "compile", format.seconds),
    ReportColumn(
        "break_even_steps",
        "paid back after",
        lambda row: row.number("break_even_steps"),
        _break_even_text,
    ),
    _numeric_column("data_wait", "waits for data", format.share),
    _numeric_column("processes", "processes", format.rate, _process_count),
    ReportColumn(
        "device",
        "device",
        lambda row: 0.0 if row.device else None,
        lambda row: row.device or format.NONE,
    ),
)
"""Most important first: the last ones are dropped where there is no room. Metrics follow."""


def select_columns(comparison: Comparison) -> list[ReportColumn]:
    """Return the columns that are not empty, most important first."""
    rows, chosen = comparison.rows, list(COLUMNS)
    if any(row.speedup_interval for row in rows):
        chosen[0] = replace(chosen[0], title="speed-up (95 %)")
    if comparison.monitor:
        chosen.insert(1, _numeric_column(BEST_KEY, f"{comparison.monitor} (best)", format.metric))
    if comparison.compares_learning:
        chosen.sort(key=lambda column: column.key not in LEARNING_COLUMNS)
    if comparison.kind == "benchmark":  # whose arms are interleaved
        chosen = [column for column in chosen if column.key != "other_cpu_share"]
    else:  # the metrics beside the monitored one
        names = dict.fromkeys(name for row in rows for name in row.metrics)
        others = [x for x in names if x != comparison.monitor and x.count("/") < 2]
        for name in others[:MAX_METRICS]:
            checkpoints = {row.checkpoint_of(name) for row in rows if name in row.metrics}
            title = f"{name} ({'/'.join(sorted(checkpoints))})"
            chosen.append(_numeric_column(METRIC_PREFIX + name, title, format.metric))
    if len({_process_count(row) for row in rows if row.summary}) < 2:
        chosen = [column for column in chosen if column.key != "processes"]
    return [column for column in chosen if any(column.number(row) is not None for row in rows)]
