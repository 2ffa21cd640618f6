"""Runs side by side: the data under every table, page and chart of them, and their files."""

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

from runner.benchmark.result import ArmResult, BenchmarkResult
from runner.format import finite
from runner.record.storage import read_record, replace_text
from runner.record.text import json_safe
from runner.report.naming import about_speed
from runner.security.paths import keep_within

if TYPE_CHECKING:
    from runner.report.replicates import MeanEstimate
    from runner.report.search import SearchRecord

log = logging.getLogger("runner")

FILE, DOCUMENT, PAGE = "comparison.json", "comparison.md", "comparison.html"
BOARD = "comparison"  # the TensorBoard run
FINISHED = ("done", "stopped")
"""How a job ends that did what it was asked to; any other status is a failure with a reason."""
METRIC = "metric:"  # before a metric's name, in the key of a column
BEST = f"{METRIC}best"  # of the monitored one
DEEPEST = 50  # lists in lists of a record; ours are of five
OF_SUMMARY = {
    "samples_per_second": ("throughput", "samples_per_second"),
    "step_ms": ("throughput", "step_ms", "p50"),
    "peak_process_bytes": ("memory", "peak_process_bytes"),
    "peak_device_bytes": ("memory", "peak_device_bytes"),
}
"""Where a summary has the numbers that a benchmark measures, too."""


def read_json(path: Path) -> Any:
    """The values in a record; None where it is damaged, or deeper than any of ours."""
    try:
        tree = json.loads(read_record(path))
    except (OSError, ValueError, RecursionError):
        return None
    return tree if _is_shallow(tree, DEEPEST) else None


def _is_shallow(value: Any, levels: int) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(_is_shallow(item, levels - 1) for item in inside)


def value_at(tree: Any, *path: str) -> Any:
    """The value at a path into nested mappings; None where there is none."""
    for key in path:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def number(tree: Any, *path: str) -> float | None:
    """The number at a path; None where there is no finite one."""
    return finite(value_at(tree, *path))


def text(tree: Any, *path: str) -> str:
    """The text at a path; "" where there is none."""
    value = value_at(tree, *path)
    return value if isinstance(value, str) else ""


