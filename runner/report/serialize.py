"""A comparison for other programs: `comparison.json` and `results.csv`."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import asdict, replace
from typing import Any

from runner.record.text import escape_control_chars, json_safe
from runner.report.columns import COLUMNS
from runner.report.comparison import Comparison, Row, number
from runner.report.naming import keys

FORMULA = ("=", "+", "-", "@")  # what a spreadsheet would compute


def as_json(comparison: Comparison) -> str:
    """All of it; the rows say no number twice, NaN is null, and no path is of this machine."""
    benchmark = comparison.benchmark
    tree = asdict(replace(comparison, home=None, benchmark=None))
    tree["benchmark"] = benchmark and {**asdict(replace(benchmark, arms=[]))}
    del tree["home"]
    if benchmark is not None:
        del tree["benchmark"]["arms"]
    for row in tree["rows"]:
        del row["work"]
        if row["measured"]:
            del row["measured"]["summary"]
    return json.dumps(json_safe(tree), indent=2, default=str, allow_nan=False) + "\n"


def as_csv(comparison: Comparison) -> str:
    """One row a job: names and status, overrides, every number found, every metric."""
    flat = [_cells(row) for row in comparison.rows]
    header = list(dict.fromkeys(key for row in flat for key in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, header, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def _cells(row: Row) -> dict[str, Any]:
    low, high = row.speedup_interval or (None, None)
    cells: dict[str, Any] = {"name": row.name, "status": row.status, "reason": row.reason}
    cells |= {column.key: column.number(row) for column in COLUMNS}
    cells |= {"speedup": row.speedup, "speedup_low": low, "speedup_high": high}
    cells |= {"parity": row.parity, "best": row.best, "engaged": " ".join(_engaged(row))}
    for key in ("steps", "wall_seconds", "skipped_steps"):
        cells[key] = number(row.summary, key)
    if row.measured is not None:  # the rest of what a benchmark found out
        plain = {k: v for k, v in vars(row.measured).items() if isinstance(v, bool | int | float)}
        cells = plain | cells | {"problems": "; ".join(row.problems)}
    cells |= {f"metric:{key}": value for key, value in row.metrics.items()}
    cells |= {f"override:{key}": value for key, value in keys(row.overrides).items()}
    cells |= {"command": row.command, "folder": row.folder}
    return {_safe(key): _safe(value) for key, value in cells.items()}


def _engaged(row: Row) -> list[str]:
    return [name for name, (status, _) in row.techniques.items() if status == "engaged"]


def _safe(value: Any) -> Any:
    """What a spreadsheet takes as text stays text, and a terminal too; NaN is an empty cell."""
    if isinstance(value, float):
        return value if math.isfinite(value) else ""
    if isinstance(value, str):
        flat = escape_control_chars(value)
        return f"'{flat}" if flat.startswith(FORMULA) else flat
    return value
