"""Create a full training run from a model and data in Python, without CLI or config files."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from runner import rooms
from runner.core.build.arguments import (
    Closeable,
    InMemoryDataset,
    Loss,
    as_batch,
    check_trainable,
    count_samples,
    loss_objective,
)
from runner.core.build.build import build
from runner.core.build.setup import Components
from runner.core.checkpoint.ownership import check_folder
from runner.core.config.composing import compose
from runner.core.config.run_config import RunConfig
from runner.core.data.collate import as_class_indices, infer_sizes
from runner.core.data.dataset import Dataset, class_labels
from runner.core.data.joined import JoinedDataset
from runner.core.data.labels import NO_LOSS
from runner.core.data.preprocessing import DEFAULT_OPENING, OpenOptions
from runner.core.data.split import split_samples
from runner.core.data.stream import adopt_data, is_stream
from runner.core.data.user_dataset import UserDataset
from runner.core.errors import DataError, UsageError
from runner.core.execution.evaluation import evaluate
from runner.core.interfaces.hook import Hook, check_hooks
from runner.core.interfaces.nested import describe, tensors, tree_map
from runner.core.interfaces.run import Run
from runner.core.jobs import run_report as report
from runner.core.objectives.build import meaning_of_targets
from runner.core.optim.optimizer import Optimizer
from runner.core.record.summary import Summary
from runner.core.schemas.data import DataConfig, SplitRule
from runner.core.schemas.models import ModelConfig
from runner.core.train.loop import train

CALLER = "create_training_pipeline"


def create_training_pipeline(
    model: nn.Module,
    data: Any,
    *,
    validation: Any = None,
    loss_fn: Loss | None = None,
    optimizer: Optimizer | None = None,
    level: str = "advanced",
    name: str | None = None,
    folder: str | Path | None = None,
    record: bool = True,
    hooks: Sequence[Hook] = (),
    overrides: Sequence[str] = (),
) -> TrainingPipeline:
    """Create a run that trains `model` on `data`, with checkpoints, metrics and TensorBoard.

    `data` is a map-style data set, or (inputs, target) as tensors or arrays, sample dimension
    first; `validation` is another one, or None to hold out `data.validation` of it. It may also be
    a DataLoader, which is used as it is, or an IterableDataset; then `validation` is another one,
    or `training.validate_every=0` goes without. Without
    `loss_fn` (a mean, of (output, target)) the objective follows from the targets. A given
    `optimizer` keeps its learning rates; otherwise the config's is used. All options of `python -m
    runner` are available through `overrides`, such as `training.epochs=5` or `device=cpu`.

    It is recorded in `folder`, by default a new one in `outputs/runs/<name>/`; `record=False`
    writes nothing. Raises UsageError, ConfigError, DataError or DeviceError.
    """
    check_trainable(CALLER, model, loss_fn, optimizer, overrides, data, validation)
    check_hooks(CALLER, hooks)
    overrides = [*([] if name is None else [f"name={name}"]), *overrides]
    config = compose([f"optimization={level}", *overrides])
    default_name = not any(text.lstrip("+").startswith("name=") for text in overrides)
    config = with_components(config, model, data, rename=default_name)
    own_loss = loss_fn is not None
    if isinstance(data, tuple | list | dict) or not is_stream(data):
        dataset = split_into_dataset(CALLER, model, data, validation, config, own_loss)
    else:
        targets = meaning_of_targets(config.objective, own_loss)
        dataset = adopt_data(data, validation, config.data, OpenOptions(targets=targets))
    run_folder = None
    if record:
        timestamp = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{secrets.token_hex(3)}"
        run_folder = Path(folder or Path("outputs/runs") / config.name / timestamp)
        check_folder(run_folder, config.checkpoint.resume, trains=True)
    components = Components(model, dataset, loss_fn and loss_objective(loss_fn), optimizer)
    resolve_auto = rooms.find("auto", "resolve", "optimization=auto")
    run = build(config, run_folder, resolve_auto(config, run_folder, components))
    run.hooks += hooks
    return TrainingPipeline(run)


@final
class TrainingPipeline(Closeable):
    """A built run; close it, or use it as a context manager."""

    def __init__(self, run: Run) -> None:
        self.run, self.folder = run, run.folder  # None: not recorded

    def train(self) -> Summary:
        """Train to the end and write a report to the folder."""
        try:
            return train(self.run)
        finally:
            if self.folder is not None and (self.folder / "summary.json").exists():
                report.write_recorded_report(self.folder)

    def evaluate(self) -> dict[str, float]:
        """Return the current model's metrics on the validation set (`val/accuracy`, …)."""
        return evaluate(self.run).metrics

    def close(self) -> None:
        """Undo every global switch, and wait for pending file writes."""
        self.run.scope.close()


def with_components(config: RunConfig, model: nn.Module, data: Any, rename: bool) -> RunConfig:
    """Return the config with model and data replaced by the names of these objects."""
    data_options = {f.name: getattr(config.data, f.name) for f in fields(DataConfig)}
    weights, excluded = config.model.weights, config.model.weights_except
    changed = replace(
        config,
        data=DataConfig(**{**data_options, "kind": dotted_class_name(data)}),
        model=ModelConfig(kind=dotted_class_name(model), weights=weights, weights_except=excluded),
    )
    if rename:
        changed.name = f"{dotted_class_name(data).rpartition('.')[2]}-{type(model).__name__}"
    return changed


def dotted_class_name(value: Any) -> str:
    """Return the dotted name of the object's class."""
    if isinstance(value, tuple | list | dict):
        return "given.tensors"
    return f"{type(value).__module__}.{type(value).__qualname__}"


def split_into_dataset(
    caller: str,
    model: nn.Module,
    data: Any,
    validation: Any,
    config: RunConfig,
    own_loss: bool,
) -> Dataset:
    """Split a data set or tensors into train and validation. Raises UsageError or DataError."""
    targets = meaning_of_targets(config.objective, own_loss)
    if isinstance(data, tuple | list | dict):
        weights = (p.dtype for p in model.parameters() if p.is_floating_point())
        is_double = next(weights, None) == torch.float64
        return _make_in_memory(caller, data, validation, config, targets, is_double)
    for argument, value in (("data", data), ("validation", validation)):
        if is_stream(value):
            allowed = "tensors or a data set with __len__ and __getitem__ (loader.dataset)"
            problem = f"must be {allowed} and no batch_sampler, got a {type(value).__name__}"
            raise UsageError(f"{caller}: {argument} {problem}")
    name = dotted_class_name(data)
    if validation is None:
        return UserDataset(data, name, config.data, OpenOptions(targets=targets))
    return JoinedDataset(data, validation, name, config.data, OpenOptions(targets=targets))


def _make_in_memory(
    caller: str, data: Any, validation: Any, config: RunConfig, targets: str, is_double: bool
) -> Dataset:
    nest = _as_tensors(f"{caller}: data", data, is_double)
    train_count = total = count_samples(nest[0], f"{caller}: data")
    if validation is not None:
        validation_nest = _as_tensors(f"{caller}: validation", validation, is_double)
        total += count_samples(validation_nest[0], f"{caller}: validation")
        if _structure(nest) != _structure(validation_nest):
            raise UsageError(f"{caller}: validation must have the same structure as data")
        validation_tensors = iter(tensors(validation_nest))
        nest = tree_map(nest, lambda tensor: torch.cat([tensor, next(validation_tensors)]))
    for tensor in tensors(nest):
        if not tensor.ndim or len(tensor) != total:
            problem = f"data has {total:,} samples, but one of its tensors is {describe(tensor)}"
            raise DataError(f"{caller}: {problem}; the first dimension must be the sample in all")
    inputs, target = nest
    counted, ignored = target, config.objective.ignore_index
    if isinstance(target, Tensor) and ignored is not None and not target.is_floating_point():
        counted = target.long()
        counted = counted.where(counted != ignored, NO_LOSS)
    dataset = TensorDataset(*tensors(nest))
    vars(dataset)["targets"] = counted  # so that labels are not read one by one
    nest = inputs, counted
    sizes, choices = infer_sizes(
        dataset, "data", lambda i: tree_map(nest, lambda t: t[i]), targets=targets
    )
    target = as_class_indices(target, sizes, targets)
    train, held_out = np.split(np.arange(total), [train_count])
    if validation is None:
        labels = class_labels(target, sizes) if isinstance(target, Tensor) else None
        labels = labels if config.data.split is SplitRule.stratified else None  # else random
        train, held_out, _ = split_samples(DEFAULT_OPENING, total, config.data, "data", labels)
    return InMemoryDataset(inputs, target, sizes, (train, held_out), choices)


def _structure(nest: Any) -> str:
    return describe(tree_map(nest, lambda tensor: tensor[:1]))


def _as_tensors(caller: str, data: Any, is_double: bool) -> tuple[Any, Any]:
    """Convert inputs and target to nests of CPU tensors.

    float64 becomes float32, or, as the weights of the model if `is_double`, floats become float64.
    """

    def convert(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: convert(item) for key, item in value.items()}
        if isinstance(value, tuple | list):
            return tuple(convert(item) for item in value)
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(np.ascontiguousarray(value))
        if not isinstance(value, Tensor):
            allowed = "(inputs, target) as tensors or arrays, or a map-style data set"
            raise UsageError(f"{caller} must be {allowed}, got {describe(value)} in it")
        value = value.detach().cpu()
        if is_double and value.is_floating_point():
            return value.double()
        return value.float() if value.dtype == torch.float64 else value

    inputs, target = as_batch(data, caller)
    return convert(inputs), convert(target)
