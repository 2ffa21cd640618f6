"""The data of a comparison of runs, from which all tables, pages and charts are made."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.core.format import finite
from runner.core.interfaces.run import FINISHED_ENDS
from runner.core.record.storage import (
    guard_folder,
    make_folder,
    remove_file,
    replace_text,
)
from runner.core.record.summary import FINISHED_STATUSES
from runner.core.record.text import json_safe
from runner.core.security.paths import check_links
from runner.measure.benchmark.result import ArmResult, BenchmarkResult
from runner.measure.naming import compares_speed

if TYPE_CHECKING:
    from runner.measure.replicates import MeanEstimate
    from runner.scale.sweep.search_record import SearchRecord

log = logging.getLogger("runner")

JSON_FILE, MARKDOWN_FILE, HTML_FILE = "comparison.json", "comparison.md", "comparison.html"
TENSORBOARD_RUN = "comparison"  # the TensorBoard run
METRIC_PREFIX = "metric:"  # prefix of a metric's name in a column's key
BEST_KEY = f"{METRIC_PREFIX}best"  # best value of the monitored metric
SUMMARY_PATHS = {
    "samples_per_second": ("throughput", "samples_per_second"),
    "step_ms": ("throughput", "step_ms", "p50"),
    "peak_process_bytes": ("memory", "peak_process_bytes"),
    "peak_device_bytes": ("memory", "peak_device_bytes"),
}
"""Paths in summary.json of the numbers that a benchmark measures too."""


def value_at(tree: Any, *path: str) -> Any:
    """Return the value at a path of keys in nested dicts; None if missing."""
    for key in path:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def number_at(tree: Any, *path: str) -> float | None:
    """Return the finite number at a path; None if there is none."""
    return finite(value_at(tree, *path))


def text_at(tree: Any, *path: str) -> str:
    """Return the string at a path; "" if there is none."""
    value = value_at(tree, *path)
    return value if isinstance(value, str) else ""


@dataclass
class ComparisonRow:
    """One job of a sweep or arm of a benchmark, failed or not. Other tools rely on the first
    fields: `overrides, status, reason, summary, speedup, speedup_interval, parity, command`.
    Properties are None where the value is missing or damaged.
    """

    overrides: list[str]
    status: str  # done stopped interrupted failed killed timeout oom skipped
    reason: str = ""
    summary: dict[str, Any] = field(default_factory=dict)  # summary.json, {} if missing
    speedup: float | None = None  # measured in turns: in a benchmark, or after a sweep
    speedup_interval: tuple[float, float] | None = None
    parity: str | None = None  # only in a benchmark
    command: str = ""
    name: str = ""  # how it differs: `ultra`, or `optimization=ultra seed=1`
    folder: str = ""  # relative to the comparison's
    measured: ArmResult | None = None  # in a benchmark
    judged_on: str = ""  # data (and objective): metrics are comparable only if equal
    workload: str = ""  # device, data and model
    claim: str = ""  # of a sweep's row measured in turns: faster | slower | same | ""
    device: str = ""  # the GPUs that a sweep assigned to it
    # for a configuration that ran several times; see `Comparison.by_configuration`
    averaged_over: str = ""  # what the mean is taken over: `3 seeds`
    run_names: list[str] = field(default_factory=list)  # names of its runs
    estimates: dict[str, MeanEstimate] = field(default_factory=dict)  # by column key

    @property
    def finished(self) -> bool:
        """Whether it ended normally, or was measured before a Ctrl-C."""
        measured = self.measured is not None and self.measured.blocks > 0
        return self.status in FINISHED_STATUSES or (self.status == "interrupted" and measured)

    @property
    def ended_early(self) -> bool:
        """Whether a limit or a request ended it, so that it can be continued."""
        ended_by = text_at(self.summary, "ended_by")
        return self.status == "stopped" and ended_by not in ("", *FINISHED_ENDS)

    @property
    def is_valid(self) -> bool:
        """Whether its speed counts: finished, no parity failure, and it learns."""
        return self.finished and self.parity != "FAIL" and not self.problems

    @property
    def problems(self) -> list[str]:
        """Signs that the model does not learn."""
        return self.measured.problems if self.measured else []

    @property
    def other_work(self) -> list[str]:
        """The parts in which it trains something else than the reference."""
        return self.measured.other_work if self.measured else []

    def number(self, key: str) -> float | None:
        """Return a number of the row: as measured by the benchmark, else from the summary.

        Keys: `samples_per_second`, `step_ms`, `peak_process_bytes`, `peak_device_bytes`, other
        fields of `ArmResult`, `metric:best`, and `metric:<name>`. A 0 in a summary counts as None.
        """
        if key in self.estimates:
            return self.estimates[key].mean
        if key.startswith(METRIC_PREFIX):
            return (
                self.best if key == BEST_KEY else self.metrics.get(key.removeprefix(METRIC_PREFIX))
            )
        measured = None if self.measured is None else number_at(vars(self.measured), key)
        if key not in SUMMARY_PATHS:
            return measured
        return measured or number_at(self.summary, *SUMMARY_PATHS[key]) or None

    @property
    def skipped_steps(self) -> str:
        """How many of its steps made no update: `31 of 60 steps skipped (non-finite)`; or "".

        Overflows do not count, by which fp16 finds its loss scale. A configuration that ran
        several times has the sums.
        """
        overflows = number_at(self.summary, "faults", "overflow") or 0
        skipped = (number_at(self.summary, "skipped_steps") or 0) - overflows
        steps = number_at(self.summary, "steps") or 0
        if skipped <= 0:
            return ""
        non_finite = min(number_at(self.summary, "faults", "non_finite") or 0, skipped)
        count = f"{non_finite:,.0f} " if non_finite < skipped else ""
        reason = f" ({count}non-finite)" if non_finite else ""
        return f"{skipped:,.0f} of {steps:,.0f} steps skipped{reason}"

    @property
    def title(self) -> str:
        """Its name, with the steps that it skipped."""
        return ", ".join(filter(None, (self.name, self.skipped_steps)))

    @property
    def monitor(self) -> str:
        """The metric by which its best checkpoint is chosen."""
        return text_at(self.summary, "monitor")

    @property
    def best(self) -> float | None:
        """The best value of the monitored metric."""
        if BEST_KEY in self.estimates:
            return self.estimates[BEST_KEY].mean
        return number_at(self.summary, "best")

    @property
    def metrics(self) -> dict[str, float]:
        """The final metrics with finite values."""
        final = self.summary.get("metrics")
        values = {str(k): finite(x) for k, x in final.items()} if isinstance(final, dict) else {}
        return {key: value for key, value in values.items() if value is not None}

    @property
    def techniques(self) -> dict[str, dict[str, Any]]:
        """The techniques' entries in the summary, by name."""
        entries = self.summary.get("techniques")
        named = [(text_at(x, "name"), x) for x in (entries if isinstance(entries, list) else [])]
        return {name: entry for name, entry in named if name}

    @property
    def low_precision(self) -> str:
        """`bf16` or `fp16` if the amp technique used it, else ""."""
        amp = self.techniques.get("amp", {})
        evidence = str(amp.get("evidence")) if amp.get("engaged") else ""
        return "bf16" if "bfloat16" in evidence else "fp16" if "float16" in evidence else ""


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

    def _repr_html_(self) -> str:
        """Return the table that a notebook shows."""
        from runner.core.record.console import to_html
        from runner.measure.table import ComparisonScreen

        return to_html(ComparisonScreen(self))

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
        from runner.measure.replicates import merge_replicates

        return merge_replicates(self)

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


