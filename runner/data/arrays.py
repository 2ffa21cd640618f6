"""A user's `.npz`: one array of inputs and one of targets, the sample first."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runner.data.batch import RowNames, Sizes
from runner.data.config import Arrays
from runner.data.dataset import drops_bad_samples, report_bad_samples
from runner.data.labels import check_classes, check_count, check_task, guess_task
from runner.data.order import split
from runner.data.paths import existing, suggestion
from runner.data.tensors import Tensors, scale_of
from runner.errors import ConfigError, DataError
from runner.security.files.policy import Policy
from runner.security.files.state import read_arrays
from runner.techniques.base import Choice

log = logging.getLogger("runner")

TASKS = ("classification", "language_modelling", "regression")
TABLES = (".csv", ".tsv", ".parquet")


def arrays(config: Arrays, policy: Policy | None = None) -> Tensors:
    """Inputs as they are, but for these: floats become float32, and uint8 images 0 to 1.

    Images are [samples, channels, height, width] or [samples, height, width]; whole numbers
    [samples, length] are token ids. The file is examined first: SecurityError for
    one that is malformed, or holds objects, which are a pickle.
    """
    check_task(config.task, TASKS)
    path = existing(config.path)
    if path.suffix.lower() in TABLES:
        raise ConfigError("data.path", f"{path} is a table and no .npz", "use data=tabular")
    held = read_arrays(path, policy or Policy())
    x = _pick(held, path, config.inputs, "data.inputs")
    y = _pick(held, path, config.target, "data.target")
    for key, array in ((config.inputs, x), (config.target, y)):
        if not array.ndim or not array.size:  # samples without values take no bytes: any number
            raise DataError(f"{path}: array {key!r} of shape {list(array.shape)} holds no samples")
        if array.dtype.kind not in "fiub":
            raise DataError(
                f"{path}: array {key!r} is of type {array.dtype}, which is no number"
                + ("; for classes save np.unique(y, return_inverse=True)[1]" * (array is y))
            )
    if len(x) != len(y):
        raise DataError(
            f"{path}: {config.inputs!r} has {len(x):,} samples and {config.target!r} has "
            f"{len(y):,}; the first dimension of both is the sample"
        )
    choices: tuple[Choice, ...] = ()
    rows = RowNames()
    if drops_bad_samples(config):
        bad = _bad_rows(x, config.inputs) | _bad_rows(y, config.target)
        problems = [f"sample {row}: {bad[row]}" for row in sorted(bad)]
        choices = report_bad_samples(problems, len(x), config, str(path))
        stay = np.delete(np.arange(len(x)), sorted(bad))
        x, y, rows = x[stay], y[stay], RowNames(numbers=stay)
    for key, array in ((config.inputs, x), (config.target, y)):
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            row = np.argwhere(~np.isfinite(array))[0].tolist()
            raise DataError(f"{path}: array {key!r} at {row}: {array[tuple(row)]} is not finite")
    inputs, shape = _inputs(x, f"{path}: array {config.inputs!r}")
    target, sizes, reason = _target(inputs, shape, y, config, f"{path}: array {config.target!r}")
    if config.task == "auto":
        if sizes.task == "regression" and (labels := _labels_as_floats(y)):
            log.warning(
                "%s: array %r: %s, and floats are quantities, so this is a regression; if "
                "they are classes, use data.task=classification",
                path,
                config.target,
                labels,
            )
            reason += "; for classes data.task=classification"
        choices = (*choices, Choice("data.task", sizes.task, reason))
    parts = split(len(x), config.validation, config.split_seed, str(path))
    if sizes.task == "regression":
        mean, deviation, choice = scale_of(target, parts[0])
        sizes = replace(sizes, target_mean=mean, target_deviation=deviation)
        choices = (*choices, choice)
    return Tensors(
        torch.from_numpy(inputs), torch.from_numpy(target), sizes, parts, choices, rows=rows
    )


def _bad_rows(array: np.ndarray, name: str) -> dict[int, str]:
    """What is wrong with each sample that has a value which is not finite, or negative labels."""
    flat = array.reshape(len(array), -1)
    # whole numbers are ids and labels, which count from 0; a quantity may well be below it
    ids = array.dtype.kind == "i" and (flat >= 0).mean() > 0.5
    bad = ~np.isfinite(flat) if array.dtype.kind == "f" else flat < (0 if ids else -np.inf)
    first = bad.argmax(1)
    return {
        row: f"{name!r} has {flat[row, first[row]]}, which is "
        + ("negative" if ids else "not finite")
        for row in np.flatnonzero(bad.any(1)).tolist()
    }


def _pick(held: Any, path: Path, name: str, key: str) -> np.ndarray:
    if isinstance(held, np.ndarray):
        raise DataError(f"{path}: is a single array; save both with np.savez(path, x=…, y=…)")
    if name not in held:
        near = suggestion(name, list(held), "its arrays are")
        raise ConfigError(key, f"{path} has no array {name!r}", near)
    array: np.ndarray = held[name]
    return array


def _inputs(x: np.ndarray, what: str) -> tuple[np.ndarray, Sizes]:
    """The inputs as the model gets them, and the sizes that they tell."""
    if x.ndim >= 3 and x.dtype == np.uint8:
        x = x.astype(np.float32) / 255
    if x.dtype.kind == "f":
        x = np.ascontiguousarray(x, np.float32)
        if x.ndim == 1:
            x = x[:, None]
        if x.ndim == 3:
            x = x[:, None]
        if x.ndim != 4:
            return x, Sizes("", in_features=int(np.prod(x.shape[1:])))
        if x.shape[3] in (1, 3) and x.shape[1] not in (1, 3):
            raise DataError(
                f"{what} of shape {list(x.shape)} has the channels last; "
                "save x.transpose(0, 3, 1, 2)"
            )
        square = x.shape[2] if x.shape[2] == x.shape[3] else None
        return x, Sizes("", int(np.prod(x.shape[1:])), in_channels=x.shape[1], image_size=square)
    if x.ndim != 2 or x.dtype.kind == "b":
        raise DataError(
            f"{what} is {x.dtype} of shape {list(x.shape)}; whole numbers are token ids "
            "[samples, length], and anything else is saved as float32"
        )
    if x.min() < 0:
        row = np.argwhere(x < 0)[0].tolist()
        raise DataError(f"{what} at {row}: the token id {x[tuple(row)]} is negative")
    check_count(int(x.max()) + 1, f"{what}: the token id {x.max():,}")
    return x.astype(np.int64), Sizes("", vocab=int(x.max()) + 1, sequence=x.shape[1])


def _target(
    x: np.ndarray, shape: Sizes, y: np.ndarray, config: Arrays, what: str
) -> tuple[np.ndarray, Sizes, str]:
    """The targets, all the sizes, and why the task is what it is."""
    task, reason = _task(x, y, config.task)
    known = {k: v for k, v in vars(shape).items() if k != "task"}
    if task == "language_modelling":
        if x.shape != y.shape or shape.vocab is None or y.dtype.kind not in "iu":
            raise DataError(
                f"{what} is {y.dtype} of shape {list(y.shape)}; language modelling needs "
                f"token ids of the inputs' shape {list(x.shape)}"
            )
        check_count(int(y.max()) + 1, f"{what}: the token id {y.max():,}")
        known["vocab"] = vocab = max(shape.vocab, int(y.max()) + 1)
        return y.astype(np.int64), Sizes(task, **{**known, "classes": vocab}), reason
    if task == "regression":
        outputs = int(np.prod(y.shape[1:]))
        return y.astype(np.float32), Sizes(task, **{**known, "classes": outputs}), reason
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1 or (y.dtype.kind == "f" and (y != np.round(y)).any()):
        raise DataError(
            f"{what} is {y.dtype} of shape {list(y.shape)}; classification needs one whole "
            "number for each sample"
        )
    if y.min() < 0:
        row = int(np.argmin(y))
        raise DataError(f"{what} at [{row}]: the label {y[row]} is negative; labels count from 0")
    classes = int(y.max()) + 1
    check_count(classes, f"{what}: the label {classes - 1:,}")
    check_classes([str(label) for label in range(classes)], what)
    return y.astype(np.int64), Sizes(task, **{**known, "classes": classes}), reason


def _labels_as_floats(y: np.ndarray) -> str:
    """What speaks for it that floats, one a sample, are labels; nothing where nothing does."""
    if y.dtype.kind != "f" or y.size != len(y) or y.min() == y.max():
        return ""
    task, reason = guess_task(y.astype(np.float64))
    return reason if task == "classification" else ""


def _task(x: np.ndarray, y: np.ndarray, asked: str) -> tuple[str, str]:
    if asked != "auto":
        return asked, "asked for"
    if x.dtype == np.int64 and y.shape == x.shape and y.dtype.kind in "iu":
        return "language_modelling", "the targets are token ids of the inputs' shape"
    if y.dtype.kind == "f":
        return "regression", "the targets are floats"
    if y.ndim > 1 and y.shape[1:] != (1,):
        return "regression", "there are several targets for each sample"
    if y.dtype.kind == "b":
        return "classification", "the targets are true or false"
    return guess_task(y.astype(np.float64))
