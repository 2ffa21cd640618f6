"""Runs side by side: the data under every table, page and chart of them. `comparison.json`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.benchmark.result import ArmResult, BenchmarkResult

FILE = "comparison.json"


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
    schema: int = 1


def of_benchmark(result: BenchmarkResult, folder: Path | None) -> Comparison:
    """A benchmark's arms."""
    raise NotImplementedError


def of_folders(folders: Sequence[Path]) -> Comparison:
    """Whatever lies in finished folders: runs, sweeps, benchmarks, also of several sweeps.

    Raises UsageError where there is nothing to compare; a damaged summary is a row that says so.
    """
    raise NotImplementedError


def write(comparison: Comparison, folder: Path) -> list[Path]:
    """comparison.json, comparison.md, comparison.html, results.csv, and the TensorBoard run
    `comparison`; what was written. A disk that does not take it is a warning, not an error.
    """
    raise NotImplementedError
