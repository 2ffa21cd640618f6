"""torchmetrics by name, over the whole validation set."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from runner.core.device.device_errors import is_device_error, is_out_of_memory
from runner.core.errors import ConfigError, RunnerError, install_command
from runner.core.findings import Choice
from runner.core.format import nearest
from runner.core.interfaces.batch import Sizes
from runner.core.interfaces.nested import tree_map
from runner.core.objectives import model_output
from runner.core.preserved_state import float32_default
from runner.core.record.text import describe_error

METRICS_KEY = "objective.metrics"
SAMPLE_ROWS = 8  # per class, or in all, of the data that a metric is tried on
Metrics = dict[str, Any]
"""torchmetrics.Metric objects by name; the package has no types."""


class NamedMetrics:
    """torchmetrics on class probabilities, or on values in the target's unit.

    Targets equal to `ignored` are left out; all others have the same weight.
    """

    key = f"{METRICS_KEY} of torchmetrics"  # among the sums

    shared = False

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
    values = sizes.in_target_unit(output.to(dtype))
    rows = (len(target), -1) if target.numel() > len(target) else (-1,)
    return values.reshape(rows), target.to(dtype, copy=True).reshape(rows)


class MetricStarter(Protocol):
    """Makes the objects with `update` and `compute`, by name."""

    shared: bool  # several processes evaluate, each on its samples

    def start(self, batch: tuple[Any, Any]) -> Metrics:
        """Return them without state, for batches like this."""


class MetricState:
    """Objects with `update` and `compute` over batches; `+` adds to the first operand in place.

    Processes that share the samples keep their batches, on the CPU: states cannot be added.
    """

    def __init__(self, starter: MetricStarter, batch: tuple[Any, Any]) -> None:
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
    def compute(self, starter: MetricStarter) -> dict[str, float]:
        """Return the metrics over all batches by name. Host sync."""
        self._update(starter)
        values = dict[str, float]()
        for name, metric in self.started.items():
            with name_in_errors(name):
                values[name] = _as_number(metric.compute(), name)
        return values

    @float32_default()
    def _update(self, starter: MetricStarter) -> None:
        self.started = self.started or starter.start(self.batches[0])
        for batch in self.batches:
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
    """Construct metrics for the data's task; return them and the choices of averaging.

    ConfigError for an unknown name, or if torchmetrics is not installed.
    """
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
