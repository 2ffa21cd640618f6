"""Check the library's arguments and convert them to the form that a run uses."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from numbers import Integral
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from runner.core.build.setup import Components
from runner.core.config.composed import ATTRIBUTE
from runner.core.data.collate import split_pair
from runner.core.data.dataset import Dataset, class_labels
from runner.core.data.stream import is_stream
from runner.core.errors import RunnerError, UsageError
from runner.core.findings import Choice
from runner.core.interfaces.batch import LABEL_KEYS, Batch, Inputs, Sizes
from runner.core.interfaces.nested import describe, tensors, tree_map
from runner.core.interfaces.objective import Objective
from runner.core.objectives.custom import CustomObjective
from runner.core.optim.optimizer import Optimizer, incompatibility, sparse_embeddings
from runner.core.record.text import shorten

Loss = Callable[[Any, Any], Tensor]
METRIC_KEYS = ("objective.metrics", "objective.ignore_index")
ACTING_KEYS = ("optimizer.ema", "optimizer.ema_warmup", "optimizer.freeze")
"""Keys of the optimizer's group that act on a given optimizer, too."""
SPLIT_KEYS = ("validation", "split", "folds", "fold")
"""Keys of `data` that have no effect beside a validation set."""
INDEX_KEYS = ("shuffle", "drop_last", "validation", "split_seed", "most_bad")
"""Keys of `data` that have no effect on data that are read in order; others are refused there."""
WORKER_KEYS = ("workers", "prefetch", "persistent_workers", "timeout_s", "worker_restarts")
"""Keys of `data` that have no effect on a DataLoader, which has workers of its own."""


class Closeable(ABC):
    """A context manager that calls `close` on exit."""

    @abstractmethod
    def close(self) -> None:
        """Undo every global switch."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def check_folder(caller: str, folder: Any) -> Path:
    """Return the folder as a path; UsageError for what cannot be one."""
    if not isinstance(folder, str | os.PathLike):
        raise UsageError(f"{caller}: folder must be a path, got {folder!r}")
    text = os.fspath(folder)
    if not isinstance(text, str) or not text or "\0" in text:
        raise UsageError(f"{caller}: folder must be the name of a folder, got {folder!r}")
    path = Path(text)
    try:
        nearest = next(part for part in (path, *path.parents, Path()) if part.exists())
    except OSError as error:  # too long a name
        raise UsageError(f"{caller}: folder={text}: {error.strerror}") from None
    if not nearest.is_dir():
        raise UsageError(f"{caller}: folder={text}: {nearest} is a file; name a folder")
    return path


def check_components(components: Any, given: Any, config: Any) -> Components:
    """Return the objects that `build` was given; UsageError for what a run cannot use."""
    if components is not None and given is not None:
        raise UsageError("build: components and given are the same; give one of them")
    components = given if components is None else components
    if not isinstance(components, Components):
        raise UsageError(f"build: components must be runner.Components(…), got {components!r}")
    has_step = all(hasattr(components.optimizer, name) for name in ("step", "param_groups"))
    wanted = {
        "model": ("a torch.nn.Module", isinstance(components.model, nn.Module)),
        "objective": ("a runner Objective", isinstance(components.objective, Objective)),
        "optimizer": ("an optimizer of torch's form, not its class", has_step),
        "techniques": ("techniques by name", isinstance(components.techniques, Mapping)),
    }
    for name, (form, fits) in wanted.items():
        value = getattr(components, name)
        if value is not None and (not fits or isinstance(value, type)):
            got = shorten(repr(value), 80)
            raise UsageError(f"build: Components({name}=…) must be {form}, got {got}")
    if components.validation is not None and isinstance(components.data, Dataset | None):
        problem = "is for data that are a DataLoader or a stream of yours"
        raise UsageError(f"build: Components(validation=…) {problem}; give it with data=…")
    typed, _ = getattr(config, ATTRIBUTE, ((), None))  # of a config that `compose` made
    _check_data_keys("build", components.data, components.validation, typed)
    return components


@contextmanager
def translate_model_errors(caller: str, inputs: Any, fix: str = "") -> Iterator[None]:
    """Convert an exception of the model, called with `inputs`, to UsageError."""
    try:
        yield
    except RunnerError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {shorten(str(error), 300)}{fix}"
        raise UsageError(f"{caller}: the model failed on {describe(inputs)}: {text}") from error


def as_batch(batch: Any, caller: str) -> Batch:
    """Split a batch into (inputs, target): (inputs, target), (input, …, target), or a dict."""
    if (pair := split_pair(batch)) is not None:
        return pair
    form = f"(inputs, target), or a dict with one of {', '.join(LABEL_KEYS)}"
    raise UsageError(f"{caller}: batch must be {form}, got {describe(batch)}")


def move_to_device(value: Any, device: torch.device) -> Any:
    """Move the nest to the device, without waiting for pinned memory."""
    return tree_map(value, lambda t: t.to(device, non_blocking=t.device.type == "cpu"))


def count_samples(inputs: Inputs, caller: str) -> int:
    """Return the number of samples: the first dimension of the first tensor."""
    first = next(iter(tensors(inputs)), None)
    if first is None or not first.ndim or not len(first):
        got = describe(inputs)
        raise UsageError(f"{caller} must be tensors whose first dimension is the sample, got {got}")
    return len(first)


def loss_objective(loss_fn: Loss) -> CustomObjective:
    """Wrap a user's loss function as an objective."""
    return CustomObjective(loss_fn, getattr(loss_fn, "__name__", type(loss_fn).__name__), "loss_fn")


