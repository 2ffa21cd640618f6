"""The data of a comparison of runs, from which all tables, pages and charts are made."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner import rooms
from runner.core.format import finite
from runner.core.interfaces.objective import rises_by_name
from runner.core.record.hydra_files import read_flat_config
from runner.core.record.text import json_safe
from runner.measure.benchmark.result import ArmResult, BenchmarkResult
from runner.measure.comparison_row import SUMMARY_PATHS, ComparisonRow, text_at
from runner.measure.naming import compares_speed
from runner.measure.replicates import merge_replicates

if TYPE_CHECKING:
    from runner.scale.sweep.search_record import SearchRecord

log = logging.getLogger("runner")

JSON_FILE, MARKDOWN_FILE, HTML_FILE = "comparison.json", "comparison.md", "comparison.html"
MODE = "training.monitor_mode"
TENSORBOARD_RUN = "comparison"  # the TensorBoard run


@dataclass
class Comparison:
    """The rows of a comparison, and notes on them."""

    title: str
    rows: list[ComparisonRow]
    kind: str = "sweep"  # sweep (not interleaved) | benchmark | runs (of several folders)
    reference: str = ""  # name of the row that speedups are against
    notes: list[str] = field(default_factory=list)
    command: str = ""
    # control, load, attribution, machine; of a sweep: its configurations measured in turns
    benchmark: BenchmarkResult | None = None
    search: SearchRecord | None = None  # the search whose trials the rows are
    root: Path | None = None  # rows' folders are relative to it; see `relocate_folders`
    speed_command: str = ""  # compares the speeds of a sweep's configurations
    schema: int = 1

    def __str__(self) -> str:
        text: str = rooms.find("notebook", "comparison_text")(self)
        return text

    def _repr_html_(self) -> str:
        """Return the table that a notebook shows."""
        html: str = rooms.find("notebook", "comparison")(self)
        return html

    @property
    def failures(self) -> list[ComparisonRow]:
        """The rows that did not finish."""
        return [row for row in self.rows if not row.finished]

    @property
    def devices(self) -> list[str]:
        """The distinct devices that the rows ran on."""
        entries = [row.summary.get("device") for row in self.rows]
        names = [text_at(entry, "name") or text_at(entry, "kind") for entry in entries]
        return list(dict.fromkeys(filter(None, names)))

    @cached_property
    def compares_learning(self) -> bool:
        """Whether the rows differ in what they learn, rather than in how they compute it."""
        return self.kind != "benchmark" and not compares_speed(row.overrides for row in self.rows)

    @cached_property
    def by_configuration(self) -> Comparison:
        """The comparison with replicates merged into one row each; itself if there are none."""
        rows = merge_replicates(self.rows)
        return self if rows is self.rows else best_first(replace(self, rows=rows))

    @property
    def has_replicates(self) -> bool:
        """Whether any configuration ran with several seeds or folds."""
        return self.by_configuration is not self

    @property
    def row_title(self) -> str:
        """What a row stands for: arm, configuration or run."""
        has_merged_rows = any(row.averaged_over for row in self.rows)
        return "arm" if self.kind == "benchmark" else "configuration" if has_merged_rows else "run"

    @property
    def monitor(self) -> str:
        """The monitored metric, if all finished rows share one; else ""."""
        names = {row.monitor for row in self.rows if row.finished and row.summary}
        return names.pop() if len(names) == 1 else ""


def best_first(comparison: Comparison) -> Comparison:
    """Return the comparison with the best row first, where the rows differ in what they learn.

    Unchanged without one metric on the same data, or if nothing says which values are better.
    """
    rises = metric_rises(comparison)
    if rises is None:
        return comparison

    def rank(row: ComparisonRow) -> tuple[bool, bool, float]:
        best = row.best or 0.0
        return not row.finished, row.best is None, -best if rises else best

    return replace(comparison, rows=sorted(comparison.rows, key=rank))


def metric_rises(comparison: Comparison) -> bool | None:
    """Return whether higher values of the monitored metric are better; None if that is unknown."""
    # one without a summary has been removed since
    finished = [row for row in comparison.rows if row.finished and row.summary]
    is_ranked = comparison.kind != "benchmark" and comparison.search is None
    if not is_ranked or not comparison.compares_learning or not comparison.monitor:
        return None
    if len(finished) < 2 or len({row.judged_on for row in finished}) > 1:
        return None
    if comparison.root is not None and finished[0].folder:  # as the user has said
        mode = str(read_flat_config(comparison.root / finished[0].folder).get(MODE))
        if mode in ("min", "max"):
            return mode == "max"
    return rises_by_name(comparison.monitor)


def _arm_row(arm: ArmResult) -> ComparisonRow:
    return ComparisonRow(
        list(arm.overrides), arm.status, arm.reason, dict(arm.summary), finite(arm.speedup) or None,
        arm.speedup_interval, arm.parity, arm.command, arm.name, arm.folder or "", arm,
        claim=arm.claim,
    )  # fmt: skip


def compare_arms(result: BenchmarkResult, folder: Path | None) -> Comparison:
    """Return the comparison of a benchmark's arms; `folder` is the benchmark's, if any."""
    arm_notes = [f"{arm.name}: {note}" for arm in result.arms for note in arm.notes]
    return Comparison(
        result.name,
        list(map(_arm_row, result.arms)),
        kind="benchmark",
        reference=result.reference,
        notes=list(dict.fromkeys([*result.notes, *arm_notes])),
        command=result.command,
        benchmark=result,
        root=None if folder is None else folder.absolute(),
    )


def relocate_folders(comparison: Comparison, folder: Path) -> Comparison:
    """Return the comparison with the rows' folders relative to `folder`."""
    folder = folder.absolute()
    root = comparison.root or folder
    rows = [
        replace(row, folder=row.folder and os.path.relpath(root / row.folder, folder))
        for row in comparison.rows
    ]
    return replace(comparison, rows=comparison.rows if root == folder else rows, root=folder)


