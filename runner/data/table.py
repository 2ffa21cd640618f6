"""Reading of tables from csv and parquet files, and detection of bad rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runner.data.batch import RowNames
from runner.data.cells import (
    DATE_EXAMPLES,
    DATE_PARTS,
    MAX_CELL_CHARS,
    MAX_UNPARSED,
    MISSING_FLAG,
    CellKind,
    ColumnValues,
    ParsedColumn,
    TextColumn,
    describe_form,
    id_reason,
    missing_cells,
    parse_column,
    parse_number,
    parse_time,
    select_rows,
)
from runner.data.config import BadSamples, ColumnType, Missing, SplitRule, Tabular, Text
from runner.data.labels import class_name
from runner.data.paths import existing_path
from runner.data.preprocessing import Preprocessing
from runner.data.problems import IGNORE_KEY, MISSING_KEY, TYPES_KEY, TableProblems
from runner.data.saved_dataset import is_saved
from runner.data.table_files import TableContent, read_content
from runner.data.usable import BAD_SAMPLES_KEY, MAX_EXAMPLES
from runner.errors import ConfigError, DataError
from runner.techniques.base import Choice

log = logging.getLogger(__name__)

MAX_WORDS = 100  # texts read as missing that are stored for other data
KIND_BY_TYPE = {
    ColumnType.number: CellKind.numbers,
    ColumnType.text: CellKind.texts,
    ColumnType.date: CellKind.times,
    ColumnType.id: CellKind.texts,
}


@dataclass(frozen=True)
class Table:
    """A table's columns by name, without the dropped rows."""

    path: Path
    columns: dict[str, ColumnValues]
    rows: RowNames  # names of rows in messages, such as `line 17`
    choices: tuple[Choice, ...]  # which rows were left out, and what columns were read as
    size: int  # rows
    unparsed: dict[str, tuple[str, ...]]  # by column, texts among numbers that are read as missing
    ids: dict[str, Any]  # arrow columns that name the rows
    forms: dict[str, str]  # by column, how dates are written that are not ISO 8601


def read_table(
    config: Tabular | Text,
    needed: dict[str, str],
    ignore: Sequence[str] | None = None,
    fitted: Preprocessing | None = None,
    folder: str = "",
) -> Table:
    """Read the columns `needed` (by config key) of the table `folder` in `data.path`, as texts.

    With `ignore`, read all other columns, each with its own type; with `fitted`, its columns with
    their fitted types, in any order. Rows with a bad cell, or a missing one in a `needed` column,
    are dropped with `data.bad_samples=drop`; rows with other missing cells with
    `data.missing=drop`. All other problems are one ConfigError or DataError.
    """
    path = existing_path(config.path) / folder
    if path.is_dir() and not is_saved(path):
        raise ConfigError("data.path", f"{path} is a folder", "name the csv or parquet file in it")
    types = config.types if isinstance(config, Tabular) and fitted is None else {}
    problems = TableProblems(path, config, dict(needed), [*(ignore or ())], dict(types))
    kinds = {} if fitted is None else _fitted_kinds(fitted)

    def kind(name: str) -> CellKind:
        if ignore is None:
            return CellKind.texts
        declared = problems.types.get(name)
        return KIND_BY_TYPE[declared] if declared else kinds.get(name, CellKind.any)

    def select(names: Sequence[str], unreadable: Mapping[str, Any]) -> list[str]:
        return _select_columns(problems, ignore is None, fitted, names, unreadable)

    try:
        content = read_content(path, select, kind, config, fitted)
        problems.word, problems.total = content.word, len(content.numbers) + len(content.malformed)
        if not problems.total:
            raise DataError(f"data.path: {path} has no rows below its header")
    except DataError as error:
        problems.raise_if_any(error)
        raise
    index = _drop_index_column(content, path)
    ids, id_choices = _pop_id_columns(content, problems, fitted)
    columns = _parse_columns(content, kind, problems, fitted)
    problems.raise_if_any()
    types_chosen = _type_choices(columns, content)
    left_out = [*problems.bad, *problems.gaps]
    usable = ~np.isin(content.numbers, left_out) if left_out else slice(None)
    return Table(
        path,
        {name: select_rows(column.values, usable) for name, column in columns.items()},
        RowNames(content.word, content.numbers[usable]),
        (*content.choices, *index, *id_choices, *problems.dropped_choices(), *types_chosen),
        problems.total - len(left_out),
        {n: tuple(sorted({*c.unparsed.values()}))[:MAX_WORDS] for n, c in columns.items()},
        {n: column.filter(usable) for n, column in ids.items()} if left_out else ids,
        {name: column.form for name, column in columns.items() if column.form},
    )


