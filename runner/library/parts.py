"""A model and data that a program has made, as the parts of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset

from runner.batch import Sizes
from runner.composing import compose
from runner.config import RunConfig
from runner.data.config import DataConfig
from runner.data.foreign import Foreign
from runner.data.infer import infer_sizes
from runner.data.order import split
from runner.data.source import Source
from runner.errors import DataError, UsageError
from runner.library import batches
from runner.library.batches import InMemory
from runner.models.config import ModelConfig
from runner.nest import mapped, tensors
from runner.technique import Choice


def config_of(
    model: nn.Module, data: Any, level: str, name: str | None, overrides: Sequence[str]
) -> RunConfig:
    """The config of the overrides, with model and data under their own names."""
    named = [] if name is None else [f"name={name}"]
    config = compose([f"optimization={level}", *named, *overrides])
    if name is None and not any(text.lstrip("+").startswith("name=") for text in overrides):
        config.name = f"{name_of(data).rpartition('.')[2]}-{type(model).__name__}"
    return around(config, model, data)


def around(config: RunConfig, model: nn.Module, data: Any) -> RunConfig:
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


def source_of(who: str, data: Any, validation: Any, config: RunConfig, own_loss: bool) -> Source:
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
    source = Foreign(whole, name_of(data), config.data.validation, config.data.split_seed)
    if parts is not None:
        source.train, source.validation = parts
    return source


def _in_memory(who: str, data: Any, validation: Any, config: RunConfig, own_loss: bool) -> Source:
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
            mapped(self.inputs, lambda t: t[index]),
            mapped(self.target, lambda t: t[index]),
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
