"""A user's `.npz`: one array of inputs and one of targets, the sample first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runner.data.batch import RowNames, Sizes
from runner.data.config import Arrays
from runner.data.dataset import usable_samples
from runner.data.labels import check_classes, check_count, check_task, guess_task
from runner.data.order import split
from runner.data.paths import existing, suggestion
from runner.data.tensors import Tensors, scale_of
from runner.errors import ConfigError, DataError
from runner.security.files.policy import FilePolicy
from runner.techniques.base import Choice

TASKS = ("classification", "language_modelling", "regression")
TABLES = (".csv", ".tsv", ".parquet")


def arrays(config: Arrays, policy: FilePolicy | None = None) -> Tensors:
    """Inputs as they are, but for these: floats become float32, and uint8 images 0 to 1.

    Images are [samples, channels, height, width] or [samples, height, width]; whole numbers
    [samples, length] are token ids. The file is examined first: SecurityError for
    one that is malformed, or holds objects, which are a pickle.
    """
    from runner.security.files.state import read_arrays  # only where a file is read

    check_task(config.task, TASKS)
    path = existing(config.path)
    if path.suffix.lower() in TABLES:
        raise ConfigError("data.path", f"{path} is a table and no .npz", "use data=tabular")
    content = read_arrays(path, policy or FilePolicy())
    x = _pick(content, path, config.inputs, "data.inputs")
    y = _pick(content, path, config.target, "data.target")
    if len(x) != len(y):
        raise DataError(
            f"{path}: {config.inputs!r} has {len(x):,} samples and {config.target!r} has "
            f"{len(y):,}; the first dimension of both is the sample"
        )
    task, reason = _task(x, y, config.task)
    problems = _bad_rows(y, config.target, task != "regression") | _bad_rows(x, config.inputs, True)
    choices = usable_samples(problems, len(x), config, str(path))
    usable = np.delete(np.arange(len(x)), sorted(problems))
    x, y = (x[usable], y[usable]) if problems else (x, y)
    inputs, shape = _inputs(x, f"{path}: array {config.inputs!r}")
    target, sizes = _target(inputs, replace(shape, task=task), y, f"{path}: {config.target!r}")
    if config.task == "auto":
        choices = (*choices, Choice("data.task", task, reason))
    parts = split(len(x), config.validation, config.split_seed, str(path))
    if task == "regression":
        mean, deviation, choice = scale_of(target, parts[0])
        sizes = replace(sizes, target_mean=mean, target_deviation=deviation)
        choices = (*choices, choice)
    tensors = torch.from_numpy(inputs), torch.from_numpy(target)
    return Tensors(*tensors, sizes, parts, choices, rows=RowNames(numbers=usable))


def _pick(content: Any, path: Path, name: str, key: str) -> np.ndarray:
    if isinstance(content, np.ndarray):
        raise DataError(f"{path}: is a single array; save both with np.savez(path, x=…, y=…)")
    if name not in content:
        near = suggestion(name, list(content), "its arrays are")
        raise ConfigError(key, f"{path} has no array {name!r}", near)
    array: np.ndarray = content[name]
    if not array.ndim or not array.size:  # samples without values take no bytes: any number
        raise DataError(f"{path}: array {name!r} of shape {list(array.shape)} holds no samples")
    if array.dtype.kind not in "fiub":
        raise DataError(
            f"{path}: array {name!r} is of type {array.dtype}, which is no number; number classes "
            "with np.unique(y, return_inverse=True)[1]"
        )
    return array


def _bad_rows(array: np.ndarray, name: str, ids: bool) -> dict[int, str]:
    """What is wrong with each sample that has a value which is not finite, or a negative id."""
    flat = array.reshape(len(array), -1)
    if array.dtype.kind == "f":
        bad, what = ~np.isfinite(flat), "not finite"
    else:
        bad, what = (flat < 0) & ids, "negative; labels and ids count from 0"
    return {
        row: f"sample {row}: {name!r} has {flat[row, bad[row].argmax()]}, which is {what}"
        for row in np.flatnonzero(bad.any(1)).tolist()
    }


def _inputs(x: np.ndarray, what: str) -> tuple[np.ndarray, Sizes]:
    """The inputs as the model gets them, and the sizes that they tell."""
    if x.ndim >= 3 and x.dtype == np.uint8:
        x = x.astype(np.float32) / 255
    if x.dtype.kind != "f":
        if x.ndim != 2 or x.dtype.kind == "b":
            raise DataError(
                f"{what} is {x.dtype} of shape {list(x.shape)}; whole numbers are token ids "
                "[samples, length], and anything else is saved as float32"
            )
        check_count(int(x.max()) + 1, f"{what}: the token id {x.max():,}")
        return x.astype(np.int64), Sizes("", vocab=int(x.max()) + 1, sequence=x.shape[1])
    x = np.ascontiguousarray(x, np.float32)
    if x.ndim in (1, 3):
        x = x[:, None]
    features = int(np.prod(x.shape[1:]))
    if x.ndim != 4:
        return x, Sizes("", in_features=features)
    if x.shape[3] in (1, 3) and x.shape[1] not in (1, 3):
        raise DataError(
            f"{what} of shape {list(x.shape)} has the channels last; save x.transpose(0, 3, 1, 2)"
        )
    side = x.shape[2] if x.shape[2] == x.shape[3] else None
    return x, Sizes("", features, in_channels=x.shape[1], image_size=side)


def _target(x: np.ndarray, sizes: Sizes, y: np.ndarray, what: str) -> tuple[np.ndarray, Sizes]:
    """The targets, and all the sizes."""
    if sizes.task == "regression":
        return y.astype(np.float32), replace(sizes, classes=int(np.prod(y.shape[1:])))
    described = f"{what} is {y.dtype} of shape {list(y.shape)}"
    if sizes.task == "language_modelling":
        if x.shape != y.shape or sizes.vocab is None or y.dtype.kind not in "iu":
            raise DataError(
                f"{described}; language modelling needs token ids of the inputs' shape "
                f"{list(x.shape)}"
            )
        check_count(int(y.max()) + 1, f"{what}: the token id {y.max():,}")
        vocab = max(sizes.vocab, int(y.max()) + 1)
        return y.astype(np.int64), replace(sizes, vocab=vocab, classes=vocab)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1 or (y.dtype.kind == "f" and (y != np.round(y)).any()) or y.min() < 0:
        raise DataError(f"{described}; classification needs one whole number from 0 per sample")
    classes = int(y.max()) + 1
    check_count(classes, f"{what}: the label {classes - 1:,}")
    check_classes([str(label) for label in range(classes)], what)
    return y.astype(np.int64), replace(sizes, classes=classes)


def _task(x: np.ndarray, y: np.ndarray, asked: str) -> tuple[str, str]:
    if asked != "auto":
        return asked, "asked for"
    if x.dtype.kind in "iu" and y.shape == x.shape and y.dtype.kind in "iu" and x.ndim == 2:
        return "language_modelling", "the targets are token ids of the inputs' shape"
    if y.dtype.kind == "f":
        return "regression", "the targets are floats; for classes use data.task=classification"
    if y.ndim > 1 and y.shape[1:] != (1,):
        return "regression", "there are several targets for each sample"
    if y.dtype.kind == "b":
        return "classification", "the targets are true or false"
    return guess_task(y.astype(np.float64))
