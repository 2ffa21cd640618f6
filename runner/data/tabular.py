"""A user's table: numbers are standardised, texts become one column per category."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

import numpy as np
import torch

from runner.data.batch import Column, Sizes
from runner.data.config import Tabular
from runner.data.dataset import drops_bad_samples, report_bad_samples
from runner.data.labels import check_classes, check_task, class_name, guess_task
from runner.data.order import split
from runner.data.paths import suggestion
from runner.data.table import (
    LONGEST,
    Table,
    bad_cells,
    check_memory,
    numbers,
    read_table,
    words_of,
)
from runner.data.tensors import Tensors, scale_of, standardised
from runner.errors import ConfigError, DataError
from runner.techniques.base import Choice

log = logging.getLogger("runner")

MOST_CATEGORIES = 256
FEATURE = 4  # bytes of a float32
DECIMAL_COMMA = re.compile(r"-?[0-9.]*[0-9],[0-9]+")


def tabular(config: Tabular) -> Tensors:
    """Rows float32 [features], and the target: int64 label or float32 value."""
    check_task(config.task, ("classification", "regression"))
    table = read_table(config.path, drops_bad_samples(config))
    table.column(config.target, "data.target")
    for name in config.ignore:
        table.column(name, "data.ignore")
    used = [n for n in table.columns if n != config.target and n not in config.ignore]
    if not used:
        raise ConfigError("data.target", f"{table.path} has no column beside it to learn from")
    if drops_bad_samples(config):
        table = table.without(bad_cells(table, [*used, config.target], config.most_bad))
    total = len(table) + len(table.problems)
    choices = report_bad_samples(table.problems, total, config, str(table.path))
    parts = split(len(table), config.validation, config.split_seed, str(table.path))
    inputs, columns = _inputs(table, used, parts[0])
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
        distinct, labels = np.unique(target, return_inverse=True)
        names = tuple(class_name(value) for value in distinct.tolist())
        check_classes(names, f"{table.path}: column {config.target!r}")
        sizes = Sizes("classification", features, classes=len(names), class_names=names)
        values = torch.from_numpy(labels)
    return Tensors(
        torch.from_numpy(inputs), values, sizes, parts, choices, columns, table.where, "data.ignore"
    )


def _inputs(
    table: Table, used: Sequence[str], train: np.ndarray
) -> tuple[np.ndarray, tuple[Column, ...]]:
    """The columns as float32 [rows, features], and what was made of each."""
    read = []
    for name in used:
        read.append(_column(table, name, train))
        del table.columns[name]  # frees its memory; the target stays
    rows, width = np.arange(len(table)), sum(column.width for _, column in read)
    widest = max((column for _, column in read), key=lambda column: column.width)
    check_memory(
        table.path,
        FEATURE * len(rows) * width,
        f"{width:,} numbers a row, {widest.width:,} of them for column {widest.name!r},",
        f"leave it out with data.ignore=[{widest.name}]",
    )
    inputs = np.zeros((len(rows), width), np.float32)
    at = 0
    for values, column in read:
        if column.values:
            inputs[rows, at + values] = 1.0
        else:
            inputs[:, at] = values
        at += column.width
    return inputs, tuple(column for _, column in read)


def _column(table: Table, name: str, train: np.ndarray) -> tuple[np.ndarray, Column]:
    """Standardised numbers, or which category each row has; and what becomes of it."""
    leave_out = f"leave it out with data.ignore=[{name}]"
    found = numbers(table, name)
    if found is not None:
        with np.errstate(all="ignore"):  # said below
            scaled, mean, deviation = standardised(found[:, None], train)
        if len(far := np.flatnonzero(~np.isfinite(scaled[:, 0]))):
            raise DataError(
                f"{table.path}: {table.where(int(far[0]))}, column {name!r}: {found[far[0]]:g} is "
                f"too far from the rest, which differ by {deviation[0]:g}; correct it, or "
                f"{leave_out}"
            )
        return scaled[:, 0], Column(name, 1, float(mean[0]), float(deviation[0]))
    labels, texts = _categories(table, name)
    commas = _decimal_commas(texts)
    if len(texts) > MOST_CATEGORIES:
        raise DataError(
            f"{table.path}: column {name!r} has {len(texts):,} different texts, more than "
            f"{MOST_CATEGORIES} categories; {commas or leave_out}"
        )
    if commas:
        log.warning("%s: column %r is taken for categories; %s", table.path, name, commas)
    return labels, Column(name, len(texts), values=texts)


def _categories(table: Table, name: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Which category each row has, and the categories, sorted."""
    codes, words = words_of(table.columns[name])
    used = [words[code] or "" for code in np.unique(codes).tolist()]
    texts = sorted(set(used))
    place = {word: number for number, word in enumerate(texts)}
    numbered = np.array([place.get(word or "", 0) for word in words])
    return numbered[codes], tuple(texts)


def _target(table: Table, config: Tabular) -> tuple[str, str, np.ndarray]:
    """The task, why, and the column to predict: texts, or numbers."""
    values = numbers(table, config.target)
    if values is None:
        if config.task == "regression":
            words = words_of(table.columns[config.target])[1]
            first = next(word for word in words if word and not _is_number(word))[:LONGEST]
            raise ConfigError(
                "data.task",
                f"column {config.target!r} holds texts such as {first!r}, which have no size",
                suggestion("classification", ["classification"], "use"),
            )
        codes, texts = _categories(table, config.target)
        classes = np.array(texts, dtype=object)[codes]
        if commas := _decimal_commas(texts):
            log.warning("%s: column %r is taken for classes; %s", table.path, config.target, commas)
        return "classification", f"column {config.target!r} holds texts", classes
    task, reason = guess_task(values)
    if config.task != "auto":
        task, reason = config.task, "asked for"
    return task, f"{reason}; data.task says otherwise where that is wrong", values


def _decimal_commas(texts: Sequence[str]) -> str:
    """What to do where all of them look like numbers as half of the world writes them."""
    if not all(DECIMAL_COMMA.fullmatch(text) for text in texts):
        return ""
    return (
        f"all of them look like numbers with a decimal comma, such as {texts[0][:LONGEST]!r}: save "
        "the table with decimal points"
    )


def _is_number(value: object) -> bool:
    try:
        float(str(value))
    except ValueError:
        return False
    return True
