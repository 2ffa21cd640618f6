"""The user's metrics of `objective.metrics`: functions, and classes with `update` and `compute`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from functools import partial
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from runner.core.errors import ConfigError
from runner.core.findings import Choice
from runner.core.format import count_noun
from runner.core.interfaces.batch import Sizes, batch_size_of
from runner.core.interfaces.nested import find_logits, named_leaves, tree_map
from runner.core.interfaces.objective import LOWER_IS_BETTER, Objective, rises_by_name
from runner.core.objectives.custom import constructor_sizes
from runner.core.objectives.model_output import float_logits, sum_float64
from runner.core.objectives.named_metrics import (
    METRICS_KEY,
    MetricStarter,
    MetricState,
    NamedMetrics,
    build_named_metrics,
    name_in_errors,
    unscaled_values,
)
from runner.core.schemas.models import ObjectiveConfig
from runner.core.security.registry import construct


class UserMetrics:
    """Means over samples of functions' values, and results of objects with `update` and `compute`.

    They get output and target as a user's loss does; predictions of numbers are in the target's
    unit and shape, float64. `remake` makes a new object, for those without `reset`. `shared`:
    several processes evaluate, each on its samples.
    """

    key = f"{METRICS_KEY} of the user"  # among the sums

    def __init__(
        self, metrics: dict[str, Any], remake: dict[str, Callable[[], Any]], sizes: Sizes
    ) -> None:
        self.metrics, self.remake, self.sizes, self.shared = metrics, remake, sizes, False
        self.classes = [name for name, x in metrics.items() if _is_class_metric(x)]

    def start(self, batch: tuple[Any, Any]) -> dict[str, Any]:
        """Return the objects with `update`, without state: after `reset`, or new ones."""
        objects: dict[str, Any] = {}
        for name in self.classes:
            metric = self.metrics[name]
            if callable(reset := getattr(metric, "reset", None)):
                reset()
            else:
                metric = self.remake[name]()
            if isinstance(metric, nn.Module):
                metric.to(next(leaf for _, leaf in named_leaves(batch[1])).device)
            objects[name] = metric
        return objects

    def rises(self, name: str) -> bool | None:
        """Whether a higher value is better: its `higher_is_better`, else by its name."""
        declared = getattr(self.metrics[name], "higher_is_better", None)
        return rises_by_name(name) if declared is None else bool(declared)

    def batch_sums(self, output: Any, target: Any) -> UserMetricSums:
        """Return a batch's addable sums; ConfigError for a function that returns no value."""
        predicted = find_logits(output)
        is_number = self.sizes.task == "regression" and isinstance(target, Tensor)
        if is_number and isinstance(predicted, Tensor) and predicted.numel() == target.numel():
            output, target = unscaled_values(self.sizes, float_logits(predicted), target)
        samples, state = batch_size_of(target), None
        if self.classes:
            # copies: the output of a captured graph is overwritten by its next call
            batch = tree_map((output, target), lambda x: x.detach().clone())
            state = MetricState(self, batch)
        sums = dict[str, Tensor]()
        for name, function in self.metrics.items():
            if name not in self.classes:
                with name_in_errors(name):
                    sums[name] = _sample_sum(name, function(output, target), samples)
        return UserMetricSums(sums, samples, state)


class UserMetricSums:
    """Sums of functions' values over samples, and the state of classes; addable."""

    def __init__(self, sums: dict[str, Tensor], samples: int, state: MetricState | None) -> None:
        self.sums, self.samples, self.state = sums, samples, state

    def __add__(self, other: UserMetricSums) -> UserMetricSums:
        sums = {name: total + other.sums[name] for name, total in self.sums.items()}
        state = None if self.state is None or other.state is None else self.state + other.state
        return UserMetricSums(sums, self.samples + other.samples, state)

    def __getstate__(self) -> dict[str, Any]:
        """Return what other processes get, on the CPU."""
        return {**vars(self), "sums": tree_map(self.sums, lambda x: x.cpu())}

    def compute(self, starter: MetricStarter) -> dict[str, float]:
        """Return the metrics by name. Host sync."""
        means = {name: float(total) / self.samples for name, total in self.sums.items()}
        return means | (self.state.compute(starter) if self.state is not None else {})


