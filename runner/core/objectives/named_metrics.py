"""Metrics of `objective.metrics` by name: torchmetrics, and the user's functions and classes."""

from __future__ import annotations

import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Real
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from runner.core.data.target_scale import in_target_unit
from runner.core.device.device_errors import is_device_error, is_out_of_memory
from runner.core.errors import ConfigError, RunnerError, install_command
from runner.core.findings import Choice
from runner.core.format import count_noun, nearest
from runner.core.interfaces.batch import Sizes, batch_size_of
from runner.core.interfaces.nested import find_logits, named_leaves, tree_map
from runner.core.interfaces.objective import LOWER_IS_BETTER, Objective, rises_by_name
from runner.core.objectives import model_output
from runner.core.objectives.custom import check_call, constructor_sizes
from runner.core.preserved_state import float32_default
from runner.core.record.text import describe_error
from runner.core.schemas.models import ObjectiveConfig
from runner.core.security.registry import construct

METRICS_KEY = "objective.metrics"
SAMPLE_ROWS = 8  # per class, or in all, of the data that a metric is tried on
Metrics = dict[str, Any]
"""torchmetrics.Metric objects by name; the package has no types."""


class MetricGroup(ABC):
    """Metrics by name; `shared`: several processes evaluate, each on its samples."""

    shared = False

    @abstractmethod
    def start(self, batch: tuple[Any, Any]) -> Metrics:
        """Return objects with `update` and `compute`, without state, for batches like this."""


class NamedMetrics(MetricGroup):
    """torchmetrics on class probabilities, or values in the target's unit.

    Targets equal to `ignored` are left out; all others have the same weight.
    """

    key = f"{METRICS_KEY} of torchmetrics"  # among the sums

    def __init__(self, metrics: Metrics, sizes: Sizes, ignored: int | None) -> None:
        self.metrics, self.sizes, self.ignored = metrics, sizes, ignored

    def batch_sums(self, output: Any, target: Any) -> MetricState:
        """Return a batch's addable state; ConfigError if the batch does not fit the task."""
        if not isinstance(target, Tensor):
            problem = f"need one tensor of targets, not a {type(target).__name__}"
            raise ConfigError(METRICS_KEY, problem, "leave them out")
        predicted = model_output.logits(output).detach()
        if self.sizes.task == "classification":
            batch = self._class_probabilities(predicted, target)
        else:
            batch = unscaled_values(self.sizes, predicted, target)
        return MetricState(self, batch)

    def start(self, batch: tuple[Any, Any]) -> Metrics:
        """Return copies of the metrics for batches of that device and dtype."""
        predicted, target = batch
        copies = {name: m.clone().to(predicted.device) for name, m in self.metrics.items()}
        for metric in copies.values() if target.is_floating_point() else ():
            metric.set_dtype(target.dtype)
        return copies

    def rises(self, name: str) -> bool | None:
        """Whether a higher value of that metric is better; None if torchmetrics does not say."""
        higher: bool | None = self.metrics[name].higher_is_better
        return higher

    def _class_probabilities(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities [n, classes] (of two classes: [n], of class 1) and labels [n]."""
        width = output.shape[1] if output.ndim > 1 and output.numel() != target.numel() else 1
        rows = output.movedim(1, -1).reshape(-1, width) if output.ndim > 1 else output[:, None]
        target = target.flatten().long()
        widths = {self.sizes.classes, 1} if self.sizes.classes == 2 else {self.sizes.classes}
        if len(rows) != len(target) or width not in widths:
            problem = f"the model returns {list(output.shape)} for labels of {len(target)} samples"
            fix = f"return a number for each of {self.sizes.classes} classes, or leave them out"
            raise ConfigError(METRICS_KEY, problem, fix)
        mask = target != self.ignored if self.ignored is not None else slice(None)
        rows, target = rows[mask].float(), target[mask].clone()
        if width == 1:
            return rows[:, 0].sigmoid(), target
        probabilities = rows.softmax(1)
        return probabilities if width > 2 else probabilities[:, 1], target


def unscaled_values(sizes: Sizes, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in the target's unit, float64 if the device has it; [n] or [n, targets]."""
    if output.numel() != target.numel():
        problem = f"the model returns {list(output.shape)} for targets {list(target.shape)}"
        raise ConfigError(METRICS_KEY, problem, "return as many numbers as there are targets")
    dtype = torch.float32 if output.device.type == "mps" else torch.float64
    values = in_target_unit(sizes, output.to(dtype))
    rows = (len(target), -1) if target.numel() > len(target) else (-1,)
    return values.reshape(rows), target.to(dtype, copy=True).reshape(rows)


class MetricState:
    """Objects with `update` and `compute` over batches; `+` adds to the first operand in place.

    Processes that share the samples keep their batches, on the CPU: states cannot be added.
    """

    def __init__(self, starter: MetricGroup, batch: tuple[Any, Any]) -> None:
        self.starter, self.started = starter, Metrics()
        self.batches = [tree_map(batch, lambda x: x.cpu()) if starter.shared else batch]

    def __getstate__(self) -> dict[str, Any]:
        """Return what other processes get, which have a starter of their own."""
        return {"batches": self.batches, "started": Metrics()}

    def __add__(self, other: MetricState) -> Self:
        self.batches += other.batches
        if "starter" in vars(self) and not self.starter.shared:
            self._update(self.starter)
        return self

    @float32_default()
    def compute(self, starter: MetricGroup) -> dict[str, float]:
        """Return the metrics over all batches by name. Host sync."""
        self._update(starter)
        values = dict[str, float]()
        for name, metric in self.started.items():
            with name_in_errors(name):
                values[name] = _as_number(metric.compute(), name)
        return values

    @float32_default()
    def _update(self, starter: MetricGroup) -> None:
        self.started = self.started or starter.start(self.batches[0])
        for batch in self.batches:
            if isinstance(batch[1], Tensor) and not batch[1].numel():
                continue  # all of its targets are ignored
            for name, metric in self.started.items():
                with name_in_errors(name):
                    metric.update(*batch)
        self.batches = []


@contextmanager
def name_in_errors(name: str) -> Iterator[None]:
    """Replace an error of a metric's code by a ConfigError with the metric, and the line of it."""
    try:
        yield
    except Exception as error:
        if isinstance(error, RunnerError) or is_out_of_memory(error) or is_device_error(error):
            raise
        problem = "{} raised {} ({}:{})".format(name, *describe_error(error))
        raise ConfigError(METRICS_KEY, problem, "correct it, or leave it out") from error


def _as_number(value: Any, name: str) -> float:
    """Return a result of `compute` as a number; ConfigError for anything else. Host sync."""
    is_number = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real)
    if not is_number:
        shape = list(value.shape) if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ConfigError(METRICS_KEY, f"compute of {name} returned {shape}", "return one number")
    return float(value)


