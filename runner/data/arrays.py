"""A user's `.npz`: one array of inputs and one of targets, the sample first."""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from runner.batch import Sizes
from runner.data.config import Arrays
from runner.data.labels import check_classes, check_task, guess_task
from runner.data.order import split
from runner.data.paths import existing, suggestion
from runner.data.tensors import Tensors, scale_of
from runner.errors import ConfigError, DataError
from runner.technique import Choice

TASKS = ("classification", "language_modelling", "regression")


def arrays(config: Arrays) -> Tensors:
    """Inputs as they are, but for these: floats become float32, and uint8 images 0 to 1.

    Images are [samples, channels, height, width] or [samples, height, width]; whole numbers
    [samples, length] are token ids.
    """
    check_task(config.task, TASKS)
    path = existing(config.path)
    x = _read(path, config.inputs, "data.inputs")
    y = _read(path, config.target, "data.target")
    for key, array in ((config.inputs, x), (config.target, y)):
        if not array.ndim or not len(array):
            raise DataError(f"{path}: array {key!r} of shape {list(array.shape)} holds no samples")
        if array.dtype.kind not in "fiub":
            raise DataError(f"{path}: array {key!r} is of type {array.dtype}, which is no number")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            row = np.argwhere(~np.isfinite(array))[0].tolist()
            raise DataError(f"{path}: array {key!r} at {row}: {array[tuple(row)]} is not finite")
    if len(x) != len(y):
        raise DataError(
            f"{path}: {config.inputs!r} has {len(x):,} samples and {config.target!r} has "
            f"{len(y):,}; the first dimension of both is the sample"
        )
    inputs, shape = _inputs(x, f"{path}: array {config.inputs!r}")
    target, sizes, reason = _target(inputs, shape, y, config, f"{path}: array {config.target!r}")
    choices = (Choice("data.task", sizes.task, reason),) if config.task == "auto" else ()
    parts = split(len(x), config.validation, config.split_seed, str(path))
    if sizes.task == "regression":
        mean, deviation, choice = scale_of(target, parts[0])
        sizes = replace(sizes, target_mean=mean, target_deviation=deviation)
        choices = (*choices, choice)
    return Tensors(torch.from_numpy(inputs), torch.from_numpy(target), sizes, parts, choices)


def _read(path: Path, name: str, key: str) -> np.ndarray:
    try:
        # opened here, because np.load does not close a file that turns out to be broken
        with path.open("rb") as opened:
            file = np.load(opened, allow_pickle=False)
            if isinstance(file, np.ndarray):
                raise DataError(
                    f"{path}: is a single array; save both with np.savez(path, x=…, y=…)"
                )
            if name not in file.files:
                near = suggestion(name, file.files, "its arrays are")
                raise ConfigError(key, f"{path} has no array {name!r}", near)
            array: np.ndarray = file[name]
    except (ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f"{path}: array {name!r} cannot be read: {error}; save plain numbers with np.savez "
            "(objects are not read, since unpickling can run code)"
        ) from None
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
    check_classes([str(label) for label in range(classes)], what)
    return y.astype(np.int64), Sizes(task, **{**known, "classes": classes}), reason


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