def compare_arms(result: BenchmarkResult, folder: Path | None) -> Comparison:
    """Return the comparison of a benchmark's arms; `folder` is the benchmark's, if any."""
    rows = [
        ComparisonRow(
            list(arm.overrides),
            arm.status,
            arm.reason,
            dict(arm.summary),
            finite(arm.speedup) or None,
            arm.speedup_interval,
            arm.parity,
            arm.command,
            arm.name,
            arm.folder or "",
            arm,
        )
        for arm in result.arms
    ]
    arm_notes = [f"{arm.name}: {note}" for arm in result.arms for note in arm.notes]
    return Comparison(
        result.name,
        rows,
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
    benchmark = comparison.benchmark
    tree = asdict(replace(comparison, root=None, benchmark=None))
    tree["benchmark"] = benchmark and asdict(replace(benchmark, arms=[]))
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


def write_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """Write comparison.json, .md and .html and the TensorBoard run `comparison`.

    Returns the paths that were written; an OSError is logged as a warning. Raises SecurityError if
    a link leads out of the folder.
    """
    from runner.measure import page

    comparison = relocate_folders(comparison, folder)
    guard_folder(folder)
    check_links(folder, TENSORBOARD_RUN)
    writers: dict[str, Callable[[Path], None]] = {
        JSON_FILE: lambda path: replace_text(path, as_json(comparison)),
        MARKDOWN_FILE: lambda path: replace_text(path, page.render_markdown(comparison)),
        HTML_FILE: lambda path: replace_text(path, page.render_html(comparison)),
        TENSORBOARD_RUN: lambda path: _write_tensorboard_run(
            page.render_markdown(comparison), path
        ),
    }
    written = []
    with suppress(OSError):  # each write reports it
        make_folder(folder)
    for name, write_file in writers.items():
        try:
            write_file(folder / name)
            written.append(folder / name)
        except OSError as error:
            log.warning("%s is not written: %s", folder / name, error.strerror or error)
    return written


def _write_tensorboard_run(document: str, folder: Path) -> None:
    """Write the document as a TensorBoard text, replacing an earlier one."""
    from runner.core.record.tensorboard import PREFIX, open_event_file

    make_folder(folder)
    for old_file in folder.glob(f"{PREFIX}*"):
        remove_file(old_file)
    events = open_event_file(folder)
    try:
        events.text(f"{TENSORBOARD_RUN}/report", document, 0)
    finally:
        events.close()
