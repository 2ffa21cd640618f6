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
from runner.data.preprocessing import Opening, trained_labels
from runner.data.table import LONGEST, NAMED, Table, Texts, Values, read_table
from runner.data.table_files import check_memory
from runner.data.tensors import Tensors, fit_scale, scale, scale_of
from runner.errors import ConfigError, DataError
from runner.techniques.base import Choice

MOST_CATEGORIES = 256
FEATURE = 4  # bytes of a float32
UNKNOWN = "data.unknown_categories"
PLAIN = Opening()


def tabular(config: Tabular, opening: Opening = PLAIN) -> Tensors:
    """Rows float32 [features], and the target: int64 label or float32 value."""
    check_task(config.task, ("classification", "regression"))
    fitted = opening.fitted
    needed = {"data.target": config.target} if opening.labelled else {}
    table = read_table(config, needed, config.ignore, fitted)
    target = table.columns.pop(config.target) if opening.labelled else None
    if not table.columns:
        raise ConfigError("data.target", f"{table.path} has no column beside it to learn from")
    *parts, choices = opening.split(table.size, config, str(table.path))
    columns = fit_columns(table, parts[0]) if fitted is None else fitted.columns
    encoded, unknown = encode(table, columns)
    choices = (*table.choices, *choices, *unknown)
    if fitted is not None:
        labels, sizes = _trained_target(target, fitted.sizes, config, table), fitted.sizes
    elif target is not None:
        labels, sizes, found = fit_target(target, config, table, parts[0])
        sizes = replace(sizes, in_features=encoded.shape[1])
        choices = (*choices, *found)
    inputs, targets = torch.from_numpy(encoded), torch.from_numpy(labels)
    known = (choices, columns, table.rows, "data.ignore")
    return Tensors(inputs, targets, sizes, (parts[0], parts[1]), *known)


def fit_columns(table: Table, train: np.ndarray) -> tuple[Column, ...]:
    """What becomes of each column: mean and deviation over the rows `train`, or its categories."""
    return tuple(_fit(table, name, values, train) for name, values in table.columns.items())


def encode(table: Table, columns: Sequence[Column]) -> tuple[np.ndarray, tuple[Choice, ...]]:
    """The fitted columns as float32 [rows, features], and which rows have unknown categories.

    The columns are taken out of the table, so that their memory is free.
    """
    width = sum(column.width for column in columns)
    widest = max(columns, key=lambda column: column.width)
    what = f"{width:,} numbers a row, {widest.width:,} of them for column {widest.name!r},"
    fix = f"leave it out with data.ignore=[{widest.name}]"
    check_memory(table.path, FEATURE * table.size * width, what, fix)
    inputs = np.zeros((table.size, width), np.float32)
    rows, at = np.arange(len(inputs)), 0
    choices: list[Choice] = []
    for column in columns:
        values = table.columns.pop(column.name)
        if isinstance(values, Texts):
            places, unknown = _places(column, values)
            inputs[rows, at + places] = 1.0
            choices += unknown
        else:
            inputs[:, at] = _standardised(table, column, values)
        at += column.width
    return inputs, tuple(choices)


def _fit(table: Table, name: str, values: Values, train: np.ndarray) -> Column:
    if isinstance(values, np.ndarray):
        mean, deviation = fit_scale(values[:, None], train)
        return Column(name, float(mean[0]), float(deviation[0]))
    words = tuple(values.words[code] for code in np.unique(values.codes[train]).tolist())
    if len(words) > MOST_CATEGORIES:
        problem = f"column {name!r} has {len(words):,} different texts, more than"
        fix = f"{MOST_CATEGORIES} categories; leave it out with data.ignore=[{name}]"
        raise DataError(f"{table.path}: {problem} {fix}")
    return Column(name, values=words)


def _places(column: Column, values: Texts) -> tuple[np.ndarray, list[Choice]]:
    """Which of the column's inputs each row sets; the last one for a category not trained on."""
    known = {word: place for place, word in enumerate(column.values)}
    places = np.array([known.get(word, len(known)) for word in values.words])[values.codes]
    unknown = places == len(known)
    if not unknown.any():
        return places, []
    words = [values.words[code][:LONGEST] for code in np.unique(values.codes[unknown]).tolist()]
    examples = ", ".join(map(repr, words[:NAMED])) + (", …" if len(words) > NAMED else "")
    reason = f"column {column.name!r}: categories that no training row has: {examples}"
    value = f"{int(unknown.sum()):,} of {len(places):,} rows"
    return places, [Choice(UNKNOWN, value, reason)]


def _standardised(table: Table, column: Column, values: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):  # infinities are an error below
        scaled = scale(values, column.mean, column.deviation)
    if len(far := np.flatnonzero(~np.isfinite(scaled))):
        row = int(far[0])
        problem = f"{values[row]:g} is too far from the rest, which differ by {column.deviation:g}"
        fix = f"correct it, or leave the column out with data.ignore=[{column.name}]"
        where = f"{table.rows(row)}, column {column.name!r}"
        raise DataError(f"{table.path}: {where}: {problem}; {fix}")
    return scaled


def fit_target(
    target: Values, config: Tabular, table: Table, train: np.ndarray
) -> tuple[np.ndarray, Sizes, tuple[Choice, ...]]:
    """Labels or quantities, the sizes that follow from them, and what was chosen."""
    task, reason = _task(target, config)
    choices: tuple[Choice, ...] = ()
    if config.task == "auto":
        choices = (Choice("data.task", task, reason),)
    if task == "regression" and isinstance(target, np.ndarray):
        mean, deviation, choice = scale_of(target, train)
        sizes = Sizes(task, classes=1, target_mean=mean, target_deviation=deviation)
        return target.astype(np.float32), sizes, (*choices, choice)
    names, labels = _classes(target)
    check_classes(names, f"{table.path}: column {config.target!r}")
    return labels, Sizes(task, classes=len(names), class_names=names), choices


def _trained_target(
    target: Values | None, sizes: Sizes, config: Tabular, table: Table
) -> np.ndarray:
    """Labels or quantities as those that the model was trained on."""
    what = f"{table.path}: column {config.target!r}"
    if target is None:
        return np.zeros(table.size, np.int64)
    if sizes.task == "regression":
        if isinstance(target, Texts):
            problem = f"holds texts such as {target.words[0][:LONGEST]!r}"
            raise DataError(f"{what} {problem}, and the model was trained on numbers")
        return target.astype(np.float32)
    names, labels = _classes(target)
    return trained_labels(names, labels, sizes.class_names, what)


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
