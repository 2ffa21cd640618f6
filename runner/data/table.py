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
    GAP,
    LONGEST,
    MOST_UNPARSED,
    PARTS,
    READABLE,
    Kind,
    ParsedColumn,
    Texts,
    Values,
    describe_form,
    id_reason,
    is_none,
    missing_cells,
    number,
    parse_column,
    parse_time,
    select_rows,
)
from runner.data.config import BadSamples, ColumnType, Missing, SplitRule, Tabular, Text
from runner.data.labels import class_name
from runner.data.paths import existing
from runner.data.preprocessing import Preprocessing
from runner.data.problems import GAPS, IGNORE, TYPES, Problems
from runner.data.saved_dataset import is_saved
from runner.data.table_files import Content, read_content
from runner.data.usable import KEY, NAMED
from runner.errors import ConfigError, DataError
from runner.techniques.base import Choice

log = logging.getLogger(__name__)

MOST_WORDS = 100  # texts read as missing that are stored for other data
KINDS = {
    ColumnType.number: Kind.numbers,
    ColumnType.text: Kind.texts,
    ColumnType.date: Kind.times,
    ColumnType.id: Kind.texts,
}


@dataclass(frozen=True)
class Table:
    """A table's columns by name, without the dropped rows."""

    path: Path
    columns: dict[str, Values]
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
    path = existing(config.path) / folder
    if path.is_dir() and not is_saved(path):
        raise ConfigError("data.path", f"{path} is a folder", "name the csv or parquet file in it")
    types = config.types if isinstance(config, Tabular) and fitted is None else {}
    problems = Problems(path, config, dict(needed), [*(ignore or ())], dict(types))
    kinds = {} if fitted is None else _fitted_kinds(fitted)

    def kind(name: str) -> Kind:
        if ignore is None:
            return Kind.texts
        declared = problems.types.get(name)
        return KINDS[declared] if declared else kinds.get(name, Kind.any)

    def select(names: Sequence[str], unreadable: Mapping[str, Any]) -> list[str]:
        return _select(problems, ignore is None, fitted, names, unreadable)

    try:
        content = read_content(path, select, kind, config, fitted)
        problems.word, problems.total = content.word, len(content.numbers) + len(content.malformed)
        if not problems.total:
            raise DataError(f"data.path: {path} has no rows below its header")
    except DataError as error:
        problems.refuse(error)
        raise
    index = _take_index(content, path)
    ids, id_choices = _take_ids(content, problems, fitted)
    columns = _parse_columns(content, kind, problems, fitted)
    problems.refuse()
    types_chosen = _type_choices(columns, content)
    left_out = [*problems.bad, *problems.gaps]
    usable = ~np.isin(content.numbers, left_out) if left_out else slice(None)
    return Table(
        path,
        {name: select_rows(column.values, usable) for name, column in columns.items()},
        RowNames(content.word, content.numbers[usable]),
        (*content.choices, *index, *id_choices, *problems.left_out(), *types_chosen),
        problems.total - len(left_out),
        {n: tuple(sorted({*c.unparsed.values()}))[:MOST_WORDS] for n, c in columns.items()},
        {n: column.filter(usable) for n, column in ids.items()} if left_out else ids,
        {name: column.form for name, column in columns.items() if column.form},
    )


def _select(
    problems: Problems,
    only: bool,  # the needed columns
    fitted: Preprocessing | None,
    names: Sequence[str],
    unreadable: Mapping[str, Any],
) -> list[str]:
    """Return the columns to read: the needed ones, those trained on, or all."""
    trained = [] if fitted is None else [column.name for column in fitted.columns]
    problems.check_names(names, trained and [*trained, *problems.needed.values()])
    used = list(dict.fromkeys([*trained, *problems.needed.values()]))
    if fitted is not None and trained:
        used += [name for name in fitted.ids if name not in used]
    elif not only:
        used = [name for name in names if name in used or name not in problems.ignore]
    problems.add_unreadable({name: unreadable[name] for name in used if name in unreadable})
    readable = [name for name in used if name in names and name not in unreadable]
    if not readable:
        problems.refuse()
    return readable


def _parse_columns(
    content: Content,
    kind: Callable[[str], Kind],
    problems: Problems,
    fitted: Preprocessing | None,
) -> dict[str, ParsedColumn]:
    """Parse each column, and add the problems of its cells to `problems`, by row."""
    config, needed = problems.config, problems.needed.values()
    policy = config.missing if isinstance(config, Tabular) else None
    share = config.most_bad if config.bad_samples is BadSamples.drop else 0.0
    trained = {} if fitted is None else {c.name: c for c in fitted.columns}
    problems.add_rows(KEY, content.malformed)
    columns = dict[str, ParsedColumn]()
    for name in list(content.columns):
        cells = content.columns.pop(name)  # popped, so that its memory is free after parsing
        try:
            column = columns[name] = parse_column(
                cells,
                kind(name),
                most_unparsed=1.0 if name in problems.types else MOST_UNPARSED,
                bad_share=share,
                missing=trained[name].missing if name in trained else (),
                marker=name not in needed,
                form=trained[name].form if name in trained else None,
            )
        except DataError as error:
            problems.add_unreadable({name: error})
            continue
        _check_declared(name, column, problems)
        wrong = [(KEY, column.bad)]
        if name in needed:
            wrong.append((KEY, column.missing()))
        elif policy in (Missing.drop, Missing.error):
            wrong.append((GAPS, column.missing()))
        for key, bad in wrong:
            texts = {int(content.numbers[i]): f", column {name!r}: {bad[i]}" for i in bad}
            problems.add_rows(key, texts)
    for row in problems.bad:
        problems.gaps.pop(row, None)
    return columns