@dataclass
class Row:
    """One job of a sweep or arm of a benchmark, failed ones too. The first fields are a contract
    with other tools: `overrides, status, reason, summary, speedup, speedup_interval, parity,
    command`. Properties are None where the value is missing or damaged.
    """

    overrides: list[str]
    status: str  # done stopped interrupted failed killed timeout oom skipped
    reason: str = ""
    summary: dict[str, Any] = field(default_factory=dict)  # summary.json, {} where there is none
    speedup: float | None = None  # of a sweep: ratio of samples/s to the run of the same seed
    speedup_interval: tuple[float, float] | None = None  # of a benchmark only
    parity: str | None = None  # of a benchmark only
    command: str = ""
    name: str = ""  # what sets it apart: `ultra`, or `optimization=ultra seed=1`
    folder: str = ""  # relative to the comparison's
    measured: ArmResult | None = None  # of a benchmark
    judged_on: str = ""  # data, and for a loss its objective: metrics of others do not compare
    work: str = ""  # device, data and model: only runs of the same work have a ratio
    # of a configuration that ran several times; see `Comparison.by_configuration`
    over: str = ""  # of what it is the mean: `3 seeds`
    members: list[str] = field(default_factory=list)  # names of its runs
    estimates: dict[str, MeanEstimate] = field(default_factory=dict)  # by the key of a column

    @property
    def finished(self) -> bool:
        """Whether it came to its end as it should, or had been measured when Ctrl-C came."""
        measured = self.measured is not None and self.measured.blocks > 0
        return self.status in FINISHED or (self.status == "interrupted" and measured)

    @property
    def sound(self) -> bool:
        """Whether its speed is that of the same training."""
        return self.finished and self.parity != "FAIL" and not self.problems

    @property
    def problems(self) -> list[str]:
        """Signs that it does not train."""
        return self.measured.problems if self.measured else []

    @property
    def other_work(self) -> list[str]:
        """In what it trains something else than the reference."""
        return self.measured.other_work if self.measured else []

    def number(self, key: str) -> float | None:
        """What the benchmark measured of its arm, else what the run's summary has; 0 is none there.

        `samples_per_second`, `step_ms`, `peak_process_bytes`, `peak_device_bytes` (None on a CPU)
        and the other fields of `ArmResult`; `metric:best`, and `metric:` before a metric's name.
        """
        if key in self.estimates:
            return self.estimates[key].mean
        if key.startswith(METRIC):
            return self.best if key == BEST else self.metrics.get(key.removeprefix(METRIC))
        measured = None if self.measured is None else number(vars(self.measured), key)
        if key not in OF_SUMMARY:
            return measured
        return measured or number(self.summary, *OF_SUMMARY[key]) or None

    @property
    def monitor(self) -> str:
        """The metric that its checkpoints are judged by."""
        return text(self.summary, "monitor")

    @property
    def best(self) -> float | None:
        """The best value of that metric."""
        if "metric:best" in self.estimates:
            return self.estimates["metric:best"].mean
        return number(self.summary, "best")

    @property
    def metrics(self) -> dict[str, float]:
        """The final metrics, those that are finite."""
        final = self.summary.get("metrics")
        values = (
            {str(key): finite(x) for key, x in final.items()} if isinstance(final, dict) else {}
        )
        return {key: value for key, value in values.items() if value is not None}

    @property
    def techniques(self) -> dict[str, dict[str, Any]]:
        """Each technique's entry in the summary."""
        entries = self.summary.get("techniques")
        named = [(text(x, "name"), x) for x in (entries if isinstance(entries, list) else [])]
        return {name: entry for name, entry in named if name}

    @property
    def low_precision(self) -> str:
        """`bf16` or `fp16`, where products came out in it; else ""."""
        amp = self.techniques.get("amp", {})
        evidence = str(amp.get("evidence")) if amp.get("engaged") else ""
        return "bf16" if "bfloat16" in evidence else "fp16" if "float16" in evidence else ""


@dataclass
class Comparison:
    """What is compared, and what to say about it."""

    title: str
    rows: list[Row]
    kind: str = "sweep"  # sweep (one run each, unpaired) | benchmark | runs (put together by hand)
    reference: str = ""  # name of the row that speedups are against
    notes: list[str] = field(default_factory=list)
    command: str = ""
    benchmark: BenchmarkResult | None = None  # control, load, attribution, machine
    search: SearchRecord | None = None  # of hyper-parameters, whose trials the rows are
    home: Path | None = None  # what the rows' folders are relative to; `write` moves it
    schema: int = 1

    @property
    def failures(self) -> list[Row]:
        """The rows that did not come to their end."""
        return [row for row in self.rows if not row.finished]

    @property
    def devices(self) -> list[str]:
        """The devices that the rows ran on."""
        entries = [row.summary.get("device") for row in self.rows]
        names = [text(entry, "name") or text(entry, "kind") for entry in entries]
        return list(dict.fromkeys(filter(None, names)))

    @cached_property
    def about_learning(self) -> bool:
        """Whether what sets the rows apart is what they learn, not how they compute it."""
        return self.kind != "benchmark" and not about_speed(row.overrides for row in self.rows)

    @cached_property
    def by_configuration(self) -> Comparison:
        """One row for the seeds and folds of each configuration; itself where none ran twice."""
        from runner.report.replicates import merge_replicates

        return merge_replicates(self)

    @property
    def replicated(self) -> bool:
        """Whether a configuration ran with several seeds or folds."""
        return self.by_configuration is not self

    @property
    def row_title(self) -> str:
        """What a row is: arm, configuration or run."""
        several = any(row.over for row in self.rows)
        return "arm" if self.kind == "benchmark" else "configuration" if several else "run"

    @property
    def monitor(self) -> str:
        """The metric that all finished rows are judged by; "" where they differ or have none."""
        names = {row.monitor for row in self.rows if row.finished and row.summary}
        return names.pop() if len(names) == 1 else ""


