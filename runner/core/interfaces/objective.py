"""The interface of objectives: loss and metrics, and which metric is monitored."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from runner.core.errors import ConfigError
from runner.core.format import nearest

if TYPE_CHECKING:
    from torch import Tensor

MONITOR = "training.monitor"
MODE = "training.monitor_mode"
LOWER_IS_BETTER = ("loss", "mse", "mae", "rmse", "perplexity", "bits_per_byte", "bits_per_token")
"""Our metrics for which lower is better."""
HIGHER_IS_BETTER = re.compile(r"accuracy|top\d+|f1|auroc|r2", re.ASCII)
"""Our metrics for which higher is better."""


class Objective(ABC):
    """A loss to minimise, and metrics.

    `batch_sums` returns sums that add up over batches, on the device; `metrics` computes numbers
    from the totals, once.
    """

    monitor: str = "val/loss"  # the metric that decides which checkpoint is best
    higher_is_better: bool = False
    unit: str = "samples"  # what `weight` counts: samples | tokens
    takes_deferred: bool = False  # accepts `DeferredLogits`
    indices: int | None = None  # targets are indices below this; 0: no indices; None: not known
    ignored: int | None = None  # class index that marks no target
    named: tuple[Any, ...] = ()  # groups of `objective.metrics`, of one interface
    loss_name: str | None = None  # of a loss by `_target_`, for messages
    applies_activation: bool = False  # the loss applies softmax or sigmoid to the output
    from_model: bool = False  # the loss is part of the model's output
    write_log: Callable[..., None] | None = None  # `Run.log` of the run that trains with it

    @abstractmethod
    def __call__(self, output: Any, target: Any) -> Tensor:
        """Return the mean loss over `weight(target)` items, 0-d."""

    @abstractmethod
    def weight(self, target: Any) -> Tensor | int:
        """Return the number of items in the mean; a tensor if it is counted on the device."""

    @abstractmethod
    def batch_sums(self, output: Any, target: Any) -> dict[str, Any]:
        """Return sums over a batch (tensors, or objects with `+`) for `metrics`."""

    @abstractmethod
    def metrics(self, totals: dict[str, Any]) -> dict[str, float]:
        """Return the metrics of the totals, by bare names (`loss`, `accuracy`)."""

    def log(self, values: Mapping[str, float | Tensor], step: int | None = None) -> None:
        """Record own numbers, as `Run.log`; nothing without a run that trains."""
        if self.write_log is not None:
            self.write_log(values, step)

    def used_tensors(self, output: Any) -> list[Any]:
        """Return the tensors of the output that are part of the loss."""
        from runner.core.interfaces.nested import find_logits  # imports torch

        return [find_logits(output)]

    def metric_names(self) -> list[str] | None:
        """Return the names of all possible metrics; None if unknown."""
        return None

    def rises(self, metric: str) -> bool | None:
        """Whether a higher value of `metric` (`val/…`) is better; None if nothing declares it."""
        if metric == self.monitor and _declares_direction(self):
            return self.higher_is_better
        name = metric.removeprefix("val/")
        for group in self.named:
            if name in group.metrics:
                return bool(rises) if (rises := group.rises(name)) is not None else None
        return rises_by_name(metric)

    def all_batch_sums(self, output: Any, target: Any) -> dict[str, Any]:
        """Return the sums of `batch_sums` and those of `objective.metrics`."""
        sums = self.batch_sums(output, target)
        return sums | {group.key: group.batch_sums(output, target) for group in self.named}

    def all_metrics(self, totals: dict[str, Any]) -> dict[str, float]:
        """Return `metrics` and those of `objective.metrics`."""
        groups = {group.key: group for group in self.named if group.key in totals}
        values = self.metrics({name: sums for name, sums in totals.items() if name not in groups})
        for key, group in groups.items():
            values = {**values, **totals[key].compute(group)}
        return values

    def confusion(self, totals: dict[str, Any]) -> Tensor | None:
        """Return counts [true class, predicted class], or None."""
        return None

    def has_constant_output(self, totals: dict[str, Any], confusion: Tensor | None) -> bool:
        """Whether all predictions are one class, of samples of several, or one number."""
        if confusion is None:
            return False
        true, predicted = (int(confusion.sum(i).count_nonzero()) for i in (1, 0))
        return predicted == 1 < true


def _declares_direction(objective: Objective) -> bool:
    """Whether the class that sets `monitor`, or one derived from it, sets `higher_is_better`."""
    classes = type(objective).__mro__

    def depth(name: str) -> int:
        """Return how far up the bases the attribute is set; 0 if by the object itself."""
        if name in vars(objective):
            return 0
        return next(i for i, cls in enumerate(classes) if name in vars(cls))

    own = depth("higher_is_better")
    return classes[own] is not Objective and own <= depth("monitor")


def rises_by_name(metric: str) -> bool | None:
    """Whether a higher value of one of our metrics (`val/…`) is better; None for other names."""
    name = metric.removeprefix("val/")
    if name in LOWER_IS_BETTER:
        return False
    return True if HIGHER_IS_BETTER.fullmatch(name) else None


def resolve_monitor(objective: Objective, requested: str | None) -> str:
    """Return the metric to monitor; ConfigError if it is certain not to exist."""
    if requested is None:
        return objective.monitor
    if requested.startswith("user/") and requested != "user/":  # a number of `Run.log`
        return requested
    is_ours = type(objective).__module__.startswith("runner.")  # a user's may have others
    names = objective.metric_names() if is_ours else None
    named_metrics = [name for group in objective.named for name in group.metrics]
    available = [f"val/{name}" for name in (*names, *named_metrics)] if names else []
    if available and requested not in (objective.monitor, *available):
        raise unknown_metric(requested, available)
    return requested


def unknown_direction(metric: str) -> ConfigError:
    """Return the error for a metric of which nothing declares whether higher values are better."""
    problem = f"cannot be inferred for {metric}"
    return ConfigError(MODE, problem, "use min if lower values are better, max if higher ones")


def unknown_metric(requested: str, available: Iterable[str], suffix: str = "") -> ConfigError:
    """Return the error for a metric that does not exist; `suffix` says what happens to the run."""
    names = list(available)
    with_prefix = f"val/{requested}"
    suggestion = nearest(requested, names) or (with_prefix if with_prefix in names else None)
    shown = [name for name in names if name.count("/") < 2]  # without those of single classes
    advice = f"did you mean {MONITOR}={suggestion}? " if suggestion else ""
    problem = f"unknown metric {requested!r}"
    if requested.startswith("user/"):
        problem = f"nothing has logged {requested} (run.log) by the end of a validation"
    return ConfigError(MONITOR, problem, f"{advice}available: {', '.join(shown)}{suffix}")