def _check_declared(name: str, column: ParsedColumn, problems: Problems) -> None:
    """Raise ConfigError if most cells do not have the type declared in `data.types`."""
    if name not in problems.types or not column.unparsed:
        return
    count = len(column.unparsed)
    present = int((~missing_cells(column.values)).sum()) + count
    if 2 * count > present:
        example = next(iter(column.unparsed.values()))[:LONGEST]
        cells = f"{count:,} of {present:,} cells of {name!r}, such as {example!r},"
        fix = f"dates are read as {READABLE}" if column.kind is Kind.times else "use text"
        raise ConfigError(TYPES, f"{problems.path}: {cells} are not {column.kind.value}", fix)


def _take_index(content: Content, path: Path) -> tuple[Choice, ...]:
    """Remove an unnamed column that numbers the rows, as pandas writes; DataError for others."""
    import pyarrow
    from pyarrow import compute

    if (cells := content.columns.pop("", None)) is None:
        return ()
    whole = pyarrow.types.is_integer(cells.type) and not cells.null_count
    if not whole or compute.min(cells).as_py() < 0 or len(cells.unique()) < len(cells):
        problem = "a column has no name, and its cells are not row numbers"
        raise DataError(f"data.path: {path}: {problem}; name it in the first line")
    return (Choice(IGNORE, "1 column left out", "unnamed row numbers"),)


def _take_ids(
    content: Content, problems: Problems, fitted: Preprocessing | None
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
    way = "not an input, but copied to predictions; to use it, set its data.types"
    choices = [
        Choice(TYPES, f"{n}: id", f"{reason}: {way}") for n, reason in reasons.items() if reason
    ]
    columns = {name: content.columns.pop(name) for name in names if name in reasons}
    for name, column in columns.items():
        columns[name] = column.cast(getattr(column.type, "value_type", column.type))
    return columns, choices


def split_values(table: Table, by: str, rule: SplitRule | None) -> np.ndarray:
    """Return the column `by` as group codes or as times.

    Times are numbers, or ISO 8601 dates and times; others are a DataError.
    """
    values = table.columns[by]
    if not isinstance(values, Texts):
        return values
    if rule is SplitRule.group:
        return values.codes
    for parse in (number, parse_time):
        times = np.array([parse(word) for word in values.words])
        if not (none := is_none(times)).any():
            return np.asarray(times[values.codes])
    word = values.words[int(none.argmax())]
    problem = f"column {by!r} holds {word[:LONGEST]!r}, neither a number nor an ISO date"
    fix = "write dates as 2024-05-31, or use data.split=group or random"
    raise DataError(f"data.split_by: {table.path}: {problem}; {fix}")


def _fitted_kinds(fitted: Preprocessing) -> dict[str, Kind]:
    """Return the types that columns were fitted as: cells of a new file may suggest others."""
    kinds = dict.fromkeys(fitted.ids, Kind.texts)
    for column in fitted.columns:
        kind = Kind.texts if column.values else Kind.times if column.part in PARTS else Kind.numbers
        # only its missing flag was fitted: it is a number or a date
        kinds.setdefault(column.name, Kind.any if column.part == GAP else kind)
    if any(class_name(number(name)) != name for name in fitted.sizes.class_names):
        kinds[fitted.target] = Kind.texts
    return kinds


def _type_choices(columns: Mapping[str, ParsedColumn], content: Content) -> Iterator[Choice]:
    """Yield choices on unparsed cells and on ambiguous or recognised types."""
    for name, column in columns.items():
        if column.unparsed:
            cells = [
                f"{column.unparsed[row][:LONGEST]!r} in {content.word} {content.numbers[row]}"
                for row in list(column.unparsed)[:NAMED]
            ]
            more = ", …" if len(column.unparsed) > NAMED else ""
            count = f"{len(column.unparsed):,} of {len(content.numbers):,} cells of {name!r}"
            reason = f"not {column.kind.value}: {', '.join(cells)}{more}"
            yield Choice(GAPS, f"{count} read as missing", reason)
        if column.note:
            kind, (how, effect) = "date" if column.form else "text", column.remedy
            advice = f"with +{TYPES}={{{name}: {how}}} {effect}"
            if column.form:
                advice = f"read as {describe_form(column.form)}"
            reason = f"{column.note}; {advice}"
            log.warning("%s: column %r is read as %ss: %s", TYPES, name, kind, reason)
            yield Choice(TYPES, f"{name}: {kind}", reason)
        elif column.form:
            yield Choice(TYPES, f"{name}: date", f"its cells are {describe_form(column.form)}")
