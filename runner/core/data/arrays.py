"""A user's `.npz`: one array of inputs and one of targets, the sample first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runner.core.data import labels, target_scale
from runner.core.data.dataset import TensorsDataset
from runner.core.data.labels import MAX_CLASSES
from runner.core.data.paths import existing_path, suggestion
from runner.core.data.preprocessing import DEFAULT_OPENING, OpenOptions
from runner.core.data.split import split_samples
from runner.core.data.usable import usable_indices
from runner.core.errors import ConfigError, DataError
from runner.core.findings import Choice
from runner.core.interfaces.batch import RowNames, Sizes
from runner.core.schemas.data import Arrays, TargetTransform
from runner.core.security.files.policy import FilePolicy

TABLE_SUFFIXES = (".csv", ".tsv", ".parquet")


def arrays(config: Arrays, opening: OpenOptions = DEFAULT_OPENING) -> TensorsDataset:
    """Open an `.npz`: floats become float32, and uint8 images are scaled to 0 … 1.

    Images are [samples, channels, height, width] or [samples, height, width]; integers
    [samples, length] are token ids. The file is scanned first: SecurityError if it is malformed or
    holds objects, which are pickled.
    """
    from runner.core.security.files.loader import read_arrays  # imported only if used

    labels.check_task(config.task, labels.TASKS)
    path = existing_path(config.path)
    trained = None if opening.fitted is None else opening.fitted.sizes
    if path.suffix.lower() in TABLE_SUFFIXES:
        raise ConfigError("data.path", f"{path} is a table, not an .npz file", "use data=tabular")
    content = read_arrays(path, opening.policy or FilePolicy())
    x = _select_array(content, path, config.inputs, "data.inputs")
    input_name = f"{path}: {config.inputs!r}"
    bad = _bad_values(x, input_name, ids=x.dtype.kind in "iu" and x.ndim == 2)
    y, target_name, task, reason = None, f"{path}: {config.target!r}", "", ""
    if opening.labelled or trained is None:
        y = _select_array(content, path, config.target, "data.target")
        if len(x) != len(y):
            problem = f"{config.inputs!r} has {len(x):,} samples and {config.target!r} {len(y):,}"
            raise DataError(f"{path}: {problem}; the first dimension of both is the sample")
        task, reason = _infer_task(x, y, config.task if trained is None else trained.task)
        bad = _bad_values(y, target_name, ids=y.dtype.kind in "iu" and task != "regression") | bad
    usable, choices = usable_indices(bad, len(x), config)
    x = x[usable] if bad else x
    inputs, sizes = _convert_inputs(x, f"{path}: array {config.inputs!r}")
    if trained is not None:
        _check_trained(sizes, trained, input_name)
    target = np.zeros(len(inputs), np.int64)
    if y is not None:
        y = y[usable] if bad else y
        target, sizes = _convert_target(inputs, replace(sizes, task=task), y, target_name, trained)
    rows = RowNames(numbers=usable) if bad else RowNames()
    logs = config.target_transform is TargetTransform.log if trained is None else trained.log_target
    if trained is None:
        target_scale.check_transform(config.target_transform, task, reason)
    if y is not None and logs:
        target_scale.check_log_target(target, lambda row: f"{target_name}: {rows(row)}")
    strata = target if opening.labelled and task == "classification" else None
    train, validation, rule = split_samples(opening, len(inputs), config, str(path), strata)
    if trained is not None:
        if (sizes.classes or 0) > (trained.classes or 0):
            problem = f"has {sizes.classes} classes or targets, but the model was trained on"
            raise DataError(f"{target_name} {problem} {trained.classes}")
        sizes = trained
    else:
        if task == "classification":
            labels.check_classes([str(label) for label in range(sizes.classes or 0)], target_name)
        if config.task == "auto":
            choices = (*choices, Choice("data.task", task, reason))
        if task == "regression":
            scale, choice = target_scale.fit_target_scale(target, train, config.target_transform)
            sizes = replace(sizes, **scale)
            is_inferred = config.task == "auto" and config.target_transform is None
            if is_inferred and sizes.classes != 1 and y is not None and y.dtype.kind in "biu":
                fix = "for labels of 0 and 1 use objective._target_=torch.nn.BCEWithLogitsLoss"
                reason = f"integers taken as numbers; {fix}"
                choice = Choice(choice.key, choice.value, reason, is_notice=True)
            choices = (*choices, choice)
    tensors = torch.from_numpy(inputs), torch.from_numpy(target)
    return TensorsDataset(*tensors, sizes, (train, validation), (*choices, *rule), rows=rows)


def _check_trained(shape: Sizes, trained: Sizes, where: str) -> None:
    """Raise DataError if the inputs have another shape than in training."""
    for key in ("in_features", "in_channels", "image_size", "sequence"):
        size, expected = getattr(shape, key), getattr(trained, key)
        if size != expected:
            raise DataError(f"{where}: has {key} {size}, but the model was trained on {expected}")
    if shape.vocab is not None and shape.vocab > (trained.vocab or 0):
        problem = f"has the id {shape.vocab - 1}, but the model was trained on ids below"
        raise DataError(f"{where}: {problem} {trained.vocab}")


def _select_array(content: Any, path: Path, name: str, key: str) -> np.ndarray:
    if isinstance(content, np.ndarray):
        raise DataError(f"{path}: is a single array; save both with np.savez(path, x=…, y=…)")
    if name not in content:
        near = suggestion(name, list(content), "available arrays:")
        raise ConfigError(key, f"{path} has no array {name!r}", near)
    array: np.ndarray = content[name]
    if not array.ndim or not array.size:  # an array without values may claim any number of samples
        raise DataError(f"{path}: array {name!r} of shape {list(array.shape)} holds no samples")
    if array.dtype.kind not in "fiub":
        fix = "number classes with np.unique(y, return_inverse=True)[1]"
        raise DataError(f"{path}: array {name!r} has dtype {array.dtype}, not a number; {fix}")
    return array


def _bad_values(array: np.ndarray, what: str, ids: bool) -> dict[int, str]:
    """Return the problems of samples with non-finite values, or with ids beyond MAX_CLASSES."""
    flat = array.reshape(len(array), -1)
    bad = ~np.isfinite(flat)
    if ids:
        bad |= (flat < 0) | (flat >= MAX_CLASSES)
    problem = f"outside 0 to {MAX_CLASSES:,}, the range of labels and ids" if ids else "not finite"
    return {
        row: f"{what}: sample {row} has {flat[row, bad[row].argmax()]}, which is {problem}"
        for row in np.flatnonzero(bad.any(1)).tolist()
    }


def _convert_inputs(x: np.ndarray, what: str) -> tuple[np.ndarray, Sizes]:
    """Return the inputs of the model, and their sizes."""
    if x.ndim >= 3 and x.dtype == np.uint8:
        x = x.astype(np.float32) / 255
    if x.dtype.kind != "f":
        if x.ndim != 2 or x.dtype.kind == "b":
            problem = f"{what} is {x.dtype} of shape {list(x.shape)}; integers are token ids"
            raise DataError(f"{problem} [samples, length]; save other inputs as float32")
        return x.astype(np.int64), Sizes("", vocab=int(x.max()) + 1, sequence=x.shape[1])
    x = np.ascontiguousarray(x, np.float32)
    if x.ndim in (1, 3):
        x = x[:, None]
    features = int(np.prod(x.shape[1:]))
    if x.ndim != 4:
        return x, Sizes("", in_features=features)
    if x.shape[3] in (1, 3) and x.shape[1] not in (1, 3):
        fix = "save x.transpose(0, 3, 1, 2)"
        raise DataError(f"{what} of shape {list(x.shape)} is channels-last; {fix}")
    side = x.shape[2] if x.shape[2] == x.shape[3] else None
    return x, Sizes("", features, in_channels=x.shape[1], image_size=side)


def _convert_target(
    x: np.ndarray, sizes: Sizes, y: np.ndarray, what: str, trained: Sizes | None
) -> tuple[np.ndarray, Sizes]:
    """Return targets and sizes; class numbers with gaps, as 7 and 40, become indices."""
    if sizes.task == "regression":
        sizes = replace(sizes, classes=int(np.prod(y.shape[1:])))
        scale = 1.0 if trained is None else trained.target_deviation
        is_one = isinstance(scale, float) and scale != 1.0  # of all targets: an earlier version
        columns = [y] if is_one else target_scale.target_columns(y)
        return target_scale.target_array(y, target_scale.target_deviations(columns)), sizes
    problem = f"{what} is {y.dtype} of shape {list(y.shape)}"
    if sizes.task == "language_modelling":
        if x.shape != y.shape or sizes.vocab is None or y.dtype.kind not in "iu":
            needed = f"language modelling needs token ids of the inputs' shape {list(x.shape)}"
            raise DataError(f"{problem}; {needed}")
        vocab = max(sizes.vocab, int(y.max()) + 1)
        return y.astype(np.int64), replace(sizes, vocab=vocab, classes=vocab)
    y = y[:, 0] if y.shape[1:] == (1,) else y
    is_fractional = y.dtype.kind == "f" and (y != np.round(y)).any()
    if y.ndim != 1 or is_fractional or not 0 <= y.min() <= y.max() < MAX_CLASSES:
        raise DataError(f"{problem}; classification needs one whole number from 0 per sample")
    numbers = y.astype(np.int64)
    if trained is not None and not trained.class_names:
        return numbers, replace(sizes, classes=int(y.max()) + 1)
    distinct, indices = np.unique(numbers, return_inverse=True)
    names = tuple(map(str, distinct.tolist()))
    if trained is not None:
        return labels.remap_labels(names, indices, trained.class_names, what), sizes
    if len(distinct) == distinct[-1] + 1:  # without gaps
        return numbers, replace(sizes, classes=len(distinct))
    return indices.astype(np.int64), replace(sizes, classes=len(distinct), class_names=names)


def _infer_task(x: np.ndarray, y: np.ndarray, requested: str) -> tuple[str, str]:
    if requested != "auto":
        return requested, "requested"
    if x.dtype.kind in "iu" and y.shape == x.shape and y.dtype.kind in "iu" and x.ndim == 2:
        return "language_modelling", "the targets are token ids of the inputs' shape"
    if y.dtype.kind == "f":
        return "regression", "the targets are floats; for classes use data.task=classification"
    if y.ndim > 1 and y.shape[1:] != (1,):
        return "regression", "there are several targets for each sample"
    if y.dtype.kind == "b":
        return "classification", "the targets are true or false"
    return labels.guess_task(y.astype(np.float64))
