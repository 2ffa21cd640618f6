"""A user's table: numbers are standardised, texts become one input per category.

`fit_columns` learns what is made of each column, from training rows; `encode` applies it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from runner.data.batch import Column, Sizes
from runner.data.config import Tabular
from runner.data.labels import check_classes, check_task, class_name, guess_task
from runner.data.order import split
from runner.data.table import LONGEST, Table, Texts, Values, check_memory, read_table
from runner.data.tensors import Tensors, fit_scale, scale, scale_of
from runner.errors import ConfigError, DataError
from runner.techniques.base import Choice

MOST_CATEGORIES = 256
FEATURE = 4  # bytes of a float32


def tabular(config: Tabular) -> Tensors:
    """Rows float32 [features], and the target: int64 label or float32 value."""
    check_task(config.task, ("classification", "regression"))
    table = read_table(config, {"data.target": config.target}, config.ignore)
    target = table.columns.pop(config.target)
    if not table.columns:
        raise ConfigError("data.target", f"{table.path} has no column beside it to learn from")
    count = len(target.codes if isinstance(target, Texts) else target)
    parts = split(count, config.validation, config.split_seed, str(table.path))
    columns = fit_columns(table, parts[0])
    inputs = torch.from_numpy(encode(table, columns))
    task, reason = _task(target, config)
    choices = table.choices
    if config.task == "auto":
        choices = (*choices, Choice("data.task", task, reason))
    sizes = Sizes(task, inputs.shape[1], classes=1)
    if task == "regression" and isinstance(target, np.ndarray):
        mean, deviation, choice = scale_of(target, parts[0])
        choices = (*choices, choice)
        sizes = replace(sizes, target_mean=mean, target_deviation=deviation)
        values = target.astype(np.float32)
    else:
        names, values = _classes(target)
        check_classes(names, f"{table.path}: column {config.target!r}")
        sizes = replace(sizes, classes=len(names), class_names=names)
    known = (choices, columns, table.rows, "data.ignore")
    return Tensors(inputs, torch.from_numpy(values), sizes, parts, *known)


def fit_columns(table: Table, train: np.ndarray) -> tuple[Column, ...]:
    """What becomes of each column: mean and deviation over the rows `train`, or its categories."""
    return tuple(_fit(table, name, values, train) for name, values in table.columns.items())


def encode(table: Table, columns: Sequence[Column]) -> np.ndarray:
    """The fitted columns as float32 [rows, features]; they are taken out of the table."""
    parts = [_apply(table, column, table.columns.pop(column.name)) for column in columns]
    rows, width = np.arange(len(parts[0])), sum(column.width for column in columns)
    widest = max(columns, key=lambda column: column.width)
    what = f"{width:,} numbers a row, {widest.width:,} of them for column {widest.name!r},"
    fix = f"leave it out with data.ignore=[{widest.name}]"
    check_memory(table.path, FEATURE * len(rows) * width, what, fix)
    inputs = np.zeros((len(rows), width), np.float32)
    at = 0
    for column, part in zip(columns, parts, strict=True):
        if column.values:
            inputs[rows, at + part] = 1.0
        else:
            inputs[:, at] = part
        at += column.width
    return inputs


def _fit(table: Table, name: str, values: Values, train: np.ndarray) -> Column:
    if isinstance(values, np.ndarray):
        mean, deviation = fit_scale(values[:, None], train)
        return Column(name, 1, float(mean[0]), float(deviation[0]))
    if len(values.words) > MOST_CATEGORIES:
        problem = f"column {name!r} has {len(values.words):,} different texts, more than"
        fix = f"{MOST_CATEGORIES} categories; leave it out with data.ignore=[{name}]"
        raise DataError(f"{table.path}: {problem} {fix}")
    return Column(name, len(values.words), values=values.words)


def _apply(table: Table, column: Column, values: Values) -> np.ndarray:
    """Standardised numbers, or which category each row has."""
    if isinstance(values, Texts):
        return values.codes
    with np.errstate(all="ignore"):  # infinities are an error below
        scaled = scale(values, column.mean, column.deviation)
    if len(far := np.flatnonzero(~np.isfinite(scaled))):
        row = int(far[0])
        problem = f"{values[row]:g} is too far from the rest, which differ by {column.deviation:g}"
        fix = f"correct it, or leave the column out with data.ignore=[{column.name}]"
        where = f"{table.rows(row)}, column {column.name!r}"
        raise DataError(f"{table.path}: {where}: {problem}; {fix}")
    return scaled


def _task(target: Values, config: Tabular) -> tuple[str, str]:
    """The task, and why."""
    if isinstance(target, Texts):
        if config.task == "regression":
            problem = f"column {config.target!r} holds texts such as {target.words[0][:LONGEST]!r}"
            raise ConfigError("data.task", problem, "use classification")
        return "classification", f"column {config.target!r} holds texts"
    task, reason = guess_task(target)
    return (task, reason) if config.task == "auto" else (config.task, "asked for")


def _classes(target: Values) -> tuple[tuple[str, ...], np.ndarray]:
    """The names of the classes, and the label of each row."""
    if isinstance(target, Texts):
        return target.words, target.codes
    distinct, labels = np.unique(target, return_inverse=True)
    return tuple(class_name(value) for value in distinct.tolist()), labels