def build_named_metrics(
    names: Sequence[str], sizes: Sizes, ignored: int | None
) -> tuple[NamedMetrics, list[Choice]]:
    """Construct torchmetrics for the data's task, and choices of averaging; ConfigError."""
    classes, arguments = _metric_classes(sizes)
    metrics, choices = Metrics(), []
    for name in names:
        if name not in classes:
            near = nearest(name, classes)
            fix = f"did you mean {near}?" if near else f"available: {', '.join(sorted(classes))}"
            raise ConfigError(METRICS_KEY, f"torchmetrics has no {name!r} for {sizes.task}", fix)
        parameters = inspect.signature(classes[name]).parameters
        chosen = {key: value for key, value in arguments.items() if key in parameters}
        if "average" in chosen:
            # the default, micro, of most metrics equals the accuracy
            chosen["average"] = "micro" if name == "Accuracy" else "macro"
            domain = "all samples" if name == "Accuracy" else "the classes, equally weighted"
            value = f"{name}: {chosen['average']}"
            choices.append(Choice(METRICS_KEY, value, f"the mean over {domain}"))
        metrics[name] = _construct_metric(name, classes[name], chosen, sizes)
    if metrics and sizes.task == "classification" and sizes.classes == 2:
        positive = sizes.class_names[1] if len(sizes.class_names) == 2 else "1"
        choices.append(Choice(METRICS_KEY, f"positive: {positive}", "the second class of two"))
    return NamedMetrics(metrics, sizes, ignored), choices


