"""Collation of a user's samples into batches, and inference of the data's sizes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.core.data.labels import NO_LOSS, TASKS
from runner.core.data.paths import suggestion
from runner.core.errors import BadSample, DataError
from runner.core.findings import Choice
from runner.core.interfaces.batch import LABEL_KEYS, Sizes
from runner.core.interfaces.nested import describe, named_leaves, tree_map

Nest = Any
"""A tensor, or a tuple or dict of nests."""
Sample = Callable[[int], tuple[Nest, Nest]]

MAX_SAMPLES = 10_000  # read to find the largest label or id
MAX_SECONDS = 30.0
NUMBERS = {int: torch.int64, float: torch.float32}


def label_key(sample: Any) -> str | None:
    """Return the key of the target in a sample that is a dict."""
    return next((k for k in LABEL_KEYS if k in sample), None) if isinstance(sample, dict) else None


def as_pair(sample: Any, index: int, batch_index: int = 0) -> tuple[Nest, Nest]:
    """Return inputs and target of one sample as tensors.

    A sample is (inputs, target), (input, input, …, target), or a dict whose target is under one
    of `LABEL_KEYS`. Raises BadSample with `batch_index`, its position in the batch, otherwise.
    """
    pair = split_pair(sample)
    if pair is None:
        fix = f"return (inputs, target), or a dict with one of {', '.join(LABEL_KEYS)}"
        raise BadSample(batch_index, f"data: sample {index} is {describe(sample)}", f"; {fix}")
    inputs = _to_tensors(pair[0], "inputs", index, batch_index)
    return inputs, _to_tensors(pair[1], label_key(sample) or "target", index, batch_index)


def split_pair(sample: Any) -> tuple[Any, Any] | None:
    """Return inputs and target of a sample or batch; None if it has another form."""
    if (key := label_key(sample)) is not None:
        return {k: v for k, v in sample.items() if k != key}, sample[key]
    if not isinstance(sample, tuple | list) or len(sample) < 2:
        return None
    return (sample[0] if len(sample) == 2 else tuple(sample[:-1])), sample[-1]


def stack(samples: Sequence[Nest], indices: Sequence[int], key: str) -> Nest:
    """Stack nests of tensors along a new first dimension.

    DataError if a sample has another shape, dtype or keys: torch's collation would cast it.
    """
    leaves = [list(named_leaves(sample, key)) for sample in samples]
    forms = [[(name, leaf.shape, leaf.dtype) for name, leaf in row] for row in leaves]
    mismatch = next((i for i, form in enumerate(forms) if form != forms[0]), None)
    if mismatch is not None:
        actual, first = (
            ", ".join(f"{n} is {describe(leaf)}" for n, leaf in leaves[i]) for i in (mismatch, 0)
        )
        other = f"in sample {indices[0]} of the same batch {first}"
        raise DataError(
            f"data: sample {indices[mismatch]}: {actual}, and {other}; shapes and dtypes must match"
            ", or the data set needs a collate_fn"
        )
    columns = (torch.stack([leaf for _, leaf in column]) for column in zip(*leaves, strict=True))
    return tree_map(samples[0], lambda _: next(columns))


def stack_plain(samples: Sequence[Any]) -> tuple[Tensor, Tensor] | None:
    """Stack pairs of tensor and tensor or number, in a tenth of `stack`'s time; None for others."""
    if {type(sample) for sample in samples} != {tuple} or {*map(len, samples)} != {2}:
        return None
    columns = list[Tensor]()
    for values in zip(*samples, strict=True):
        kinds = {*map(type, values)}
        if kinds == {Tensor} and len({(value.dtype, value.shape) for value in values}) == 1:
            columns.append(torch.stack(values).detach())
        elif columns and kinds in ({int}, {float}):
            columns.append(torch.tensor(values, dtype=NUMBERS[kinds.pop()]))
        else:
            return None
    return columns[0], columns[1]


def as_class_indices(target: Nest, sizes: Sizes, targets: str) -> Nest:
    """Return integers or bools that are classes as int64; other targets, and `given`, unchanged."""
    are_classes = targets != "given" and sizes.task in ("classification", "language_modelling")
    if not are_classes or not isinstance(target, Tensor) or target.is_floating_point():
        return target
    return target.long()


