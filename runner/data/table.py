"""Tables from csv and parquet files; rows that cannot be used are found here."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runner.data.batch import RowNames
from runner.data.cells import (
    LONGEST,
    ODD_CELLS,
    PARTS,
    ParsedColumn,
    Texts,
    Values,
    id_reason,
    is_none,
    number,
    parse_column,
    parse_time,
    select_rows,
)
from runner.data.config import BadSamples, ColumnType, DataConfig, Missing, SplitRule, Tabular, Text
from runner.data.labels import class_name
from runner.data.paths import existing, suggestion
from runner.data.preprocessing import Preprocessing
from runner.data.table_files import Content, Kind, read_content
from runner.errors import ConfigError, DataError
from runner.techniques.base import Choice

log = logging.getLogger(__name__)

KEY = "data.bad_samples"
GAPS = "data.missing"
TYPES = "data.types"
NAMED = 5  # bad rows, in a message
MOST_WORDS = 100  # texts read as missing that are saved for other data
KINDS = {
    ColumnType.number: Kind.numbers,
    ColumnType.text: Kind.texts,
    ColumnType.date: Kind.times,
    ColumnType.id: Kind.texts,
}


@dataclass(frozen=True)
class Table:
    """Columns by name, without the rows that cannot be used."""

    path: Path
    columns: dict[str, Values]
    rows: RowNames  # what a message calls a row, such as `line 17`
    choices: tuple[Choice, ...]  # which rows were left out, and what columns were read as
    size: int  # rows
    odd: dict[str, tuple[str, ...]]  # by column, the texts among numbers that are read as missing
    ids: dict[str, Any]  # arrow columns that name the rows


def read_table(
    config: Tabular | Text,
    needed: dict[str, str],
    ignore: Sequence[str] | None = None,
    fitted: Preprocessing | None = None,
) -> Table:
    """The columns `needed` (by config key) of the table at `data.path`, all as texts.

    With `ignore`, every column but those, as numbers where it holds numbers; with `fitted`, its
    columns as what they were fitted as, in any order. A row with a cell that cannot be used, or
    none in a `needed` column, is a DataError, or is left out with `data.bad_samples=drop`; rows
    with other missing cells likewise with `data.missing=error` and `drop`.
    """
    path = existing(config.path)
    if path.is_dir():
        raise ConfigError("data.path", f"{path} is a folder", "name the csv or parquet file in it")
    declared = config.types if isinstance(config, Tabular) and fitted is None else {}
    kinds = {name: KINDS[kind] for name, kind in declared.items()}
    if fitted is not None:
        kinds = _fitted_kinds(fitted)

    def select(names: Sequence[str]) -> list[str]:
        for name, count in Counter(names).items():
            if count > 1 or not name:
                problem = f"{count} columns are called {name[:LONGEST]!r}"
                raise DataError(
                    f"{path}: {problem}; each needs a name of its own in the first line"
                )
        wanted = list(needed.values())
        if fitted is not None and fitted.columns:
            trained = [column.name for column in fitted.columns]
            if missing := [
                name for name in dict.fromkeys([*trained, *wanted]) if name not in names
            ]:
                listed = ", ".join(repr(name[:LONGEST]) for name in missing[:NAMED])
                more = f", … ({len(missing)} in all)" if len(missing) > NAMED else ""
                problem = f"lacks {listed}{more}, which the model was trained on"
                raise DataError(f"{path} {problem}; {suggestion(missing[0], names, 'it has')}")
            return list(dict.fromkeys([*trained, *wanted, *(n for n in fitted.ids if n in names)]))
        others = {"data.ignore": ignore or (), TYPES: declared}
        asked = [(key, name) for key, columns in others.items() for name in columns]
        absent = [(key, name) for key, name in [*needed.items(), *asked] if name not in names]
        if absent:
            near = "; ".join(suggestion(n, names, "its columns are") for _, n in absent[:NAMED])
            listed = ", ".join(f"{name!r} ({key})" for key, name in absent[1:])
            more = f", nor {listed}" if listed else ""
            raise ConfigError(absent[0][0], f"{path} has no column {absent[0][1]!r}{more}", near)
        return wanted if ignore is None else [n for n in names if n in wanted or n not in ignore]

    def kind(name: str) -> Kind:
        return Kind.texts if ignore is None else kinds.get(name, Kind.any)

    content = read_content(path, select, kind, config)
    total = len(content.numbers) + len(content.malformed)
    if not total:
        raise DataError(f"data.path: {path} has no rows below its header")
    policy = config.missing if isinstance(config, Tabular) else None
    share = config.most_bad if config.bad_samples is BadSamples.drop else 0.0
    words = {} if fitted is None else {c.name: c.missing for c in fitted.columns}
    columns = dict[str, ParsedColumn]()
    bad, gaps = dict(content.malformed), dict[int, str]()
    ids, choices = _take_ids(content, needed.values(), config, fitted)
    for name in list(content.columns):
        columns[name] = column = parse_column(
            content.columns.pop(name),  # its memory is free once it is parsed
            name,
            f"{path}: column {name!r}",
            kind(name),
            odd_share=1.0 if name in declared else ODD_CELLS,
            bad_share=share,
            missing=words.get(name, ()),
            marker=name not in needed.values(),
        )
        problems = [(bad, column.bad)]
        if name in needed.values():
            problems.append((bad, column.missing()))
        elif policy in (Missing.drop, Missing.error):
            problems.append((gaps, column.missing()))
        for collected, cells in problems:
            for row, problem in cells.items():
                text = f", column {name!r}: {problem}"
                collected.setdefault(int(content.numbers[row]), text)
    for line in bad:
        gaps.pop(line, None)
    drops = {KEY: config.bad_samples is BadSamples.drop, GAPS: policy is Missing.drop}
    left = {KEY: bad, GAPS: gaps}
    _refuse(
        path, content.word, {k: rows for k, rows in left.items() if not drops[k]}, total, config
    )
    choices = content.choices + choices
    for key, left_rows in left.items():
        choices += _without(path, content.word, left_rows, total, config, key)
    choices += tuple(_type_choices(columns, content))
    left_out = [*bad, *gaps]
    usable = ~np.isin(content.numbers, left_out) if left_out else slice(None)
    rows = RowNames(content.word, content.numbers[usable])
    odd = {n: tuple(sorted({*column.odd.values()}))[:MOST_WORDS] for n, column in columns.items()}
    values = {name: select_rows(column.values, usable) for name, column in columns.items()}
    if left_out:
        ids = {name: column.filter(usable) for name, column in ids.items()}
    return Table(path, values, rows, choices, total - len(left_out), odd, ids)


def _take_ids(
    content: Content, needed: Collection[str], config: DataConfig, fitted: Preprocessing | None
) -> tuple[dict[str, Any], tuple[Choice, ...]]:
    """The columns that are ids, taken out of the content, and why; one column always stays."""
    declared = config.types if isinstance(config, Tabular) else {}
    names = [name for name in content.columns if name not in needed]
    reasons = {name: "" for name, kind in declared.items() if kind is ColumnType.id}
    if fitted is not None:
        reasons = dict.fromkeys(fitted.ids, "")
    elif isinstance(config, Tabular):
        for name in names:
            if name not in declared and len(reasons) + 1 < len(names):
                if reason := id_reason(name, content.columns[name]):
                    reasons[name] = reason
    way = "it is no input, and stands beside predictions; another of data.types makes it one"
    choices = [
        Choice(TYPES, f"{n}: id", f"{reason}: {way}") for n, reason in reasons.items() if reason
    ]
    ids = dict[str, Any]()
    for name in names:
        if name in reasons:
            column = content.columns.pop(name)
            ids[name] = column.cast(getattr(column.type, "value_type", column.type))
    return ids, tuple(choices)


def split_values(table: Table, by: str, rule: SplitRule | None) -> np.ndarray:
    """The column `by` as numbers: equal ones for one group, or growing with the time.

    Times are numbers, or dates and times as ISO 8601 writes them; others are a DataError.
    """
    values = table.columns[by]
    if rule is SplitRule.group:
        return values.codes if isinstance(values, Texts) else values
    if not isinstance(values, Texts):
        return values
    for parse in (number, parse_time):
        times = np.array([parse(word) for word in values.words])
        if not (none := is_none(times)).any():
            return np.asarray(times[values.codes])
    word = values.words[int(none.argmax())]
    problem = f"column {by!r} holds {word[:LONGEST]!r}, neither a number nor an ISO date"
    fix = "write dates as 2024-05-31, or use data.split=group or random"
    raise DataError(f"data.split_by: {table.path}: {problem}; {fix}")


def _fitted_kinds(fitted: Preprocessing) -> dict[str, Kind]:
    """What the columns were fitted as: a new file may hold fewer, or other, cells than that one."""
    kinds = dict.fromkeys(fitted.ids, Kind.texts)
    for column in fitted.columns:
        kind = Kind.texts if column.values else Kind.times if column.part in PARTS else Kind.numbers
        kinds.setdefault(column.name, kind)
    if any(class_name(number(name)) != name for name in fitted.sizes.class_names):
        kinds[fitted.target] = Kind.texts
    return kinds


def _refuse(
    path: Path, word: str, problems: Mapping[str, Mapping[int, str]], total: int, config: DataConfig
) -> None:
    """Raise for rows that cannot be used, all kinds in one message, with the keys that drop them.

    `problems` are by the key that drops them, and by row.
    """
    texts = [text for rows in problems.values() for text in _kinds(word, rows)]
    if not texts:
        return
    keys = [f"{key}=drop" for key, rows in problems.items() if rows]
    share = max(len(rows) for rows in problems.values()) / total
    if share > config.most_bad:
        keys.append(f"data.most_bad={min(math.ceil(100 * share) / 100, 0.99)}")
    fill = f", fill the missing with {GAPS}=mean" if problems.get(GAPS) else ""
    fix = f"correct them{fill}, leave out a column with data.ignore, or run with {' '.join(keys)}"
    raise DataError(f"{path}: {'; '.join(texts)}; {fix}")


def _kinds(word: str, problems: Mapping[int, str]) -> list[str]:
    """Each kind of problem with its first row, how many rows have it, and the next ones."""
    kinds = dict[str, list[int]]()
    for row in sorted(problems):
        kinds.setdefault(re.sub(": .* is ", ": is ", problems[row]), []).append(row)
    texts = []
    for rows in kinds.values():
        following = ", ".join(map(str, rows[1:NAMED]))
        more = f" ({len(rows):,} {word}s in all: also {following}" if following else ""
        more += (", …)" if len(rows) > NAMED else ")") if more else ""
        texts.append(f"{word} {rows[0]}{problems[rows[0]]}{more}")
    return texts


def _without(
    path: Path, word: str, problems: Mapping[int, str], total: int, config: DataConfig, key: str
) -> tuple[Choice, ...]:
    """What is said of the rows that `key` leaves out."""
    if not problems:
        return ()
    texts = [f"{word} {number}{problems[number]}" for number in sorted(problems)]
    more = f"; and {len(texts) - NAMED:,} more" if len(texts) > NAMED else ""
    examples = "; ".join(texts[:NAMED]) + more
    if len(texts) / total > config.most_bad:
        problem = f"{len(texts):,} of {total:,} rows cannot be used, more than data.most_bad="
        raise DataError(f"{path}: {problem}{config.most_bad:g}: {examples}")
    return (Choice(key, f"{len(texts):,} of {total:,} left out", examples),)


def _type_choices(columns: Mapping[str, ParsedColumn], content: Content) -> Iterator[Choice]:
    """What is said of cells that do not fit the type of their column."""
    for name, column in columns.items():
        if column.odd:
            rows = list(column.odd)[:NAMED]
            cells = [
                f"{column.odd[row][:LONGEST]!r} in {content.word} {content.numbers[row]}"
                for row in rows
            ]
            more = ", …" if len(column.odd) > NAMED else ""
            value = (
                f"{len(column.odd):,} of {len(content.numbers):,} cells of {name!r} read as missing"
            )
            yield Choice(GAPS, value, f"not {column.kind.value}: {', '.join(cells)}{more}")
        if column.note:
            reason = f"{column.note}; with +{TYPES}={{{name}: number}} those are missing values"
            log.warning("%s: column %r is read as texts: %s", TYPES, name, reason)
            yield Choice(TYPES, f"{name}: text", reason)
