"""A benchmark from its arms to its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.benchmark.arms import Arm
from runner.benchmark.config import BenchmarkConfig
from runner.benchmark.result import BenchmarkResult


def measure(
    arms: Sequence[Arm],
    settings: BenchmarkConfig,
    folder: Path | None = None,
    given: Any = None,
    metrics: Mapping[str, Any] | None = None,
    seed: int = 0,
    told: Callable[[str], None] | None = None,
) -> BenchmarkResult:
    """Start every arm, measure them in blocks, judge their numbers, gather what they came to.

    `settings.reference`, else the first arm, is what the others are held against. With a `folder`
    the arms' runs are recorded in it and `benchmark.json` is written, also when arms failed.
    `attribute`, `baseline` and `claims` of the settings are not looked at here.
    An arm that fails is a row, and so are all of them; raises ConfigError only.
    """
    raise NotImplementedError
