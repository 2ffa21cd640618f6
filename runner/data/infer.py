"""What a user's data set holds, from what it states and from looking at its samples."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.data.batch import Sizes
from runner.data.collate import Nest, main_leaf
from runner.data.labels import NO_LOSS
from runner.data.paths import suggestion
from runner.errors import DataError
from runner.techniques.base import Choice

MOST_SAMPLES = 10_000  # looked at for the largest label or id
MOST_SECONDS = 30.0
TASKS = ("classification", "language_modelling", "regression")

Sample = Callable[[int], tuple[Nest, Nest]]


def infer_sizes(dataset: Any, name: str, sample: Sample) -> tuple[Sizes, tuple[Choice, ...]]:
    """The sizes of the data set, and how those that had to be counted were found.

    The data set's attributes `sizes` (a dict of any of them), `classes` (a count or the names) and
    `vocab` go first; where `sizes` has a `task`, no sample is looked at. Else: float [C, H, W] is
    an image, other floats are features, whole numbers [length] are tokens; a whole number as target
    is a class, a target like the tokens is the next tokens, and a float one is regression.
    """
    stated = _stated(dataset, name)
    if "task" in stated:
        return Sizes(**stated), ()
    inputs, target = sample(0)
    for key, value in (("inputs are", main_leaf(inputs)), ("target is", target)):
        if isinstance(value, Tensor) and value.is_complex():
            raise DataError(
                f"data: sample 0: the {key} {_dtype(value)}, and sizes follow from real numbers "
                f"only; return torch.view_as_real(x), or give {name} an attribute "
                "sizes = {'task': …} if model and objective are made for them"
            )
    shown = {**_input_sizes(main_leaf(inputs)), **stated}
    if not isinstance(target, Tensor):
        raise DataError(
            f"data: sample 0: the target is a {type(target).__name__}, from which no task follows; "
            f"give {name} an attribute sizes = {{'task': …}} and name an objective"
        )
    task = _task(main_leaf(inputs), target, name)
    shown["task"] = task
    tokens = "sequence" in shown and not main_leaf(inputs).is_floating_point()
    wanted = {"vocab"} if tokens and "vocab" not in shown else set()
    if task == "classification" and "classes" not in shown:
        wanted.add("classes")
    if task == "regression":
        shown.setdefault("classes", max(1, target.numel()))
    found, choices = _count(dataset, name, sample, wanted, task) if wanted else ({}, ())
    shown.update(found)
    if task == "language_modelling":
        shown.setdefault("classes", shown["vocab"])
    return Sizes(**shown), choices


def _stated(dataset: Any, name: str) -> dict[str, Any]:
    known = {f.name for f in fields(Sizes)}
    stated: dict[str, Any] = {}
    classes, vocab = getattr(dataset, "classes", None), getattr(dataset, "vocab", None)
    if isinstance(classes, int):
        stated["classes"] = classes
    elif isinstance(classes, list | tuple):
        stated.update(classes=len(classes), class_names=tuple(map(str, classes)))
    if isinstance(vocab, int):
        stated["vocab"] = vocab
    sizes = getattr(dataset, "sizes", None)
    if isinstance(sizes, dict):
        for key in sizes:
            if key not in known:
                near = suggestion(str(key), known, "there are")
                raise DataError(
                    f"data: the attribute `sizes` of {name} has an unknown {key!r}; {near}"
                )
        stated.update(sizes)
    if stated.get("task", TASKS[0]) not in TASKS:
        raise DataError(
            f"data: the attribute `sizes` of {name} has no task {stated['task']!r}; one of {TASKS}"
        )
    return stated


def _input_sizes(x: Tensor) -> dict[str, Any]:
    if x.is_floating_point() or x.ndim >= 3:
        sizes: dict[str, Any] = {"in_features": x.numel()}
        if x.ndim == 3:
            sizes["in_channels"] = x.shape[0]
            if x.shape[1] == x.shape[2]:
                sizes["image_size"] = x.shape[1]
        return sizes
    return {"sequence": x.shape[0]} if x.ndim == 1 else {"in_features": x.numel()}


def _task(x: Tensor, target: Tensor, name: str) -> str:
    if target.is_floating_point():
        return "regression"
    if target.ndim == 0 or target.shape == (1,):
        return "classification"
    if not x.is_floating_point() and target.shape == x.shape:
        return "language_modelling"
    raise DataError(
        f"data: sample 0: the target is {target.dtype} of shape {list(target.shape)}, from which "
        f"no task follows; give {name} an attribute sizes = {{'task': …, 'classes': …}}"
    )


def _count(
    dataset: Any, name: str, sample: Sample, wanted: set[str], task: str
) -> tuple[dict[str, int], tuple[Choice, ...]]:
    """One more than the largest label or token id."""
    if wanted == {"classes"}:
        for attribute in ("targets", "labels"):
            labels = _whole_numbers(getattr(dataset, attribute, None), len(dataset))
            if labels is not None:
                _check_label(int(labels.min()), int(labels.argmin()), name)
                classes = int(labels.max()) + 1
                reason = f"one more than the largest of {name}.{attribute}"
                return {"classes": classes}, (Choice("data.classes", classes, reason),)
    n = len(dataset)
    looked_at = np.unique(np.linspace(0, n - 1, min(n, MOST_SAMPLES)).astype(int)).tolist()
    largest = dict.fromkeys(wanted, 1)
    names = " and ".join(sorted(wanted))
    deadline = time.monotonic() + MOST_SECONDS
    for index in looked_at:
        if time.monotonic() > deadline:
            # a guess from some of them would be another one on a busy day
            raise DataError(
                f"data: looking through {n:,} samples for {names} takes more than "
                f"{MOST_SECONDS:.0f} s; give {name} an attribute {names}"
            )
        inputs, target = sample(index)
        if "vocab" in wanted:
            ids = [main_leaf(inputs)] + [target] * (task == "language_modelling")
            largest["vocab"] = max(largest["vocab"], *(int(x.max()) for x in ids if x.numel()))
        if "classes" in wanted:
            _check_label(int(target), index, name)
            largest["classes"] = max(largest["classes"], int(target))
    found = {key: value + 1 for key, value in largest.items()}
    whole = "all" if len(looked_at) == n else f"{len(looked_at):,} of"
    reason = (
        f"one more than the largest in {whole} {n:,} samples; an attribute of {name} goes first"
    )
    return found, tuple(Choice(f"data.{key}", value, reason) for key, value in found.items())


def _check_label(label: int, index: int, name: str) -> None:
    if label < 0 and label != NO_LOSS:
        raise DataError(
            f"data: sample {index}: the label {label} is negative; labels count from 0. Where "
            "targets are quantities (a regression), return them as float32 from "
            f"{name}.__getitem__, such as torch.tensor([y], dtype=torch.float32)"
        )


def _dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _whole_numbers(values: Any, n: int) -> np.ndarray | None:
    if not isinstance(values, list | tuple | np.ndarray | torch.Tensor) or len(values) != n:
        return None
    try:
        array = np.asarray(values)
    except (TypeError, ValueError):
        return None
    return array if array.ndim == 1 and array.dtype.kind in "iu" else None