def _select_columns(
    problems: TableProblems,
    needed_only: bool,  # the needed columns
    fitted: Preprocessing | None,
    names: Sequence[str],
    unreadable: Mapping[str, Any],
) -> list[str]:
    """Return the columns to read: the needed ones, those trained on, or all."""
    trained = [] if fitted is None else [column.name for column in fitted.columns]
    problems.check_names(names, trained and [*trained, *problems.needed.values()])
    selected = list(dict.fromkeys([*trained, *problems.needed.values()]))
    if fitted is not None and trained:
        selected += [name for name in fitted.ids if name not in selected]
    elif not needed_only:
        selected = [name for name in names if name in selected or name not in problems.ignore]
    problems.add_unreadable({name: unreadable[name] for name in selected if name in unreadable})
    readable = [name for name in selected if name in names and name not in unreadable]
    if not readable:
        problems.raise_if_any()
    return readable


def _parse_columns(
    content: TableContent,
    kind: Callable[[str], CellKind],
    problems: TableProblems,
    fitted: Preprocessing | None,
) -> dict[str, ParsedColumn]:
    """Parse each column, and add the problems of its cells to `problems`, by row."""
    config, needed = problems.config, problems.needed.values()
    policy = config.missing if isinstance(config, Tabular) else None
    share = config.most_bad if config.bad_samples is BadSamples.drop else 0.0
    trained = {} if fitted is None else {c.name: c for c in fitted.columns}
    problems.add_rows(BAD_SAMPLES_KEY, content.malformed)
    columns = dict[str, ParsedColumn]()
    for name in list(content.columns):
        cells = content.columns.pop(name)  # popped, so that its memory is free after parsing
        try:
            column = columns[name] = parse_column(
                cells,
                kind(name),
                max_unparsed=1.0 if name in problems.types else MAX_UNPARSED,
                bad_share=share,
                missing=trained[name].missing if name in trained else (),
                marker=name not in needed,
                form=trained[name].form if name in trained else None,
            )
        except DataError as error:
            problems.add_unreadable({name: error})
            continue
        _check_declared(name, column, problems)
        wrong = [(BAD_SAMPLES_KEY, column.bad)]
        if name in needed:
            wrong.append((BAD_SAMPLES_KEY, column.missing()))
        elif policy in (Missing.drop, Missing.error):
            wrong.append((MISSING_KEY, column.missing()))
        for key, bad in wrong:
            texts = {int(content.numbers[i]): f", column {name!r}: {bad[i]}" for i in bad}
            problems.add_rows(key, texts)
    for row in problems.bad:
        problems.gaps.pop(row, None)
    return columns


def _check_declared(name: str, column: ParsedColumn, problems: TableProblems) -> None:
    """Raise ConfigError if most cells do not have the type declared in `data.types`."""
    if name not in problems.types or not column.unparsed:
        return
    count = len(column.unparsed)
    present = int((~missing_cells(column.values)).sum()) + count
    if 2 * count > present:
        example = next(iter(column.unparsed.values()))[:MAX_CELL_CHARS]
        cells = f"{count:,} of {present:,} cells of {name!r}, such as {example!r},"
        fix = f"dates are read as {DATE_EXAMPLES}" if column.kind is CellKind.times else "use text"
        raise ConfigError(TYPES_KEY, f"{problems.path}: {cells} are not {column.kind.value}", fix)


def _drop_index_column(content: TableContent, path: Path) -> tuple[Choice, ...]:
    """Remove an unnamed column that numbers the rows, as pandas writes; DataError for others."""
    import pyarrow
    from pyarrow import compute

    if (cells := content.columns.pop("", None)) is None:
        return ()
    is_integer = pyarrow.types.is_integer(cells.type) and not cells.null_count
    if not is_integer or compute.min(cells).as_py() < 0 or len(cells.unique()) < len(cells):
        problem = "a column has no name, and its cells are not row numbers"
        raise DataError(f"data.path: {path}: {problem}; name it in the first line")
    return (Choice(IGNORE_KEY, "1 column left out", "unnamed row numbers"),)


