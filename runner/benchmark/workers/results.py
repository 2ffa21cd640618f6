"""Results of an arm, collected while its run is still open; and whether it trains at all."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from runner.benchmark.blocks import Finished
from runner.errors import OutOfMemory, StorageError
from runner.record.text import shorten
from runner.training.hook import Report
from runner.training.recovery import is_out_of_memory
from runner.training.run import Run
from runner.training.summary import Summary

if TYPE_CHECKING:
    from runner.benchmark.workers.turn_hook import TurnHook

FIRST = 50  # steps whose losses are kept, and as many of the last ones
FEW = 10  # losses at each end that say something of a trend
MOVED, ROSE = 2.0, 3.0  # standard errors by which a loss has
Metric = Callable[[Run], Any]


def collect_results(
    run: Run, hook: TurnHook, summary: Summary, metrics: Mapping[str, Metric]
) -> Finished:
    """The arm's results; `summary.json` then has its peaks without this."""
    notes: list[str] = []
    summary.memory.peak_process_bytes, summary.memory.peak_device_bytes = hook.peaks
    if run.folder is not None:
        try:
            summary.write(run.folder)
        except StorageError as error:
            notes.append(str(error))
    if run.world is not None:
        notes.append(f"memory is that of one of {run.world.size} processes")
    if any(row.evidence.get("cache") == "warm" for row in summary.techniques):
        notes.append("compiled from the cache on disk; the first time takes longer")
    return Finished(
        summary=asdict(summary),
        losses=hook.training.first,
        problems=hook.training.problems(),
        metrics=_compute_metrics(run, metrics, notes),
        notes=notes,
    )


def is_memory_error(error: BaseException | None) -> bool:
    """Whether it is memory that was missing, here or where the error came from."""
    while error is not None:
        if isinstance(error, OutOfMemory) or is_out_of_memory(error):
            return True
        error = error.__cause__
    return False


def _compute_metrics(run: Run, metrics: Mapping[str, Metric], notes: list[str]) -> dict[str, float]:
    """The user's own metrics; one that fails costs its column and nothing else."""
    values: dict[str, float] = {}
    for name, metric in metrics.items():
        try:
            value = float(metric(run))
            if not math.isfinite(value):
                raise ValueError(f"it is {value}")
            values[name] = value
        except Exception as error:
            gist = shorten(str(error), 200)
            notes.append(f"the metric {name} failed: {type(error).__name__}: {gist}")
    return values


@dataclass
class TrainingLog:
    """Whether a run trains, by the numbers of its steps as they reach the host anyway."""

    steps: int = 0
    skipped: int = 0
    not_finite: int = 0
    with_gradient: int = 0  # steps whose gradient was not zero
    first: list[float] = field(default_factory=list)
    last: deque[float] = field(default_factory=lambda: deque(maxlen=FIRST))

    def add(self, report: Report) -> None:
        """A window of steps; some µs."""
        self.steps += len(report.loss)
        self.skipped += sum(report.skipped)
        self.not_finite += sum(not math.isfinite(loss) for loss in report.loss)
        self.with_gradient += sum(norm != 0.0 for norm in report.grad_norm)
        self.first += report.loss[: max(0, FIRST - len(self.first))]
        self.last.extend(report.loss)

    def problems(self) -> list[str]:
        """Signs, in these numbers, that nothing is learned."""
        if not self.steps:
            return []
        problems = []
        if self.skipped == self.steps:
            problems.append("every update was skipped")
        if self.not_finite:
            problems.append(f"the loss was not finite in {self.not_finite} of {self.steps} steps")
        if not self.with_gradient:
            problems.append("gradients are zero")
        count = min(FIRST, self.steps // 2)
        if count >= FEW and not self.not_finite:
            problems += _describe_trend(self.first[:count], list(self.last)[-count:])
        return problems


def _describe_trend(first: Sequence[float], last: Sequence[float]) -> list[str]:
    """A loss that rises or stays, by more than the noise from batch to batch."""
    noise = math.sqrt((np.var(first, ddof=1) + np.var(last, ddof=1)) / len(first))
    before, after = float(np.mean(first)), float(np.mean(last))
    means = f"{before:.4g} over the first {len(first)} steps, {after:.4g} over the last"
    if after - before > ROSE * noise:
        return [f"the loss rises: {means}"]
    if len(first) == FIRST and abs(after - before) <= MOVED * noise:
        return [f"the loss does not move: {means}"]
    return []