def as_json(comparison: Comparison) -> str:
    """Return the comparison as JSON, without duplicates or absolute paths, with NaN as null."""
    benchmark = comparison.benchmark and replace(comparison.benchmark, arms=[])
    tree = asdict(replace(comparison, root=None, benchmark=benchmark))
    unneeded = ((tree, "root"), (tree["benchmark"] or {}, "arms"), (tree["search"] or {}, "trials"))
    for part, key in unneeded:  # trials are in search.json
        part.pop(key, None)
    rows_by_run = {name: row for row in comparison.by_configuration.rows for name in row.run_names}
    finished = {row.name for row in comparison.rows if row.finished}
    for row, entry in zip(comparison.rows, tree["rows"], strict=True):
        for key in ("workload", "averaged_over", "run_names", "estimates"):  # only for merged rows
            del entry[key]
        (entry["measured"] or {}).pop("summary", None)
        entry["skipped_steps"] = row.skipped_steps
        configuration = rows_by_run.get(row.name) if row.finished else None
        entry["replicates"] = configuration and _replicates_entry(configuration, finished)
    return json.dumps(json_safe(tree), indent=2, default=str, allow_nan=False) + "\n"


def _replicates_entry(row: ComparisonRow, finished: set[str]) -> dict[str, Any] | None:
    """Return mean, spread and interval of metrics and speed; None if it ran once."""
    if not row.estimates:
        return None
    estimates = {key: asdict(estimate) for key, estimate in row.estimates.items()}
    return {
        "over": row.averaged_over.partition(";")[0],
        "runs": len(finished.intersection(row.run_names)),
        "metrics": {
            k.removeprefix("metric:"): x for k, x in estimates.items() if k.startswith("metric:")
        },
        "speed": {k: x for k, x in estimates.items() if k in SUMMARY_PATHS},
        "speedup": None,  # the runs are not interleaved
    }
