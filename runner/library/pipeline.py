"""A whole run around a model and data that a program has made: no command line, no config file."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset

from runner.benchmark.auto.resolve import resolve_auto
from runner.build import Components, build
from runner.composing import compose
from runner.config import RunConfig
from runner.data.batch import Sizes
from runner.data.config import DataConfig
from runner.data.dataset import Dataset
from runner.data.infer import infer_sizes
from runner.data.nested import tensors, tree_map
from runner.data.order import split
from runner.data.user_dataset import UserDataset
from runner.errors import DataError, UsageError
from runner.library import batches
from runner.library.batches import InMemory
from runner.library.lazy_run import check_trainable, objective_of
from runner.models.config import ModelConfig
from runner.optim.optimizer import Optimizer
from runner.report import run as report
from runner.techniques.base import Choice
from runner.training.evaluation import evaluate
from runner.training.hook import Hook
from runner.training.loop import train
from runner.training.run import Run
from runner.training.summary import Summary

WHO = "create_training_pipeline"


def create_training_pipeline(
    model: nn.Module,
    data: Any,
    *,
    validation: Any = None,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    optimizer: Optimizer | None = None,
    level: str = "advanced",
    name: str | None = None,
    folder: str | Path | None = None,
    record: bool = True,
    hooks: Sequence[Hook] = (),
    overrides: Sequence[str] = (),
) -> Pipeline:
    """A run that trains `model` on `data`, with checkpoints, metrics and TensorBoard.

    `data` is a map-style data set, or (inputs, target) as tensors or arrays, the sample first;
    `validation` is another such, or None to hold `data.validation` of it out. Without a `loss_fn`
    (the mean of (output, target)) the objective follows from the targets. An `optimizer` of the
    caller's keeps its learning rates; without one it is that of the config. All that `python -m
    runner` has is there by `overrides`, such as `training.epochs=5` or `device=cpu`.

    It is recorded in `folder`, or in a new one under `outputs/runs/<name>/`; `record=False` writes
    nothing. Raises UsageError, ConfigError, DataError or DeviceError.
    """
    check_trainable(WHO, model, loss_fn, optimizer, overrides)
    config = config_of(model, data, level, name, overrides)
    source = source_of(WHO, data, validation, config, own_loss=loss_fn is not None)
    objective = None if loss_fn is None else objective_of(loss_fn)
    where = _folder(folder, config.name) if record else None
    given = Components(model, source, objective, optimizer)
    run = build(config, where, resolve_auto(config, where, given))
    run.hooks += hooks
    return Pipeline(run)


@final
class Pipeline:
    """A run, ready; close it when done, or use it as a context manager."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @property
    def folder(self) -> Path | None:
        """Where the run is recorded."""
        return self.run.folder

    def train(self) -> Summary:
        """Train to the end and say how it went; a report is left in the folder."""
        try:
            return train(self.run)
        finally:
            if self.folder is not None and (self.folder / "summary.json").exists():
                report.write(Summary.read(self.folder), self.folder)

    def evaluate(self) -> dict[str, float]:
        """The metrics of the model as it is, over the validation set (`val/accuracy`, …)."""
        return evaluate(self.run).metrics

    def close(self) -> None:
        """Undo every global switch, and wait for what is being written."""
        self.run.scope.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _folder(folder: str | Path | None, name: str) -> Path:
    if folder is not None:
        return Path(folder)
    return (
        Path("outputs/runs") / name / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{secrets.token_hex(3)}"
    )


def config_of(
    model: nn.Module, data: Any, level: str, name: str | None, overrides: Sequence[str]
) -> RunConfig:
    """The config of the overrides, with model and data under their own names."""
    named = [] if name is None else [f"name={name}"]
    config = compose([f"optimization={level}", *named, *overrides])
    if name is None and not any(text.lstrip("+").startswith("name=") for text in overrides):
        config.name = f"{name_of(data).rpartition('.')[2]}-{type(model).__name__}"
    return with_components(config, model, data)


def with_components(config: RunConfig, model: nn.Module, data: Any) -> RunConfig:
    """The same config about this model and these data."""
    common = {f.name: getattr(config.data, f.name) for f in fields(DataConfig)}
    asked = config.model
    return replace(
        config,
        data=DataConfig(**{**common, "kind": name_of(data)}),
        model=ModelConfig(
            kind=name_of(model), weights=asked.weights, weights_except=asked.weights_except
        ),
    )


def name_of(thing: Any) -> str:
    """Its class by its dotted name."""
    if isinstance(thing, tuple | list | dict):
        return "given.tensors"
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def source_of(who: str, data: Any, validation: Any, config: RunConfig, own_loss: bool) -> Dataset:
    """A map-style data set or tensors, in two parts. Raises UsageError or DataError."""
    if isinstance(data, DataLoader):
        raise UsageError(
            f"{who}: data is a DataLoader; give its data set, loader.dataset, and "
            f"overrides=['training.batch_size={data.batch_size}']"
        )
    if isinstance(data, IterableDataset):
        raise UsageError(
            f"{who}: data is an IterableDataset, whose samples cannot be fetched by index; give "
            "one with __len__ and __getitem__, or tensors"
        )
    parts = None
    if isinstance(data, tuple | list | dict):
        return _in_memory(who, data, validation, config, own_loss)
    whole = data
    if validation is not None:
        whole = ConcatDataset([data, validation])
        for name in ("classes", "vocab", "sizes"):
            if getattr(data, name, None) is not None:
                setattr(whole, name, getattr(data, name))
        parts = _two_parts(len(data), len(validation))
    source = UserDataset(whole, name_of(data), config.data.validation, config.data.split_seed)
    if parts is not None:
        source.train, source.validation = parts
    return source


def _in_memory(who: str, data: Any, validation: Any, config: RunConfig, own_loss: bool) -> Dataset:
    inputs, target = _tensors(who, data, "data")
    n = batches.samples(inputs, f"{who}: data")
    if validation is None:
        parts = split(n, config.data.validation, config.data.split_seed, "data")
    else:
        more = _tensors(who, validation, "validation")
        parts = _two_parts(n, batches.samples(more[0], f"{who}: validation"))
        inputs, target = _joined(who, inputs, more[0]), _joined(who, target, more[1])
        n += len(parts[1])
    for tensor in tensors((inputs, target)):
        if not tensor.ndim or len(tensor) != n:
            raise DataError(
                f"{who}: data has {n:,} samples, and one of its tensors is "
                f"{batches.describe(tensor)}; the first dimension of all of them is the sample"
            )
    sizes, choices = _sizes(Rows(inputs, target, n), own_loss)
    return InMemory(inputs, target, sizes, parts, choices)


class Rows:
    """Tensors as a map-style data set, for the sizes to be read off it."""

    def __init__(self, inputs: Any, target: Any, n: int) -> None:
        self.inputs, self.target, self.n = inputs, target, n
        self.targets = target if isinstance(target, Tensor) and target.ndim == 1 else None

    def __len__(self) -> int:
        return self.n

    def sample(self, index: int) -> tuple[Any, Any]:
        """Inputs and target of one sample."""
        return (
            tree_map(self.inputs, lambda t: t[index]),
            tree_map(self.target, lambda t: t[index]),
        )


def _sizes(rows: Rows, own_loss: bool) -> tuple[Sizes, tuple[Choice, ...]]:
    try:
        return infer_sizes(rows, "data", rows.sample)
    except DataError:
        if own_loss:
            return Sizes("given"), ()  # the caller's loss knows what its targets are
        raise


def _tensors(who: str, data: Any, what: str) -> tuple[Any, Any]:
    """Inputs and target as nests of tensors; numbers in double precision become single."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, tuple | list):
            return tuple(plain(item) for item in value)
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(np.ascontiguousarray(value))
        if not isinstance(value, Tensor):
            raise UsageError(
                f"{who}: {what} holds {batches.describe(value)}; give (inputs, target) as tensors "
                "or arrays, or a map-style data set"
            )
        value = value.detach().cpu()
        return value.float() if value.dtype == torch.float64 else value

    inputs, target = batches.as_batch(data, f"{who}: {what}")
    return plain(inputs), plain(target)


def _joined(who: str, one: Any, other: Any) -> Any:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.cat([one, other])
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return {key: _joined(who, one[key], other[key]) for key in one}
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return tuple(_joined(who, a, b) for a, b in zip(one, other, strict=True))
    raise UsageError(f"{who}: validation has not the form of data")


def _two_parts(train: int, validation: int) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(train), np.arange(train, train + validation)
