"""Runs side by side: the data under every table, page and chart of them. `comparison.json`."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from runner.benchmark.result import ArmResult, BenchmarkResult
from runner.record.storage import read_record, replace_text
from runner.security.paths import keep_within

log = logging.getLogger("runner")

FILE = "comparison.json"
PAGE = "comparison.html"
BOARD = "comparison"  # the TensorBoard run
FINISHED = ("done", "stopped")
"""How a job ends that did what it was asked to; any other status is a failure with a reason."""


@dataclass
class Row:
    """One job of a sweep or arm of a benchmark, failed ones too. The first fields are a contract
    with other tools: `overrides, status, reason, summary, speedup, speedup_interval, parity,
    command`.
    """

    overrides: list[str]
    status: str  # done stopped interrupted failed killed timeout oom skipped
    reason: str = ""
    summary: dict[str, Any] = field(default_factory=dict)  # summary.json, {} where there is none
    speedup: float | None = None  # of a sweep: ratio of samples/s, one run each, unpaired
    speedup_interval: tuple[float, float] | None = None  # of a benchmark only
    parity: str | None = None  # of a benchmark only
    command: str = ""
    name: str = ""  # what sets it apart: `ultra`, or `optimization=ultra seed=1`
    folder: str = ""  # relative to the comparison's
    measured: ArmResult | None = None  # of a benchmark
    judged_on: str = ""  # its data, and its own loss if it is judged by that; "" if not known

    @property
    def finished(self) -> bool:
        """Whether it came to its end as it should, or had been measured when Ctrl-C came."""
        cut = self.status == "interrupted" and self.measured is not None
        return self.status in FINISHED or (cut and bool(self.measured and self.measured.blocks))


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
    history: list[BenchmarkResult] = field(default_factory=list)  # several of them, oldest first
    home: Path | None = None  # what the rows' folders are relative to; `write` moves it
    schema: int = 1

    @property
    def damaged(self) -> bool:
        """Whether it is a benchmark of which the measurements are lost: only its runs are left."""
        return self.kind == "benchmark" and self.benchmark is None


def of_benchmark(result: BenchmarkResult, folder: Path | None) -> Comparison:
    """A benchmark's arms; `folder` is the benchmark's, where it has one."""
    rows = [
        Row(
            overrides=list(arm.overrides),
            status=arm.status,
            reason=arm.reason,
            summary=dict(arm.summary),
            speedup=arm.speedup if arm.speedup and math.isfinite(arm.speedup) else None,
            speedup_interval=arm.speedup_interval,
            parity=arm.parity,
            command=arm.command,
            name=arm.name,
            folder=arm.folder or "",
            measured=arm,
        )
        for arm in result.arms
    ]
    notes = list(dict.fromkeys([*result.notes, *_of_arms(result)]))
    return Comparison(
        result.name,
        rows,
        kind="benchmark",
        reference=result.reference,
        notes=notes,
        command=result.command,
        benchmark=result,
        home=None if folder is None else folder.absolute(),
    )


def _of_arms(result: BenchmarkResult) -> list[str]:
    return [f"{arm.name}: {note}" for arm in result.arms for note in arm.notes]


def of_folders(folders: Sequence[Path]) -> Comparison:
    """Whatever lies in finished folders: runs, sweeps, benchmarks, also of several sweeps.

    Raises UsageError where there is nothing to compare; a damaged summary is a row that says so.
    """
    from runner.report import discover

    return discover.compare(folders)


def moved(comparison: Comparison, folder: Path) -> Comparison:
    """The same with the rows' folders relative to `folder`."""
    home = comparison.home
    if home is None or home == folder.absolute():
        return replace(comparison, home=folder.absolute())
    rows = [
        replace(row, folder=os.path.relpath(home / row.folder, folder.absolute()))
        if row.folder
        else row
        for row in comparison.rows
    ]
    return replace(comparison, rows=rows, home=folder.absolute())


def better_there(comparison: Comparison, folder: Path) -> bool:
    """Whether the comparison in `folder` is of measurements that are lost to this one."""
    if comparison.benchmark is not None:
        return False
    try:
        there = json.loads(read_record(folder / FILE))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(there, dict) and bool(there.get("benchmark"))


def write(comparison: Comparison, folder: Path) -> list[Path]:
    """comparison.json, comparison.md, comparison.html, results.csv, and the TensorBoard run
    `comparison`; what was written. A disk that does not take it is a warning, not an error.

    SecurityError where that would be through a link that leads out of the folder.
    """
    from runner.report import page, serialize

    here = moved(comparison, folder)
    keep_within(folder, BOARD)
    makers: list[tuple[str, Callable[[], str]]] = [
        (FILE, lambda: serialize.as_json(here)),
        ("results.csv", lambda: serialize.as_csv(here)),
        ("comparison.md", lambda: page.document(here)),
        (PAGE, lambda: page.html(here)),
    ]
    written = []
    with suppress(OSError):  # each file says it by itself
        folder.mkdir(parents=True, exist_ok=True)
    for name, make in makers:
        path = folder / name
        try:
            replace_text(path, make())
            written.append(path)
        except OSError as error:
            log.warning("no %s: %s", path, error.strerror or error)
    return [*written, *_board(here, folder)]


def _board(comparison: Comparison, folder: Path) -> list[Path]:
    """The TensorBoard run: protobuf and pictures are imported for it alone."""
    from runner.report.tensorboard_export import export_comparison

    try:
        export_comparison(comparison, folder)
    except OSError as error:
        log.warning("no TensorBoard run of the comparison: %s", error.strerror or error)
        return []
    made = folder / BOARD
    return [made] if made.is_dir() else []
