"""What a user's data set holds, from what it states and from its samples."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from typing import Any

import numpy as np
from torch import Tensor

from runner.data.batch import Sizes
from runner.data.collate import Nest, main_leaf
from runner.data.labels import NO_LOSS, TASKS
from runner.data.paths import suggestion
from runner.errors import BadSample, DataError
from runner.techniques.base import Choice

MOST_SAMPLES = 10_000  # read for the largest label or id
MOST_SECONDS = 30.0

Sample = Callable[[int], tuple[Nest, Nest]]


def infer_sizes(
    dataset: Any, name: str, sample: Sample, drops: bool = False
) -> tuple[Sizes, tuple[Choice, ...]]:
    """The sizes of the data set, and how those that had to be counted were found.

    The data set's attributes `sizes` (a dict of any of them), `classes` (a count or the names) and
    `vocab` go first; where `sizes` has a `task`, no sample is read. Else: float [C, H, W] is
    an image, other floats are features, whole numbers [length] are tokens; a whole number as target
    is a class, a target like the tokens is the next tokens, and a float one is regression. With
    `drops` a sample that cannot be read says nothing.
    """
    stated = _stated(dataset, name)
    if "task" in stated:
        return Sizes(**stated), ()
    inputs, target = _first_usable(sample, len(dataset) if drops else 1)
    x = main_leaf(inputs)
    task = _task(x, target, name)
    sizes = {**_input_sizes(x), **stated, "task": task}
    counted = ["vocab"] * ("sequence" in sizes and "vocab" not in sizes)
    counted += ["classes"] * (task == "classification" and "classes" not in sizes)
    choices: tuple[Choice, ...] = ()
    if counted:
        largest, reason = _largest(dataset, name, sample, counted, task, drops)
        choices = tuple(Choice(f"data.{key}", n + 1, reason) for key, n in largest.items())
        sizes.update({key: n + 1 for key, n in largest.items()})
    if task != "classification":
        sizes.setdefault("classes", sizes.get("vocab") or max(1, target.numel()))
    return Sizes(**sizes), choices


def _first_usable(sample: Sample, most: int) -> tuple[Nest, Nest]:
    for index in range(most - 1):
        with suppress(BadSample):
            return sample(index)
    return sample(most - 1)


def _stated(dataset: Any, name: str) -> dict[str, Any]:
    stated: dict[str, Any] = {}
    classes, vocab = getattr(dataset, "classes", None), getattr(dataset, "vocab", None)
    if isinstance(classes, int):
        stated["classes"] = classes
    elif isinstance(classes, list | tuple):
        stated.update(classes=len(classes), class_names=tuple(map(str, classes)))
    if isinstance(vocab, int):
        stated["vocab"] = vocab
    sizes = getattr(dataset, "sizes", None)
    stated.update(sizes if isinstance(sizes, dict) else {})
    known = [f.name for f in fields(Sizes)]
    for key in stated:
        if key not in known:
            near = suggestion(str(key), known, "there are")
            raise DataError(f"data: the attribute `sizes` of {name} has an unknown {key!r}; {near}")
    if stated.get("task", TASKS[0]) not in TASKS:
        problem = f"has no task {stated['task']!r}; one of {', '.join(TASKS)}"
        raise DataError(f"data: the attribute `sizes` of {name} {problem}")
    return stated


def _input_sizes(x: Tensor) -> dict[str, Any]:
    if x.ndim == 1 and not x.is_floating_point():
        return {"sequence": x.shape[0]}
    sizes = {"in_features": x.numel()}
    if x.ndim == 3:
        sizes["in_channels"] = x.shape[0]
        if x.shape[1] == x.shape[2]:
            sizes["image_size"] = x.shape[1]
    return sizes


def _task(x: Tensor, target: Nest, name: str) -> str:
    if isinstance(target, Tensor) and not target.is_complex() and not x.is_complex():
        if target.is_floating_point():
            return "regression"
        if target.ndim == 0 or target.shape == (1,):
            return "classification"
        if not x.is_floating_point() and target.shape == x.shape:
            return "language_modelling"
    kind = f"{target.dtype} {list(target.shape)}" if isinstance(target, Tensor) else "a nest"
    problem = f"no task follows from inputs {x.dtype} {list(x.shape)} and a target {kind}"
    fix = f"give {name} an attribute sizes = {{'task': …, 'classes': …}}, and name an objective"
    raise DataError(f"data: sample 0: {problem}; {fix}")


def _largest(
    dataset: Any, name: str, sample: Sample, counted: list[str], task: str, drops: bool
) -> tuple[dict[str, int], str]:
    """The largest label or token id, and where it was found."""
    n, names = len(dataset), " and ".join(counted)
    labels = np.asarray(getattr(dataset, "targets", ()))
    if counted == ["classes"] and labels.shape == (n,) and labels.dtype.kind in "iu":
        _check_label(int(labels.min()), int(labels.argmin()), name)
        return {"classes": int(labels.max())}, f"from the largest of {name}.targets"
    read = np.unique(np.linspace(0, n - 1, min(n, MOST_SAMPLES)).astype(int)).tolist()
    largest = dict.fromkeys(counted, 1)
    deadline = time.monotonic() + MOST_SECONDS
    for index in read:
        if time.monotonic() > deadline:
            # a guess from some of them would be another one on a busy day
            problem = f"reading {n:,} samples for {names} takes more than {MOST_SECONDS:.0f} s"
            raise DataError(f"data: {problem}; give {name} an attribute {names}")
        try:
            inputs, target = sample(index)
        except BadSample:
            if drops:
                continue
            raise
        if "vocab" in counted:
            ids = [main_leaf(inputs)] + [target] * (task == "language_modelling")
            largest["vocab"] = max(largest["vocab"], *(int(x.max()) for x in ids if x.numel()))
        if "classes" in counted:
            _check_label(int(target), index, name)
            largest["classes"] = max(largest["classes"], int(target))
    whole = "all" if len(read) == n else f"{len(read):,} of"
    return largest, f"from the largest in {whole} {n:,} samples; attributes of {name} go first"


def _check_label(label: int, index: int, name: str) -> None:
    if label < 0 and label != NO_LOSS:
        problem = f"data: sample {index}: the label {label} is negative; labels count from 0"
        fix = f"for quantities (a regression) return float32 from {name}.__getitem__"
        raise DataError(f"{problem}; {fix}")