def of_benchmark(result: BenchmarkResult, folder: Path | None) -> Comparison:
    """A benchmark's arms; `folder` is the benchmark's, where it has one."""
    rows = [
        Row(
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
    of_arms = [f"{arm.name}: {note}" for arm in result.arms for note in arm.notes]
    return Comparison(
        result.name,
        rows,
        kind="benchmark",
        reference=result.reference,
        notes=list(dict.fromkeys([*result.notes, *of_arms])),
        command=result.command,
        benchmark=result,
        home=None if folder is None else folder.absolute(),
    )


def moved(comparison: Comparison, folder: Path) -> Comparison:
    """The same with the rows' folders relative to `folder`."""
    folder = folder.absolute()
    home = comparison.home or folder
    rows = [
        replace(row, folder=row.folder and os.path.relpath(home / row.folder, folder))
        for row in comparison.rows
    ]
    return replace(comparison, rows=comparison.rows if home == folder else rows, home=folder)


def as_json(comparison: Comparison) -> str:
    """All of it; the rows say no number twice, NaN is null, and no path is of this machine."""
    benchmark = comparison.benchmark
    tree = asdict(replace(comparison, home=None, benchmark=None))
    tree["benchmark"] = benchmark and asdict(replace(benchmark, arms=[]))
    unneeded = ((tree, "home"), (tree["benchmark"] or {}, "arms"), (tree["search"] or {}, "trials"))
    for part, key in unneeded:  # the trials are in search.json
        part.pop(key, None)
    merged = {name: row for row in comparison.by_configuration.rows for name in row.members}
    finished = {row.name for row in comparison.rows if row.finished}
    for row, entry in zip(comparison.rows, tree["rows"], strict=True):
        for key in ("work", "over", "members", "estimates"):  # of rows of several runs
            del entry[key]
        (entry["measured"] or {}).pop("summary", None)
        configuration = merged.get(row.name) if row.finished else None
        entry["replicates"] = configuration and _replicates_entry(configuration, finished)
    return json.dumps(json_safe(tree), indent=2, default=str, allow_nan=False) + "\n"


def _replicates_entry(row: Row, finished: set[str]) -> dict[str, Any] | None:
    """Mean, spread and interval of a configuration's metrics and speed; None where it ran once."""
    if not row.estimates:
        return None
    estimates = {key: asdict(estimate) for key, estimate in row.estimates.items()}
    return {
        "over": row.over.partition(";")[0],
        "runs": len(finished.intersection(row.members)),
        "metrics": {
            key.removeprefix("metric:"): x
            for key, x in estimates.items()
            if key.startswith("metric:")
        },
        "speed": {key: x for key, x in estimates.items() if key in OF_SUMMARY},
        "speedup": estimates.get("speedup"),
    }


def write(comparison: Comparison, folder: Path) -> list[Path]:
    """comparison.json, comparison.md, comparison.html and the TensorBoard run `comparison`;
    what was written. A disk that does not take it is a warning, not an error.

    SecurityError where that would be through a link that leads out of the folder.
    """
    from runner.report import page

    comparison = moved(comparison, folder)
    keep_within(folder, BOARD)
    makers: dict[str, Callable[[Path], None]] = {
        FILE: lambda path: replace_text(path, as_json(comparison)),
        DOCUMENT: lambda path: replace_text(path, page.document(comparison)),
        PAGE: lambda path: replace_text(path, page.html(comparison)),
        BOARD: lambda path: _write_board(page.document(comparison), path),
    }
    written = []
    with suppress(OSError):  # each file says it by itself
        folder.mkdir(parents=True, exist_ok=True)
    for name, make in makers.items():
        try:
            make(folder / name)
            written.append(folder / name)
        except OSError as error:
            log.warning("no %s: %s", folder / name, error.strerror or error)
    return written


def _write_board(document: str, folder: Path) -> None:
    """The document as a text in TensorBoard; it replaces an earlier one."""
    from runner.record.tensorboard import PREFIX, open_event_file

    folder.mkdir(parents=True, exist_ok=True)
    for earlier in folder.glob(f"{PREFIX}*"):
        earlier.unlink()
    events = open_event_file(folder)
    try:
        events.text(f"{BOARD}/report", document, 0)
    finally:
        events.close()
