"""A user's table: numbers are standardised, texts become one column per category."""

from __future__ import annotations

import numpy as np
import torch

from runner.batch import Column, Sizes
from runner.data.bad import dropping, left_out
from runner.data.config import Tabular
from runner.data.labels import check_classes, check_task, encode, guess_task
from runner.data.order import split
from runner.data.paths import suggestion
from runner.data.table import Table, bad_cells, numbers, read_table
from runner.data.tensors import Tensors, scale_of, standardised
from runner.errors import ConfigError, DataError
from runner.technique import Choice

MOST_CATEGORIES = 256


def tabular(config: Tabular) -> Tensors:
    """Rows float32 [features], and the target: int64 label or float32 value."""
    check_task(config.task, ("classification", "regression"))
    table = read_table(config.path, dropping(config))
    table.column(config.target, "data.target")
    for name in config.ignore:
        table.column(name, "data.ignore")
    used = [n for n in table.columns if n != config.target and n not in config.ignore]
    if not used:
        raise ConfigError("data.target", f"{table.path} has no column beside it to learn from")
    if dropping(config):
        table = table.without(bad_cells(table, [*used, config.target], config.most_bad))
    total = len(table) + len(table.problems)
    choices = left_out(table.problems, total, config, str(table.path))
    parts = split(len(table), config.validation, config.split_seed, str(table.path))
    read = [_features(table, name, parts[0]) for name in used]
    inputs = np.concatenate([values for values, _ in read], axis=1)
    columns = tuple(column for _, column in read)
    features = inputs.shape[1]

    task, reason, target = _target(table, config)
    if config.task == "auto":
        choices = (*choices, Choice("data.task", task, reason))
    if task == "regression":
        mean, deviation, choice = scale_of(target, parts[0])
        choices = (*choices, choice)
        sizes = Sizes(
            "regression", features, classes=1, target_mean=mean, target_deviation=deviation
        )
        values = torch.from_numpy(target.astype(np.float32))
    else:
        labels, names = encode(target.tolist())
        check_classes(names, f"{table.path}: column {config.target!r}")
        sizes = Sizes("classification", features, classes=len(names), class_names=names)
        values = torch.from_numpy(labels)
    return Tensors(
        torch.from_numpy(inputs), values, sizes, parts, choices, columns, table.where, "data.ignore"
    )


def _features(table: Table, name: str, train: np.ndarray) -> tuple[np.ndarray, Column]:
    """The column as float32 [rows, width], and what was made of it."""
    values = numbers(table, name)
    if values is not None:
        scaled, mean, deviation = standardised(values[:, None], train)
        return scaled, Column(name, 1, float(mean[0]), float(deviation[0]))
    labels, names = encode([str(v) for v in table.columns[name]])
    if len(names) > MOST_CATEGORIES:
        raise DataError(
            f"{table.path}: column {name!r} has {len(names):,} different texts, more than "
            f"{MOST_CATEGORIES} categories; leave it out with data.ignore=[{name}]"
        )
    one_hot: np.ndarray = np.eye(len(names), dtype=np.float32)[labels]
    return one_hot, Column(name, len(names), values=names)


def _target(table: Table, config: Tabular) -> tuple[str, str, np.ndarray]:
    """The task, why, and the column to predict: texts, or numbers."""
    values = numbers(table, config.target)
    if values is None:
        if config.task == "regression":
            first = next(v for v in table.columns[config.target] if not _is_number(v))
            raise ConfigError(
                "data.task",
                f"column {config.target!r} holds texts such as {first!r}, which have no size",
                suggestion("classification", ["classification"], "use"),
            )
        texts = np.array([str(v) for v in table.columns[config.target]], dtype=object)
        return "classification", f"column {config.target!r} holds texts", texts
    task, reason = guess_task(values)
    if config.task != "auto":
        task, reason = config.task, "asked for"
    return task, f"{reason}; data.task says otherwise where that is wrong", values


def _is_number(value: object) -> bool:
    try:
        float(str(value))
    except ValueError:
        return False
    return True