def main_leaf(inputs: Nest) -> Tensor:
    """Return the tensor that sizes are read from: `input_ids` if present, else the first."""
    leaves = dict(named_leaves(inputs))
    return leaves.get("input_ids", next(iter(leaves.values())))


def _to_tensors(value: Any, key: str, index: int, batch_index: int) -> Nest:
    if isinstance(value, dict):
        return {k: _to_tensors(v, f"{key}.{k}", index, batch_index) for k, v in value.items()}
    if isinstance(value, tuple):
        return tuple(_to_tensors(v, f"{key}[{i}]", index, batch_index) for i, v in enumerate(value))
    if isinstance(value, bool | int | np.integer | np.bool_):
        return torch.tensor(int(value))
    if isinstance(value, float | np.floating):
        return torch.tensor(float(value), dtype=torch.float32)
    try:
        tensor = torch.as_tensor(value) if isinstance(value, list | np.ndarray) else value
    except (TypeError, ValueError):
        tensor = value
    if not isinstance(tensor, Tensor):
        fix = "return a tensor from __getitem__, such as x.float() for floats"
        problem = f"data: sample {index}: {key} is {describe(tensor)}"
        raise BadSample(batch_index, problem, f"; {fix}")
    return tensor.detach()


def infer_sizes(
    dataset: Any,
    name: str,
    sample: Sample,
    skip_bad: bool = False,
    samples: tuple[int, str] | None = None,
    targets: str = "inferred",
) -> tuple[Sizes, tuple[Choice, ...]]:
    """Return the sizes of the data set, and a choice for each that had to be counted.

    The attributes `sizes` (a dict of any of them), `classes` (a count or the names) and `vocab`
    take precedence; if `sizes` has a `task`, no sample is read. Otherwise float [C, H, W] is an
    image, other floats are features, integers [length] are tokens; an integer target is a class,
    one shaped like the tokens the next tokens, a float one regression. `skip_bad` ignores bad
    samples. `samples`: the number of those to count in, and their name, of data without a length.
    `targets`: those of `given` may be of any kind, integers of any shape are `classes`.
    """
    sizes = _declared_sizes(dataset, name)
    if "task" in sizes:
        return Sizes(**sizes), ()
    try:
        return _infer_sizes(dataset, name, sample, sizes, skip_bad, samples, targets == "classes")
    except BadSample:
        raise
    except DataError:
        if targets != "given":
            raise
        return Sizes("given"), ()


def _infer_sizes(
    dataset: Any,
    name: str,
    sample: Sample,
    sizes: dict[str, Any],  # those that are declared
    skip_bad: bool,
    samples: tuple[int, str] | None,
    are_classes: bool,
) -> tuple[Sizes, tuple[Choice, ...]]:
    inputs, target = _first_usable(sample, len(dataset) if skip_bad else 1)
    x = main_leaf(inputs)
    task = _infer_task(x, target, name, are_classes)
    sizes = {**_input_sizes(x), **sizes, "task": task}
    counted_sizes = ["vocab"] * ("sequence" in sizes and "vocab" not in sizes)
    counted_sizes += ["classes"] * (task == "classification" and "classes" not in sizes)
    choices = list[Choice]()
    if counted_sizes:
        options = counted_sizes, task, skip_bad, samples, target.shape
        largest, reason = _find_largest(dataset, name, sample, *options)
        for key, number in largest.items():
            sizes[key] = number + 1
            choices.append(Choice(f"data.{key}", number + 1, reason))
    if task != "classification":
        sizes.setdefault("classes", sizes.get("vocab") or max(1, target.numel()))
    return Sizes(**sizes), tuple(choices)


def _first_usable(sample: Sample, count: int) -> tuple[Nest, Nest]:
    for index in range(count - 1):
        with suppress(BadSample):
            return sample(index)
    return sample(count - 1)


def _declared_sizes(dataset: Any, name: str) -> dict[str, Any]:
    declared: dict[str, Any] = {}
    classes, vocab = getattr(dataset, "classes", None), getattr(dataset, "vocab", None)
    if isinstance(classes, int):
        declared["classes"] = classes
    elif isinstance(classes, list | tuple):
        declared.update(classes=len(classes), class_names=tuple(map(str, classes)))
    if isinstance(vocab, int):
        declared["vocab"] = vocab
    sizes = getattr(dataset, "sizes", None)
    declared.update(sizes if isinstance(sizes, dict) else {})
    names, problem = [f.name for f in fields(Sizes)], ""
    if unknown := [str(key) for key in declared if key not in names]:
        problem = f"has an unknown {unknown[0]!r}; {suggestion(unknown[0], names, 'use one of')}"
    elif declared.get("task", TASKS[0]) not in TASKS:
        problem = f"has an unknown task {declared['task']!r}; use one of {', '.join(TASKS)}"
    if problem:
        raise DataError(f"data: the attribute `sizes` of {name} {problem}")
    return declared


