"""Fields of a row, from a benchmark or a run's summary; a damaged or missing one is None."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from runner.report.comparison import Comparison, Row
from runner.report.format import technique_status


def number(tree: Any, *path: str) -> float | None:
    """The number at a path into nested mappings; None where there is no finite one."""
    for key in path:
        if not isinstance(tree, dict):
            return None
        tree = tree.get(key)
    if isinstance(tree, bool) or not isinstance(tree, int | float):
        return None
    try:
        return float(tree) if math.isfinite(tree) else None
    except OverflowError:  # an integer of hundreds of digits
        return None


def text(tree: Any, *path: str) -> str:
    """The text at a path; "" where there is none."""
    for key in path:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree if isinstance(tree, str) else ""


def measured(row: Row, key: str) -> float | None:
    """A number that a benchmark measured of its arm."""
    return None if row.measured is None else number(vars(row.measured), key)


def _either(row: Row, key: str, *path: str) -> float | None:
    """What the benchmark measured, else what the run's summary has; 0 counts as none."""
    return measured(row, key) or number(row.summary, *path) or None


def samples_per_second(row: Row) -> float | None:
    """Training samples a second."""
    return _either(row, "samples_per_second", "throughput", "samples_per_second")


def step_ms(row: Row) -> float | None:
    """Milliseconds of the median step."""
    return _either(row, "step_ms", "throughput", "step_ms", "p50")


def step_ms_p95(row: Row) -> float | None:
    """Milliseconds of a step, 95th percentile."""
    return _either(row, "step_ms_p95", "throughput", "step_ms", "p95")


def process_bytes(row: Row) -> float | None:
    """Peak memory of the process."""
    return _either(row, "peak_process_bytes", "memory", "peak_process_bytes")


def device_bytes(row: Row) -> float | None:
    """Peak memory of the device; None on a CPU, whose memory is the process's."""
    return _either(row, "peak_device_bytes", "memory", "peak_device_bytes")


def memory_bytes(row: Row) -> float | None:
    """The memory that limits a batch: the device's, where it has one of its own."""
    return device_bytes(row) or process_bytes(row)


def data_wait(row: Row) -> float | None:
    """Share of a step that waits for data."""
    value = measured(row, "data_wait")
    return number(row.summary, "throughput", "split", "data") if value is None else value


def metrics(row: Row) -> dict[str, float]:
    """The run's final metrics and the user's own; those that are not finite are left out."""
    final = row.summary.get("metrics")
    values = {key: number(final, key) for key in final} if isinstance(final, dict) else {}
    if row.measured is not None:
        values |= {key: number(row.measured.metrics, key) for key in row.measured.metrics}
    return {str(key): value for key, value in values.items() if value is not None}


def monitored(rows: list[Row]) -> str:
    """The metric that the rows' checkpoints are judged by; "" where they differ or have none."""
    names = {text(row.summary, "monitor") for row in rows if row.summary}
    return names.pop() if len(names) == 1 else ""


def best(row: Row) -> float | None:
    """The best value of the monitored metric."""
    return number(row.summary, "best")


def _techniques(row: Row) -> Iterator[tuple[str, dict[str, Any]]]:
    entries = row.summary.get("techniques")
    for entry in entries if isinstance(entries, list) else []:
        if name := text(entry, "name"):
            yield name, entry


def techniques(row: Row) -> dict[str, tuple[str, str]]:
    """Each technique's status and the reason for it."""
    return {
        name: (technique_status(entry), text(entry, "reason")) for name, entry in _techniques(row)
    }


def low_precision(row: Row) -> str:
    """`bf16` or `fp16`, where products came out in it; else ""."""
    for name, entry in _techniques(row):
        if name == "amp" and entry.get("engaged"):
            seen = str(entry.get("evidence", ""))
            return "bf16" if "bfloat16" in seen else "fp16" if "float16" in seen else ""
    return ""


def device(comparison: Comparison) -> list[str]:
    """The devices that the rows ran on."""
    found = [row.summary.get("device") for row in comparison.rows]
    names = [text(about, "name") or text(about, "kind") for about in found]
    return list(dict.fromkeys(filter(None, names)))


def failures(comparison: Comparison) -> list[Row]:
    """The rows that did not come to their end."""
    return [row for row in comparison.rows if not row.finished]
