"""A row of a comparison: one job of a sweep, one arm of a benchmark, or one run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import Any

from runner.core.format import finite
from runner.core.interfaces.run import FINISHED_ENDS
from runner.core.record.summary import FINISHED_STATUSES
from runner.measure.benchmark.result import ArmResult
from runner.measure.benchmark.statistics import CONFIDENCE, t_quantile

UNBOUNDED = (-math.inf, math.inf)
METRIC_PREFIX = "metric:"  # prefix of a metric's name in a column's key
BEST_KEY = f"{METRIC_PREFIX}best"  # best value of the monitored metric
WIDEST = 10  # an interval that ends above so many times its beginning is not shown
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


@dataclass(frozen=True)
class MeanEstimate:
    """A metric over replicates: mean, sample standard deviation, 95 % interval of the mean."""

    mean: float
    spread: float
    interval: tuple[float, float]

    @classmethod
    def of(cls, values: list[float], bounds: tuple[float, float] = UNBOUNDED) -> MeanEstimate:
        """Estimate from at least two values, by Student's t; the interval ends at `bounds`."""
        center, spread = mean(values), stdev(values)
        half_width = t_quantile(len(values) - 1, 1 - CONFIDENCE) * spread / math.sqrt(len(values))
        low, high = bounds
        return cls(center, spread, (max(low, center - half_width), min(high, center + half_width)))

    def text(self, show: Callable[[float | None], str], positive: bool = False) -> str:
        """Format it with its interval, as `0.9710 (0.9650 to 0.9770)`.

        That of a `positive` value which says nothing, as of two runs that differ, is `±?`.
        """
        low, high = self.interval
        if positive and high > WIDEST * low:
            return f"{show(self.mean)} ±?"
        return f"{show(self.mean)} ({show(low)} to {show(high)})"

    @classmethod
    def of_positive(cls, values: list[float]) -> MeanEstimate:
        """Estimate for positive values (times, rates): geometric mean, interval above 0."""
        logs = cls.of([math.log(value) for value in values])
        low, high = (math.exp(end) for end in logs.interval)
        return cls(math.exp(logs.mean), stdev(values), (low, high))


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
    claim: str = ""  # measured in turns: faster | slower | same | ""
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
            name = key.removeprefix(METRIC_PREFIX)
            return self.best if key == BEST_KEY else self.metrics.get(name)
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
        paths = ("faults", "overflow"), ("skipped_steps",), ("steps",), ("faults", "non_finite")
        overflows, skipped, steps, bad = (number_at(self.summary, *path) or 0 for path in paths)
        skipped -= overflows
        if skipped <= 0:
            return ""
        count = f"{bad:,.0f} " if bad < skipped else ""
        reason = f" ({count}non-finite)" if bad else ""
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

    def checkpoint_of(self, metric: str) -> str:
        """Return the checkpoint that a final metric is of: best | last | evaluated.

        The test set is evaluated with the best one, unless there is none.
        """
        if text_at(self.summary, "job") not in ("", "train"):
            return "evaluated"
        tested = number_at(self.summary, "tested", "step")
        is_best = tested == number_at(self.summary, "best_step")
        return "best" if metric.startswith("test/") and is_best else "last"

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
