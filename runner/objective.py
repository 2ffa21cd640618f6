"""What is minimised."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Tensor


class Objective(ABC):
    """What is minimised, and the metrics that say how well it went.

    `tally` returns sums that add up over batches, on the device; `metrics` turns the grand
    totals into numbers, once.
    """

    monitor: str = "val/loss"  # the metric that decides which checkpoint is best
    higher_is_better: bool = False
    FALLING: ClassVar = (
        "loss",
        "mse",
        "mae",
        "rmse",
        "perplexity",
        "bits_per_byte",
        "bits_per_token",
    )
    unit: str = "samples"  # what `weight` counts: samples | tokens
    takes_deferred: bool = False  # logits that an output layer put off (`runner.deferred`)
    indices: int | None = None  # targets are indices below this; 0: no indices; None: not known
    ignored: int | None = None  # a class index that stands for no target

    @abstractmethod
    def __call__(self, output: Any, target: Any) -> Tensor:
        """The mean loss over `weight(target)` items, 0-d."""

    @abstractmethod
    def weight(self, target: Any) -> Tensor | int:
        """How many items the mean is over; a tensor where counting needs the device."""

    @abstractmethod
    def tally(self, output: Any, target: Any) -> dict[str, Tensor]:
        """Sums over this batch from which `metrics` is computed."""

    @abstractmethod
    def metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        """The metrics of everything tallied, by bare names (`loss`, `accuracy`)."""

    def rises(self, metric: str) -> bool:
        """Whether more of `metric` (`val/…`) is better."""
        if metric == self.monitor:
            return self.higher_is_better
        return metric.rpartition("/")[2] not in self.FALLING

    def confusion(self, totals: dict[str, Tensor]) -> Tensor | None:
        """Counts [true class, predicted class], where that makes sense."""
        return None
