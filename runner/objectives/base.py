"""What is minimised."""

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
NAMED = "objective.metrics"  # their place among the sums
ERRORS = ("loss", "mse", "mae", "rmse", "perplexity", "bits_per_byte", "bits_per_token")
"""Metrics of which less is better."""


class Objective(ABC):
    """What is minimised, and the metrics that say how well it went.

    `tally` returns sums that add up over batches, on the device; `metrics` turns the grand
    totals into numbers, once.
    """

    monitor: str = "val/loss"  # the metric that decides which checkpoint is best
    higher_is_better: bool = False
    unit: str = "samples"  # what `weight` counts: samples | tokens
    takes_deferred: bool = False  # `DeferredLogits`, which an output layer put off
    indices: int | None = None  # targets are indices below this; 0: no indices; None: not known
    ignored: int | None = None  # a class index that stands for no target
    named: NamedMetrics | None = None  # those of `objective.metrics`

    @abstractmethod
    def __call__(self, output: Any, target: Any) -> Tensor:
        """The mean loss over `weight(target)` items, 0-d."""

    @abstractmethod
    def weight(self, target: Any) -> Tensor | int:
        """How many items the mean is over; a tensor where counting needs the device."""

    @abstractmethod
    def tally(self, output: Any, target: Any) -> dict[str, Any]:
        """Tensors over this batch, or others with `+`, from which `metrics` is computed."""

    @abstractmethod
    def metrics(self, totals: dict[str, Any]) -> dict[str, float]:
        """The metrics of everything tallied, by bare names (`loss`, `accuracy`)."""

    def metric_names(self) -> list[str] | None:
        """The metrics that there can be, by the same names; None: not known."""
        return None

    def rises(self, metric: str) -> bool:
        """Whether more of `metric` (`val/…`) is better."""
        if metric == self.monitor:
            return self.higher_is_better
        name = metric.rpartition("/")[2]
        if self.named is not None and name in self.named.metrics:
            return self.named.rises(name)
        return name not in ERRORS

    def tally_all(self, output: Any, target: Any) -> dict[str, Any]:
        """`tally`, with the metrics of `objective.metrics`."""
        sums = self.tally(output, target)
        return sums if self.named is None else {**sums, NAMED: self.named.tally(output, target)}

    def all_metrics(self, totals: dict[str, Any]) -> dict[str, float]:
        """`metrics`, with those of `objective.metrics`."""
        own = self.metrics({name: sums for name, sums in totals.items() if name != NAMED})
        return {**own, **totals[NAMED].compute()} if NAMED in totals else own

    def confusion(self, totals: dict[str, Any]) -> Tensor | None:
        """Counts [true class, predicted class], where that makes sense."""
        return None


def monitored(objective: Objective, asked: str | None) -> str:
    """What to monitor. ConfigError where it is certain that there will be no such metric."""
    if asked is None:
        return objective.monitor
    ours = type(objective).__module__.startswith("runner.")  # a user's may make other metrics
    names = objective.metric_names() if ours else None
    named = objective.named.metrics if objective.named is not None else ()
    available = [f"val/{name}" for name in (*names, *named)] if names else []
    if available and asked not in (objective.monitor, *available):
        raise unknown(asked, available)
    return asked


def unknown(asked: str, available: Iterable[str], then: str = "") -> ConfigError:
    """The error about a metric that is not there; `then` is what comes of the run."""
    names = list(available)
    near = nearest(asked, names) or next((n for n in names if n == f"val/{asked}"), None)
    shown = [name for name in names if name.count("/") < 2]  # not those of single classes
    guess = f"did you mean {MONITOR}={near}? " if near else ""
    return ConfigError(
        MONITOR, f"there is no metric {asked!r}", f"{guess}there are {', '.join(shown)}{then}"
    )
