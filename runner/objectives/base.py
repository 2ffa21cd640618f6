"""The interface of objectives: loss and metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from runner.errors import ConfigError
from runner.format import nearest

if TYPE_CHECKING:
    from torch import Tensor

    from runner.objectives.named_metrics import NamedMetrics

MONITOR = "training.monitor"
NAMED = "objective.metrics"  # key among the sums
ERRORS = ("loss", "mse", "mae", "rmse", "perplexity", "bits_per_byte", "bits_per_token")
"""Metrics for which lower is better."""


class Objective(ABC):
    """A loss to minimise, and metrics.

    `tally` returns sums that add up over batches, on the device; `metrics` computes numbers from
    the totals, once.
    """

    monitor: str = "val/loss"  # the metric that decides which checkpoint is best
    higher_is_better: bool = False
    unit: str = "samples"  # what `weight` counts: samples | tokens
    takes_deferred: bool = False  # accepts `DeferredLogits`
    indices: int | None = None  # targets are indices below this; 0: no indices; None: not known
    ignored: int | None = None  # class index that marks no target
    named: NamedMetrics | None = None  # those of `objective.metrics`

    @abstractmethod
    def __call__(self, output: Any, target: Any) -> Tensor:
        """Return the mean loss over `weight(target)` items, 0-d."""

    @abstractmethod
    def weight(self, target: Any) -> Tensor | int:
        """Return the number of items in the mean; a tensor if it is counted on the device."""

    @abstractmethod
    def tally(self, output: Any, target: Any) -> dict[str, Any]:
        """Return sums over a batch (tensors, or objects with `+`) for `metrics`."""

    @abstractmethod
    def metrics(self, totals: dict[str, Any]) -> dict[str, float]:
        """Return the metrics of the totals, by bare names (`loss`, `accuracy`)."""

    def metric_names(self) -> list[str] | None:
        """Return the names of all possible metrics; None if unknown."""
        return None

    def rises(self, metric: str) -> bool:
        """Whether a higher value of `metric` (`val/…`) is better."""
        if metric == self.monitor:
            return self.higher_is_better
        name = metric.rpartition("/")[2]
        if self.named is not None and name in self.named.metrics:
            return self.named.rises(name)
        return name not in ERRORS

    def tally_all(self, output: Any, target: Any) -> dict[str, Any]:
        """Return the sums of `tally` and those of `objective.metrics`."""
        sums = self.tally(output, target)
        return sums if self.named is None else {**sums, NAMED: self.named.tally(output, target)}

    def all_metrics(self, totals: dict[str, Any]) -> dict[str, float]:
        """Return `metrics` and those of `objective.metrics`."""
        own = self.metrics({name: sums for name, sums in totals.items() if name != NAMED})
        return {**own, **totals[NAMED].compute()} if NAMED in totals else own

    def confusion(self, totals: dict[str, Any]) -> Tensor | None:
        """Return counts [true class, predicted class], or None."""
        return None


def monitored(objective: Objective, asked: str | None) -> str:
    """Return the metric to monitor; ConfigError if it is certain not to exist."""
    if asked is None:
        return objective.monitor
    ours = type(objective).__module__.startswith("runner.")  # a user's may have others
    names = objective.metric_names() if ours else None
    named = objective.named.metrics if objective.named is not None else ()
    available = [f"val/{name}" for name in (*names, *named)] if names else []
    if available and asked not in (objective.monitor, *available):
        raise unknown(asked, available)
    return asked


def unknown(asked: str, available: Iterable[str], then: str = "") -> ConfigError:
    """Return the error for a metric that does not exist; `then` says what happens to the run."""
    names = list(available)
    near = nearest(asked, names) or next((n for n in names if n == f"val/{asked}"), None)
    shown = [name for name in names if name.count("/") < 2]  # without those of single classes
    guess = f"did you mean {MONITOR}={near}? " if near else ""
    return ConfigError(
        MONITOR, f"unknown metric {asked!r}", f"{guess}available: {', '.join(shown)}{then}"
    )