def _input_sizes(x: Tensor) -> dict[str, Any]:
    if x.ndim == 1 and not x.is_floating_point():
        return {"sequence": x.shape[0]}
    sizes = {"in_features": x.numel()}
    if x.ndim == 3:
        sizes["in_channels"] = x.shape[0]
        if x.shape[1] == x.shape[2]:
            sizes["image_size"] = x.shape[1]
    return sizes


def _infer_task(x: Tensor, target: Nest, name: str, are_classes: bool) -> str:
    if isinstance(target, Tensor) and not target.is_complex() and not x.is_complex():
        if target.is_floating_point():
            return "regression"
        if are_classes or target.ndim == 0 or target.shape == (1,):
            return "classification"
        if not x.is_floating_point() and target.shape == x.shape:
            return "language_modelling"
    kind = f"{target.dtype} {list(target.shape)}" if isinstance(target, Tensor) else "nested"
    problem = f"cannot infer the task from inputs {x.dtype} {list(x.shape)}, target {kind}"
    is_integer = isinstance(target, Tensor) and not (target.is_complex() or x.is_complex())
    classes = "type objective=classification if they are classes, or " * is_integer
    fix = f"{classes}give a loss of your own (loss_fn, or objective._target_), which interprets it"
    if name != "data":  # of a class, which can have attributes
        fix += f", or {name} an attribute sizes = {{'task': …, 'classes': …}}"
    raise DataError(f"data: sample 0: {problem}; {fix}")


def _find_largest(
    dataset: Any,
    name: str,
    sample: Sample,
    counted_sizes: list[str],
    task: str,
    skip_bad: bool,
    samples: tuple[int, str] | None,
    shape: Sequence[int],  # of a target
) -> tuple[dict[str, int], str]:
    """Return the largest label or token id by size name, and its source."""
    n, names = len(dataset) if samples is None else samples[0], " and ".join(counted_sizes)
    labels = np.asarray(getattr(dataset, "targets", ()))
    has_all = labels.shape in ((n,), (n, *shape))
    if counted_sizes == ["classes"] and has_all and labels.dtype.kind in "iub":
        _check_label(int(labels.min()), int(labels.argmin()) * n // labels.size, name)
        return {"classes": int(labels.max())}, f"from the largest of {name}.targets"
    sample_indices = np.unique(np.linspace(0, n - 1, min(n, MAX_SAMPLES)).astype(int)).tolist()
    largest = dict.fromkeys(counted_sizes, 1)
    deadline = time.monotonic() + MAX_SECONDS
    for index in sample_indices:
        if time.monotonic() > deadline:
            # a partial count would depend on the load of the machine
            problem = f"reading {n:,} samples for {names} takes more than {MAX_SECONDS:.0f} s"
            raise DataError(f"data: {problem}; give {name} an attribute {names}")
        try:
            inputs, target = sample(index)
        except BadSample:
            if skip_bad:
                continue
            raise
        if "vocab" in counted_sizes:
            ids = [main_leaf(inputs)] + [target] * (task == "language_modelling")
            largest["vocab"] = max(largest["vocab"], *(int(x.max()) for x in ids if x.numel()))
        if "classes" in counted_sizes:
            _check_label(int(target.min()), index, name)
            largest["classes"] = max(largest["classes"], int(target.max()))
    coverage = "all" if len(sample_indices) == n else f"{len(sample_indices):,} of"
    what = f"{coverage if samples is None else samples[1]} {n:,} samples"
    return largest, f"from the largest in {what}; attributes of {name} take precedence"


def _check_label(label: int, index: int, name: str) -> None:
    if label < 0 and label != NO_LOSS:
        problem = f"data: sample {index}: the label {label} is negative; labels count from 0"
        fix = f"for regression return float32 from {name}.__getitem__"
        raise DataError(f"{problem}; {fix}")
