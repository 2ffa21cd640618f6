"""A comparison for other programs: `comparison.json` and `results.csv`."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import asdict, replace
from typing import Any

from runner.record.text import escape_control_chars, json_safe
from runner.report import row_fields
from runner.report.comparison import Comparison, Row
from runner.report.naming import keys

FORMULA = ("=", "+", "-", "@")  # what a spreadsheet would compute
REST = ("name", "overrides", "status", "reason", "summary", "losses", "per_sample_ms", "notes")


def as_json(comparison: Comparison) -> str:
    """All of it; the rows say no number twice, NaN is null, and no path is of this machine."""
    bare = replace(
        comparison,
        home=None,
        benchmark=comparison.benchmark and replace(comparison.benchmark, arms=[]),  # in the rows
        history=[],
        rows=[
            replace(row, measured=row.measured and replace(row.measured, summary={}))
            for row in comparison.rows
        ],
    )
    tree = asdict(bare)
    for name in ("home", "history"):
        del tree[name]
    if tree["benchmark"]:
        del tree["benchmark"]["arms"]
    for row in tree["rows"]:
        if row["measured"]:
            del row["measured"]["summary"]
    if comparison.history:
        tree["history"] = [
            {"name": x.name, "started": x.started, "commit": x.git.get("commit")}
            for x in comparison.history
        ]
    return json.dumps(json_safe(tree), indent=2, default=str, allow_nan=False) + "\n"


def as_csv(comparison: Comparison) -> str:
    """One row a job: names and status, overrides, every number found, every metric."""
    flat = [_flat(row) for row in comparison.rows]
    header = list(dict.fromkeys(key for row in flat for key in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, header, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def _flat(row: Row) -> dict[str, Any]:
    low, high = row.speedup_interval or (None, None)
    cells: dict[str, Any] = {
        "name": row.name,
        "status": row.status,
        "reason": row.reason,
        "speedup": row.speedup,
        "speedup_low": low,
        "speedup_high": high,
        "parity": row.parity,
        "step_ms": row_fields.step_ms(row),
        "step_ms_p95": row_fields.step_ms_p95(row),
        "samples_per_second": row_fields.samples_per_second(row),
        "peak_process_bytes": row_fields.process_bytes(row),
        "peak_device_bytes": row_fields.device_bytes(row),
        "data_wait": row_fields.data_wait(row),
        "steps": row_fields.number(row.summary, "steps"),
        "wall_seconds": row_fields.number(row.summary, "wall_seconds"),
        "skipped_steps": row_fields.number(row.summary, "skipped_steps"),
        "best": row_fields.best(row),
    }
    if row.measured is not None:
        cells |= _numbers(row)
    cells |= {f"metric:{key}": value for key, value in row_fields.metrics(row).items()}
    cells |= {f"override:{key}": value for key, value in keys(row.overrides).items()}
    engaged = [
        name for name, (state, _) in row_fields.techniques(row).items() if state == "engaged"
    ]
    cells |= {"engaged": " ".join(engaged), "command": row.command, "folder": row.folder}
    return {_safe(key): _safe(value) for key, value in cells.items()}


def _numbers(row: Row) -> dict[str, Any]:
    """The rest of what a benchmark found out about an arm."""
    measured = vars(row.measured)
    skipped = {*REST, "metrics", "speedup", "speedup_interval", "parity", "folder", "command"}
    cells: dict[str, Any] = {}
    for key, value in measured.items():
        if key in skipped:
            continue
        if key == "step_ms_interval":
            cells["step_ms_low"], cells["step_ms_high"] = value or (None, None)
        elif key == "problems":
            cells[key] = "; ".join(value)
        elif value is None or isinstance(value, bool | int | float | str):
            cells[key] = value
    return cells


def _safe(value: Any) -> Any:
    """What a spreadsheet takes as text stays text, and a terminal too; NaN is an empty cell."""
    if isinstance(value, float):
        return value if math.isfinite(value) else ""
    if isinstance(value, str):
        flat = escape_control_chars(value)
        return f"'{flat}" if flat.startswith(FORMULA) else flat
    return value