def _pop_id_columns(
    content: TableContent, problems: TableProblems, fitted: Preprocessing | None
) -> tuple[dict[str, Any], list[Choice]]:
    """Remove and return the id columns of `content`, and the choices; one column stays."""
    declared, needed = problems.types, problems.needed.values()
    names = [name for name in content.columns if name not in needed]
    reasons = {name: "" for name, kind in declared.items() if kind is ColumnType.id}
    if fitted is not None:
        reasons = dict.fromkeys(fitted.ids, "")
    elif isinstance(problems.config, Tabular):
        for name in names:
            if name not in declared and len(reasons) + 1 < len(names):
                if reason := id_reason(name, content.columns[name]):
                    reasons[name] = reason
    advice = "not an input, but copied to predictions; to use it, set its data.types"
    choices = [Choice(TYPES_KEY, f"{n}: id", f"{r}: {advice}") for n, r in reasons.items() if r]
    columns = {name: content.columns.pop(name) for name in names if name in reasons}
    for name, column in columns.items():
        columns[name] = column.cast(getattr(column.type, "value_type", column.type))
    return columns, choices


def split_values(table: Table, split_by: str, rule: SplitRule | None) -> np.ndarray:
    """Return the column `split_by` as group codes or as times.

    Times are numbers, or ISO 8601 dates and times; others are a DataError.
    """
    values = table.columns[split_by]
    if not isinstance(values, TextColumn):
        return values
    if rule is SplitRule.group:
        return values.codes
    for parse in (parse_number, parse_time):
        times = np.array([parse(word) for word in values.words])
        if not (missing := missing_cells(times)).any():
            return np.asarray(times[values.codes])
    word = values.words[int(missing.argmax())]
    problem = (
        f"column {split_by!r} holds {word[:MAX_CELL_CHARS]!r}, neither a number nor an ISO date"
    )
    fix = "write dates as 2024-05-31, or use data.split=group or random"
    raise DataError(f"data.split_by: {table.path}: {problem}; {fix}")


def _fitted_kinds(fitted: Preprocessing) -> dict[str, CellKind]:
    """Return the types that columns were fitted as: cells of a new file may suggest others."""
    kinds = dict.fromkeys(fitted.ids, CellKind.texts)
    for column in fitted.columns:
        kind = CellKind.times if column.part in DATE_PARTS else CellKind.numbers
        kind = CellKind.texts if column.values else kind
        # only its missing flag was fitted: it is a number or a date
        kinds.setdefault(column.name, CellKind.any if column.part == MISSING_FLAG else kind)
    if any(class_name(parse_number(name)) != name for name in fitted.sizes.class_names):
        kinds[fitted.target] = CellKind.texts
    return kinds


def _type_choices(columns: Mapping[str, ParsedColumn], content: TableContent) -> Iterator[Choice]:
    """Yield choices on unparsed cells and on ambiguous or recognised types."""
    for name, column in columns.items():
        if column.unparsed:
            cells = [
                f"{text[:MAX_CELL_CHARS]!r} in {content.word} {content.numbers[row]}"
                for row, text in list(column.unparsed.items())[:MAX_EXAMPLES]
            ]
            more = ", …" if len(column.unparsed) > MAX_EXAMPLES else ""
            count = f"{len(column.unparsed):,} of {len(content.numbers):,} cells of {name!r}"
            reason = f"not {column.kind.value}: {', '.join(cells)}{more}"
            yield Choice(MISSING_KEY, f"{count} read as missing", reason)
        if column.note:
            kind, (type_name, effect) = "date" if column.form else "text", column.remedy
            advice = f"with +{TYPES_KEY}={{{name}: {type_name}}} {effect}"
            if column.form:
                advice = f"read as {describe_form(column.form)}"
            reason = f"{column.note}; {advice}"
            log.warning("%s: column %r is read as %ss: %s", TYPES_KEY, name, kind, reason)
            yield Choice(TYPES_KEY, f"{name}: {kind}", reason)
        elif column.form:
            yield Choice(TYPES_KEY, f"{name}: date", f"its cells are {describe_form(column.form)}")