def _metric_classes(sizes: Sizes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the metric classes for the task by name, and constructor arguments."""
    try:
        from torchmetrics import Metric, classification, regression
    except ImportError as error:
        problem = f"needs torchmetrics, which cannot be imported: {error}"
        raise ConfigError(METRICS_KEY, problem, install_command("metrics")) from None
    if sizes.task == "regression":
        classes = {n: c for n, c in vars(regression).items() if _is_metric_class(c, Metric)}
        return classes, {"num_outputs": sizes.classes or 1}
    if sizes.task != "classification" or not sizes.classes:
        problem = f"need classification or regression, got {sizes.task}"
        raise ConfigError(METRICS_KEY, problem, "leave them out")
    prefix = "Binary" if sizes.classes == 2 else "Multiclass"
    classes = {
        name.removeprefix(prefix): member
        for name, member in vars(classification).items()
        if name.startswith(prefix) and _is_metric_class(member, Metric)
    }
    if sizes.classes == 2:
        return classes, {}
    return classes, {"num_classes": sizes.classes, "average": "macro"}


def _is_metric_class(member: Any, base: type) -> bool:
    return isinstance(member, type) and issubclass(member, base)


@float32_default()
def _construct_metric(name: str, factory: Any, arguments: Mapping[str, Any], sizes: Sizes) -> Any:
    """Construct a metric and try it on a few samples; ConfigError unless it gives one number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about memory, and about so few samples
        try:
            metric = factory(**arguments)
            copy = metric.clone()
            copy.update(*_samples(sizes))
            value = copy.compute()
        except Exception as error:
            reason = str(error).partition("\n")[0]
            problem = f"{name} does not fit: {reason}"
            raise ConfigError(METRICS_KEY, problem, "leave it out") from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ConfigError(METRICS_KEY, f"{name} is not a single number", "leave it out")
    return metric


def _samples(sizes: Sizes) -> tuple[Tensor, Tensor]:
    classes = sizes.classes or 1
    if sizes.task == "regression":
        target = torch.linspace(1, 2, SAMPLE_ROWS * classes, dtype=torch.float32)
        target = target.reshape(SAMPLE_ROWS, classes)
        target = target if classes > 1 else target[:, 0]
        steps = torch.linspace(0, 1, SAMPLE_ROWS, dtype=torch.float32)
        return target + steps.reshape(SAMPLE_ROWS, *[1] * (target.ndim - 1)).cos(), target
    target = torch.arange(SAMPLE_ROWS * classes) % classes
    steps = torch.arange(SAMPLE_ROWS * classes * classes, dtype=torch.float32)
    probabilities = steps.sin().reshape(-1, classes).softmax(1)
    return (probabilities if classes > 2 else probabilities[:, 1]), target


# -- the user's metrics ----------------------------------------------------------------------------


class UserMetrics(MetricGroup):
    """Means over samples of functions' values, and results of objects with `update` and `compute`.

    They get output and target as a user's loss does; predictions of numbers are in the target's
    unit and shape, float64. `remake` makes a new object, for those without `reset`.
    """

    key = f"{METRICS_KEY} of the user"  # among the sums

    def __init__(
        self, metrics: dict[str, Any], remake: dict[str, Callable[[], Any]], sizes: Sizes
    ) -> None:
        self.metrics, self.remake, self.sizes = metrics, remake, sizes
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
            predicted = model_output.float_logits(predicted)
            output, target = unscaled_values(self.sizes, predicted, target)
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

    def compute(self, starter: MetricGroup) -> dict[str, float]:
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
                argument = error.key.rpartition(".")[2]
                problem = f"{target} needs a value for its argument {argument}"
                raise ConfigError(METRICS_KEY, problem, "give it a default") from None
        if not _is_class_metric(metric):
            fix = "define f(output, target), or a class with update(output, target) and compute()"
            if not callable(metric):
                raise ConfigError(METRICS_KEY, f"{target} has no update and compute", fix)
            check_call(metric, f"{target} cannot be called as f(output, target)", METRICS_KEY, fix)
        metrics[name] = metric
    return UserMetrics(metrics, remake, sizes)


def _is_class_metric(metric: Any) -> bool:
    return all(callable(getattr(metric, name, None)) for name in ("update", "compute"))


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
    return model_output.sum_float64(value) * (1 if value.ndim else samples)