def take_rows(nest: Any, rows: Any, count: int) -> Any:
    """Index a nest of `count` samples by `rows`; tensors of another length are shared."""
    return tree_map(nest, lambda t: t[rows] if t.ndim and len(t) == count else t)


class InMemoryDataset(Dataset):
    """A dataset of inputs and target as nests of tensors, sample dimension first."""

    def __init__(
        self,
        inputs: Inputs,
        target: Any,
        sizes: Sizes,
        split: tuple[np.ndarray, np.ndarray],
        choices: tuple[Choice, ...] = (),
    ) -> None:
        self.nest, self.sizes, self.choices = (inputs, target), sizes, choices
        self.train, self.validation = split
        self.length = 1 + max(int(part.max()) for part in split)

    def fetch(self, indices: np.ndarray, seeds: np.ndarray | None) -> Batch:
        """Return copies of the rows at `indices`."""
        inputs, target = take_rows(self.nest, torch.from_numpy(indices), self.length)
        return inputs, target

    def labels(self) -> np.ndarray | None:
        """Return the class labels; None if the target is not a class."""
        target = self.nest[1]
        return class_labels(target, self.sizes) if isinstance(target, Tensor) else None


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's first tensor; CPU if it has none."""
    first = next(chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def device_overrides(device: str | torch.device) -> list[str]:
    """Return the overrides that select this device, such as `cuda:1` or `auto`."""
    kind, _, index = str(device).partition(":")
    return [f"device={kind}", *([f"device.index={index}"] if kind == "cuda" and index else [])]


def check_model_arguments(
    caller: str,
    model: Any,
    *,
    loss_fn: Any = callable,
    optimizer: Optimizer | None = None,
    overrides: Any = (),
    data: Any = None,
    validation: Any = None,
) -> None:
    """Raise UsageError for an invalid argument."""
    if not isinstance(model, nn.Module):
        wrapped = isinstance(getattr(model, "model", None), nn.Module)  # by `optimize`
        fix = "; give its .model, or use optimize_training_loop" if wrapped else ""
        raise UsageError(f"{caller}: model must be a torch.nn.Module, got {describe(model)}{fix}")
    if not callable(loss_fn):
        got = describe(loss_fn)
        raise UsageError(f"{caller}: loss_fn must be a function of (output, target), got {got}")
    for text, key in check_overrides(caller, overrides):
        group, part = key.partition(".")[0], ""
        if key in ("model", "data") or (group == "model" and not key.startswith("model.weights")):
            part = group
        elif optimizer is not None and group in ("optimizer", "schedule"):
            part = "" if key in ACTING_KEYS else "optimizer"
        elif loss_fn is not callable and group == "objective" and key not in METRIC_KEYS:
            part = "loss_fn"
        if part:
            raise UsageError(f"{caller}: {text} has no effect, as {part} is given; leave it out")
    _check_data_keys(caller, data, validation, overrides)
    if optimizer is not None:
        _check_optimizer(caller, model, optimizer)


def _check_data_keys(caller: str, data: Any, validation: Any, overrides: Any) -> None:
    """Raise UsageError for a key of `data` that has no effect on these objects."""
    part, keys = "", tuple[str, ...]()
    if isinstance(data, DataLoader):
        part, keys = "a DataLoader", INDEX_KEYS + WORKER_KEYS
    elif not isinstance(data, tuple | list | dict | Dataset) and is_stream(data):
        part, keys = "a stream", INDEX_KEYS
    elif validation is not None:
        part, keys = "validation", SPLIT_KEYS
    for text, key in check_overrides(caller, overrides):
        if key.startswith("data.") and key.removeprefix("data.") in keys:
            raise UsageError(f"{caller}: {text} has no effect, as {part} is given; leave it out")


def check_overrides(caller: str, overrides: Any) -> list[tuple[str, str]]:
    """Return each override with its key. Raises UsageError unless it is a list of strings."""
    if isinstance(overrides, str):  # it would be iterated by character
        raise UsageError(f"{caller}: overrides must be a list, got one string: [{overrides!r}]")
    if not isinstance(overrides, Sequence) or not all(isinstance(o, str) for o in overrides):
        raise UsageError(f"{caller}: overrides must be a list of strings, got {overrides!r}")
    return [(text, text.lstrip("+~").partition("=")[0]) for text in overrides]


def check_whole_number(caller: str, name: str, value: Any, minimum: int) -> None:
    """Raise UsageError unless the argument is a whole number of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < minimum:
        raise UsageError(f"{caller}: {name} must be a whole number ≥ {minimum}, got {value!r}")


def check_trainable(
    caller: str,
    model: Any,
    loss_fn: Any,
    optimizer: Optimizer | None,
    overrides: Any,
    data: Any,
    validation: Any,
) -> None:
    """Check the arguments of a full run; a missing loss or optimizer comes from the config."""
    loss_fn = callable if loss_fn is None else loss_fn
    check_model_arguments(
        caller,
        model,
        loss_fn=loss_fn,
        optimizer=optimizer,
        overrides=overrides,
        data=data,
        validation=validation,
    )
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError(f"{caller}: no model parameter requires a gradient: nothing to train")


def _check_optimizer(caller: str, model: nn.Module, optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        got = describe(optimizer)
        raise UsageError(f"{caller}: optimizer must be a torch.optim.Optimizer, got {got}")
    sparse = {id(module.weight) for module in sparse_embeddings(model)}
    groups = [g for g in optimizer.param_groups if any(id(p) in sparse for p in g["params"])]
    decay = max((group.get("weight_decay", 0.0) for group in groups), default=0.0)
    if conflict := incompatibility(type(optimizer), model, decay):
        raise UsageError(f"{caller}: {'; '.join(conflict)}")
    parameter_ids = {id(p) for p in model.parameters()}
    if not any(id(p) in parameter_ids for group in optimizer.param_groups for p in group["params"]):
        fix = "create it with model.parameters(), after any step that replaces them"
        raise UsageError(f"{caller}: the optimizer has none of the model's parameters; {fix}")


def check_loss(caller: str, loss: Any) -> None:
    """Raise UsageError unless the loss is a scalar tensor that requires grad."""
    if not isinstance(loss, Tensor) or loss.ndim:
        got = describe(loss)
        raise UsageError(f"{caller}: loss must be a scalar tensor, the batch's mean, got {got}")
    if not loss.requires_grad:
        fix = "remove torch.no_grad() and .detach()"
        raise UsageError(f"{caller}: the loss depends on no parameter that requires grad; {fix}")
