"""What a row has to say, whichever record it is from; a damaged record says None."""

from __future__ import annotations

import math
from typing import Any

from runner.report.comparison import Comparison, Row


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
    """A number that a benchmark found out about its arm."""
    return None if row.measured is None else number(vars(row.measured), key)


def samples_per_second(row: Row) -> float | None:
    """Training samples a second."""
    return (
        measured(row, "samples_per_second")
        or number(row.summary, "throughput", "samples_per_second")
        or None
    )


def step_ms(row: Row) -> float | None:
    """Milliseconds of the median step."""
    return measured(row, "step_ms") or number(row.summary, "throughput", "step_ms", "p50") or None


def step_ms_p95(row: Row) -> float | None:
    """Milliseconds that 95 % of the steps stay below."""
    return (
        measured(row, "step_ms_p95") or number(row.summary, "throughput", "step_ms", "p95") or None
    )


def process_bytes(row: Row) -> float | None:
    """The process's largest memory."""
    return (
        measured(row, "peak_process_bytes")
        or number(row.summary, "memory", "peak_process_bytes")
        or None
    )


def device_bytes(row: Row) -> float | None:
    """The device's largest memory; None on a CPU, whose memory is the process's."""
    return (
        measured(row, "peak_device_bytes")
        or number(row.summary, "memory", "peak_device_bytes")
        or None
    )


def memory_bytes(row: Row) -> float | None:
    """The memory that limits a batch: the device's, where it has one of its own."""
    return device_bytes(row) or process_bytes(row)


def data_wait(row: Row) -> float | None:
    """Share of a step that waits for data."""
    found = measured(row, "data_wait")
    return number(row.summary, "throughput", "split", "data") if found is None else found


def metrics(row: Row) -> dict[str, float]:
    """The run's final metrics and the user's own; those that are not finite are left out."""
    found = row.summary.get("metrics")
    values = {key: number(found, key) for key in found} if isinstance(found, dict) else {}
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


def techniques(row: Row) -> dict[str, tuple[str, str]]:
    """Each technique's state (engaged, fell back, not asked, not known) and the reason for it."""
    found = row.summary.get("techniques")
    states = {}
    for entry in found if isinstance(found, list) else []:
        if not (name := text(entry, "name")):
            continue
        if not entry.get("requested"):
            state = "not asked"
        elif entry.get("engaged"):
            state = "engaged"
        else:
            state = "fell back" if entry.get("known", True) else "not known"
        states[name] = state, text(entry, "reason")
    return states


def low_precision(row: Row) -> str:
    """`bf16` or `fp16`, where products came out in it; else ""."""
    found = row.summary.get("techniques")
    for entry in found if isinstance(found, list) else []:
        if text(entry, "name") == "amp" and entry.get("engaged"):
            seen = str(entry.get("evidence", ""))
            return "bf16" if "bfloat16" in seen else "fp16" if "float16" in seen else ""
    return ""


def device(comparison: Comparison) -> list[str]:
    """The devices that the rows ran on."""
    names = []
    for row in comparison.rows:
        about = row.summary.get("device")
        name = text(about, "name") or text(about, "kind")
        if name and name not in names:
            names.append(name)
    return names


def failures(comparison: Comparison) -> list[Row]:
    """The rows that did not come to their end."""
    return [row for row in comparison.rows if not row.finished]