def build_metrics(
    config: ObjectiveConfig,
    objective: Objective,
    sizes: Sizes,
    resolve: Callable[[str, str], Any],
    shared: bool,
) -> list[Choice]:
    """Give the objective `objective.metrics`: dotted names are the user's, others torchmetrics'.

    Returns the choices made. ConfigError or SecurityError for a name that is no metric, is not
    trusted, or is that of another metric. `shared`: several processes evaluate, each some samples.
    """
    groups: list[NamedMetrics | UserMetrics] = []
    choices: list[Choice] = []
    if names := [name for name in config.metrics if "." not in name]:
        named, choices = build_named_metrics(names, sizes, config.ignore_index)
        groups.append(named)
    if dotted := [name for name in config.metrics if "." in name]:
        taken = {*names, *(objective.metric_names() or ("accuracy", *LOWER_IS_BETTER))}
        groups.append(build_user_metrics(dotted, sizes, resolve, taken))
    for group in groups:
        group.shared = shared
    objective.named = tuple(groups)
    return choices


def build_user_metrics(
    targets: Sequence[str],
    sizes: Sizes,
    resolve: Callable[[str, str], Any],
    taken: Collection[str] = (),
) -> UserMetrics:
    """Import the functions and classes `targets`; ConfigError for one that is no metric.

    A class gets the sizes of the data, and `class_names`, that its constructor names.
    """
    metrics: dict[str, Any] = {}
    remake: dict[str, Callable[[], Any]] = {}
    for target in targets:
        name, metric = target.rpartition(".")[2], resolve(target, METRICS_KEY)
        if name in {*metrics, *taken}:
            raise ConfigError(METRICS_KEY, f"two metrics are called {name!r}", "rename yours")
        if isinstance(metric, type):
            remake[name] = partial(construct, metric, {}, constructor_sizes(sizes), METRICS_KEY)
            try:
                metric = remake[name]()
            except ConfigError as error:
                problem, _, _ = str(error).partition(": ")[2].partition(";")
                raise ConfigError(
                    METRICS_KEY, f"{target}: {problem}", "give it a default"
                ) from None
        if not _is_class_metric(metric):
            _check_function(metric, target)
        metrics[name] = metric
    return UserMetrics(metrics, remake, sizes)


def _is_class_metric(metric: Any) -> bool:
    return all(callable(getattr(metric, name, None)) for name in ("update", "compute"))


def _check_function(function: Any, target: str) -> None:
    fix = "define f(output, target), or a class with update(output, target) and compute()"
    if not callable(function):
        raise ConfigError(METRICS_KEY, f"{target} has no update and compute", fix)
    try:
        inspect.signature(function).bind(None, None)
    except ValueError:  # written in C without a signature: checked at the first call
        return
    except TypeError as error:
        problem = f"{target} cannot be called as f(output, target): {error}"
        raise ConfigError(METRICS_KEY, problem, fix) from error


def _sample_sum(name: str, value: Any, samples: int) -> Tensor:
    """Return the sum over samples of a value each, or of their mean; 0-d, float64."""
    if isinstance(value, Real | np.ndarray):
        value = torch.as_tensor(np.asarray(value, np.float64))
    is_value = isinstance(value, Tensor) and not value.is_complex()
    if not is_value or value.shape not in ((), (samples,)):
        shape = f"shape {list(value.shape)}" if is_value else f"a {type(value).__name__}"
        problem = f"{name} returned {shape} for {count_noun(samples, 'sample')}"
        fix = f"return a value a sample, [{samples}], or the mean of the batch, []"
        raise ConfigError(METRICS_KEY, problem, fix)
    return sum_float64(value) * (1 if value.ndim else samples)
