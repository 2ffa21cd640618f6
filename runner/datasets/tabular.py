"""A user's table: numbers and parts of dates are standardised, texts become an input per category.

Missing numbers are filled in and get an input of their own; a missing text is a category.

`fit_columns` fits the encoding on training rows; `encode` applies it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import torch

from runner.core.data.dataset import TensorsDataset, fit_scale, scale
from runner.core.data.labels import (
    MAX_INTEGER_CLASSES,
    check_classes,
    check_task,
    class_name,
    guess_task,
    remap_labels,
    similar_labels,
)
from runner.core.data.preprocessing import DEFAULT_OPENING, OpenOptions
from runner.core.data.split import split_samples
from runner.core.data.target_scale import (
    check_log_target,
    check_transform,
    fit_target_scale,
    target_array,
    target_spread,
)
from runner.core.errors import ConfigError, DataError
from runner.core.findings import Choice, notice
from runner.core.format import join_names
from runner.core.interfaces.batch import Column, NumberFormat, Sizes
from runner.core.record.column_overrides import list_override, mapping_override
from runner.core.schemas.data import Missing, SplitRule, Tabular, TargetTransform
from runner.datasets.cells import (
    DATE_PARTS,
    ID_ROWS,
    MAX_CELL_CHARS,
    MISSING_FLAG,
    ColumnValues,
    TextColumn,
    extract_part,
    missing_cells,
)
from runner.datasets.number_format import GROUPED_NUMBER
from runner.datasets.table import (
    MEASURED,
    MISSING_KEY,
    TYPES_KEY,
    Table,
    describe_notes,
    read_table,
    split_values,
)
from runner.datasets.table_files import check_memory

FLOAT32_BYTES = 4  # bytes of a float32
CATEGORIES_KEY = "data.categories"
UNKNOWN_CATEGORIES_KEY = "data.unknown_categories"
MIN_REPEATED = 0.1  # share of rows with a repeated text, below which a column is no input


def tabular(config: Tabular, opening: OpenOptions = DEFAULT_OPENING) -> TensorsDataset:
    """Open a table: rows float32 [features], and targets (int64 labels or float32 values)."""
    check_task(config.task, ("classification", "regression"))
    fitted = opening.fitted
    needed = {"data.target": config.target} if opening.labelled else {}
    trained_on = [] if fitted is None else [column.name for column in fitted.columns]
    if opening.labelled and config.target in trained_on:
        problem = f"{config.target!r} is an input of the model, which cannot be its target, too"
        raise ConfigError("data.target", problem, "leave it out, or train a run of its own")
    if config.split_by is not None and opening.splits_samples(config):
        needed["data.split_by"] = config.split_by
    table = read_table(config, needed, config.ignore, fitted, opening.folder)
    target = table.columns.pop(config.target) if opening.labelled else None
    train, validation, rule = _split_rows(table, target, config, opening)
    if fitted is None:
        left_out = [*_move_unrepeated_to_ids(table, config)]
        notices = [*describe_notes(table, {choice.value.partition(":")[0] for choice in left_out})]
        _check_has_inputs(table, [*table.choices, *left_out])
        columns = fit_columns(table, train, config)
        encoded, unknown = encode(table, columns, config.missing.value)
        rule = (*rule, *left_out, *notices, *_column_choices(columns))
    else:
        columns = fitted.columns
        encoded, unknown = encode(table, columns)
    choices = (*table.choices, *unknown)
    if fitted is not None:
        labels, sizes = _trained_target(target, fitted.sizes, config, table), fitted.sizes
    elif target is not None:
        labels, sizes, inferred = fit_target(target, config, table, train)
        sizes = replace(sizes, in_features=encoded.shape[1])
        choices = (*choices, *inferred)
    inputs, targets = torch.from_numpy(encoded), torch.from_numpy(labels)
    parts, choices = (train, validation), (*choices, *rule)
    names = columns, table.rows, "data.ignore", table.ids
    target_columns = () if fitted is not None else (_reading(table, config.target, config),)
    return TensorsDataset(inputs, targets, sizes, parts, choices, *names, target_columns)


def _split_rows(
    table: Table, target: ColumnValues | None, config: Tabular, opening: OpenOptions
) -> tuple[np.ndarray, np.ndarray, tuple[Choice, ...]]:
    """Split the rows; remove the split column from the table if it is no input."""
    split_column, split_by, fitted = None, config.split_by, opening.fitted
    choices: tuple[Choice, ...] = ()
    if split_by is not None and opening.splits_samples(config):
        split_column = split_values(table, split_by, config.split)
        if split_by in config.ignore:
            del table.columns[split_by]
        elif config.split is SplitRule.group:
            del table.columns[split_by]
            reason = "not an input: it defines the groups"
            choices = (Choice("data.split_by", split_by, reason),)
    labels = None
    if target is not None:
        task = _infer_task(target, config)[0] if fitted is None else fitted.sizes.task
        labels = _class_labels(target)[1] if task == "classification" else None
    options = opening, table.size, config, str(table.path), labels, split_column
    train, validation, rule = split_samples(*options)
    return train, validation, (*choices, *rule)


def _move_unrepeated_to_ids(table: Table, config: Tabular) -> Iterator[Choice]:
    """Turn text columns with few repeated texts into ids; yield a notice on each."""
    import pyarrow

    for name, values in [*table.columns.items()]:
        if not isinstance(values, TextColumn) or name in config.types:
            continue
        present_codes = values.codes[~missing_cells(values)]
        counts = np.bincount(present_codes)
        repeated = int(counts[counts > 1].sum())
        if len(present_codes) >= ID_ROWS and repeated < MIN_REPEATED * len(present_codes):
            table.ids[name] = pyarrow.array(values.words).take(pyarrow.array(values.codes))
            del table.columns[name]
            reason = f"{repeated:,} of {len(present_codes):,} rows have a repeated text: "
            reason += "not an input, but copied to predictions; to use it: "
            reason += mapping_override(TYPES_KEY, {name: "text"})
            yield notice(TYPES_KEY, f"{name}: left out", reason)


def _check_has_inputs(table: Table, choices: Sequence[Choice]) -> None:
    if not table.columns:
        problem = f"{table.path} has no input column besides the target"
        reasons = [f"{x.value}: {x.reason}" for x in choices if x.is_notice and x.key == TYPES_KEY]
        raise ConfigError("data.target", "; ".join([problem, *reasons]))


def fit_columns(table: Table, train: np.ndarray, config: Tabular) -> tuple[Column, ...]:
    """Fit each column on the rows `train`: mean and standard deviation, or categories."""
    return tuple(c for name in table.columns for c in _fit_column(table, name, train, config))


def _column_choices(columns: Sequence[Column]) -> Iterator[Choice]:
    """Yield choices for the features of dates and for categories that share an input."""
    for column in columns:
        if column.others:
            kept, total = len(column.values), len(column.values) + column.others
            reason = f"the {kept:,} most frequent of {total:,} texts have an input each; "
            yield Choice(CATEGORIES_KEY, f"{column.name}: {kept:,}", f"{reason}others share one")
    for name, same in groupby(columns, key=lambda column: column.name):
        if parts := [column.part for column in same if column.part in DATE_PARTS]:
            reason = "varying date parts in UTC, and days since the first date"
            yield Choice(TYPES_KEY, f"{name}: {', '.join(parts)}", reason)


def encode(
    table: Table, columns: Sequence[Column], fill: str | None = None
) -> tuple[np.ndarray, tuple[Choice, ...]]:
    """Encode the columns as float32 [rows, features]; choices report unknown and missing cells.

    Columns are popped from the table to free their memory. `fill` names how missing numbers are
    filled in; None if the columns were fitted on other data.
    """
    width = sum(column.width for column in columns)
    widest = max(columns, key=lambda column: column.width)
    what = f"{width:,} numbers a row, {widest.width:,} of them for column {widest.name!r},"
    override = list_override("data.ignore", [widest.name])
    fix = f"leave it out with {override}" if fill else "split the file"
    check_memory(table.path, FLOAT32_BYTES * table.size * width, what, fix)
    inputs = np.zeros((table.size, width), np.float32)
    rows, offset = np.arange(len(inputs)), 0
    choices, gaps = list[Choice](), dict[str, int]()
    for name, parts in groupby(columns, key=lambda column: column.name):
        values = table.columns.pop(name)
        missing = missing_cells(values)
        gaps[name] = int(missing.sum())
        for column in parts:
            if isinstance(values, TextColumn):
                positions, unknown = _category_positions(column, values, missing)
                inputs[rows, offset + positions] = 1.0
                choices += unknown if fill is None or not column.others else ()
            else:
                numbers = extract_part(values, column.part)
                inputs[:, offset] = _standardise(table, column, numbers, not fill)
            offset += column.width
    if filled := [f"{name!r} ({count:,})" for name, count in gaps.items() if count]:
        reason = "numbers get the training rows' fill value, texts a category"
        reason = f"missing cells of {join_names(filled)}: {reason}"
        choices.append(Choice(MISSING_KEY, fill or "as in training", reason))
    return inputs, tuple(choices)


def _fit_column(table: Table, name: str, train: np.ndarray, config: Tabular) -> Iterator[Column]:
    values, unparsed = table.columns[name], table.unparsed.get(name, ())
    gaps = int(missing_cells(values)[train].sum())
    if isinstance(values, TextColumn):
        codes, counts = np.unique(values.codes[train], return_counts=True)
        total = len(codes)
        if len(train) >= ID_ROWS and name not in config.types and (counts > 1).any():
            codes, counts = codes[counts > 1], counts[counts > 1]
        most = np.sort(np.argsort(-counts, kind="stable")[: config.categories])
        words = tuple(values.words[code] for code in codes[most].tolist())
        yield Column(name, values=words, others=total - len(most), gaps=gaps)
        return
    parts = [""]
    if values.dtype.kind == "M":
        parts = [  # one at a time, as each takes the memory of a column
            part for part in DATE_PARTS if len(np.unique(_present_values(values, part, train))) > 1
        ] or ["days"]
    column = replace(_reading(table, name, config), missing=unparsed, gaps=gaps)
    for part in parts:
        numbers = _present_values(values, part, train)
        scales = fit_scale(numbers[:, None], np.arange(len(numbers)))
        mean, deviation = (float(scale[0]) for scale in scales)
        fill = float(np.median(numbers)) if config.missing is Missing.median else mean
        yield replace(column, mean=mean, deviation=deviation, part=part, fill=fill)
    if gaps:
        yield replace(column, part=MISSING_FLAG)


def _reading(table: Table, name: str, config: Tabular) -> Column:
    """Return how the cells of a column are read, as a column that is not fitted."""
    declared = name in config.date_formats or config.types.get(name) in MEASURED
    number_format = table.formats.get(name)
    is_plain = number_format in (None, NumberFormat())
    form = table.forms.get(name, "")
    return Column(name, form=form, format=None if is_plain else number_format, declared=declared)


def _present_values(values: np.ndarray, part: str, train: np.ndarray) -> np.ndarray:
    """Return `part` of the training rows without missing values, or [0] if all are missing."""
    numbers = extract_part(values[train], part)
    numbers = numbers[~np.isnan(numbers)]
    return numbers if len(numbers) else np.zeros(1)


def _category_positions(
    column: Column, values: TextColumn, missing: np.ndarray
) -> tuple[np.ndarray, list[Choice]]:
    """Return the input of the column that each row sets (the last one if unknown), and choices."""
    position_of = {word: position for position, word in enumerate(column.values)}
    positions = np.array([position_of.get(w, len(position_of)) for w in values.words])[values.codes]
    unknown = (positions == len(position_of)) & ~missing
    if not unknown.any():
        return positions, []
    words = [values.words[c][:MAX_CELL_CHARS] for c in np.unique(values.codes[unknown]).tolist()]
    status = "not in training" if not column.others else "unknown or rare in training"
    reason = f"column {column.name!r}: categories {status}: {join_names(map(repr, words))}"
    value = f"{column.name}: {int(unknown.sum()):,} of {len(positions):,} rows"
    return positions, [Choice(UNKNOWN_CATEGORIES_KEY, value, reason)]


def _standardise(table: Table, column: Column, values: np.ndarray, is_fitted: bool) -> np.ndarray:
    fill = column.mean if column.fill is None else column.fill
    with np.errstate(all="ignore"):  # infinities are an error below
        scaled = scale(np.where(np.isnan(values), fill, values), column.mean, column.deviation)
    if len(infinite_rows := np.flatnonzero(~np.isfinite(scaled))):
        row = int(infinite_rows[0])
        problem = f"{values[row]:g} is an extreme outlier (standard deviation {column.deviation:g})"
        override = list_override("data.ignore", [column.name])
        fix = "correct it" + ("" if is_fitted else f", or leave the column out with {override}")
        where = f"{table.rows(row)}, column {column.title!r}"
        raise DataError(f"{table.path}: {where}: {problem}; {fix}")
    return scaled


def fit_target(
    target: ColumnValues, config: Tabular, table: Table, train: np.ndarray
) -> tuple[np.ndarray, Sizes, tuple[Choice, ...]]:
    """Return labels or float targets, their sizes, and the choices."""
    task, reason = _infer_task(target, config)
    check_transform(config.target_transform, task, reason)
    choices: tuple[Choice, ...] = ()
    if config.task == "auto":
        choices = (Choice("data.task", task, reason),)
    if task == "regression" and isinstance(target, np.ndarray):
        if config.target_transform is TargetTransform.log:
            _check_log_target(target, config, table)
        scale, choice = fit_target_scale(target, train, config.target_transform)
        sizes = Sizes(task, classes=1, **scale)
        return target_array(target, target_spread(sizes)), sizes, (*choices, choice)
    names, labels = _class_labels(target)
    check_classes(names, f"data.target: {table.path}: column {config.target!r}")
    _check_class_sizes(names, len(labels), config, table)
    similar = similar_labels(names)
    if similar:
        choices = (*choices, notice("data.target", config.target, similar))
    return labels, Sizes(task, classes=len(names), class_names=names), choices


def _check_class_sizes(names: Sequence[str], rows: int, config: Tabular, table: Table) -> None:
    """Raise DataError for texts as classes of about one row each, unless classes are asked for."""
    if config.task != "auto" or len(names) <= max(MAX_INTEGER_CLASSES, rows / 2):
        return
    what = f"{table.path}: column {config.target!r}"
    problem = f"has {len(names):,} classes in {rows:,} rows, such as {names[0][:40]!r}"
    fix = "name another data.target, or keep them with data.task=classification"
    if config.target in table.notes:
        _, key, value = table.notes[config.target]
        override = mapping_override(key, {config.target: value})
        override += " data.thousands=comma" * bool(GROUPED_NUMBER.search(names[0]))
        fix = f"if they are {value if key == TYPES_KEY else 'date'}s, use {override}, {fix}"
    raise DataError(f"{what} {problem}, too few rows of each; {fix}")


def _trained_target(
    target: ColumnValues | None, sizes: Sizes, config: Tabular, table: Table
) -> np.ndarray:
    """Return the targets encoded as in training; DataError if they do not fit."""
    what = f"{table.path}: column {config.target!r}"
    if target is None:
        return np.zeros(table.size, np.int64)
    if sizes.task == "regression":
        if isinstance(target, TextColumn):
            problem = f"holds texts such as {target.words[0][:MAX_CELL_CHARS]!r}"
            raise DataError(f"{what} {problem}, but the model was trained on numbers")
        if sizes.log_target:
            _check_log_target(target, config, table)
        return target_array(target, target_spread(sizes))
    names, labels = _class_labels(target)
    return remap_labels(names, labels, sizes.class_names, what)


def _check_log_target(target: np.ndarray, config: Tabular, table: Table) -> None:
    column = f"column {config.target!r}"
    check_log_target(target, lambda row: f"{table.path}: {table.rows(row)}, {column}")


def _infer_task(target: ColumnValues, config: Tabular) -> tuple[str, str]:
    if isinstance(target, np.ndarray) and target.dtype.kind == "M":
        problem = f"column {config.target!r} holds dates, which cannot be predicted"
        raise ConfigError("data.target", problem, "name another column, or convert it to numbers")
    if isinstance(target, TextColumn):
        if config.task == "regression":
            example = target.words[0][:MAX_CELL_CHARS]
            problem = f"column {config.target!r} holds texts such as {example!r}"
            raise ConfigError("data.task", problem, "use classification")
        return "classification", f"column {config.target!r} holds texts"
    task, reason = guess_task(target)
    return (task, reason) if config.task == "auto" else (config.task, "requested")


def _class_labels(target: ColumnValues) -> tuple[tuple[str, ...], np.ndarray]:
    if isinstance(target, TextColumn):
        return target.words, target.codes
    distinct, labels = np.unique(target, return_inverse=True)
    return tuple(class_name(value) for value in distinct.tolist()), labels
