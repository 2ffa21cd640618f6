"""Tables from csv and parquet files; rows that cannot be used are found here."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runner.data.batch import RowNames
from runner.data.config import BadSamples, DataConfig, Tabular, Text
from runner.data.labels import class_name
from runner.data.paths import existing, suggestion
from runner.data.preprocessing import Preprocessing
from runner.data.table_files import MISSING, Kind, read_content
from runner.errors import ConfigError, DataError
from runner.techniques.base import Choice

KEY = "data.bad_samples"
NAMED = 5  # bad rows, in a message
LARGEST = float(np.finfo(np.float32).max)  # models compute in float32
LONGEST = 40  # characters of a cell, in a message
NUMBERS = re.compile("u?int|float|half|double|decimal|bool")  # types of arrow


@dataclass(frozen=True)
class Texts:
    """A column of texts: the different ones, sorted, and which of them each row has."""

    words: tuple[str, ...]
    codes: np.ndarray


Values = np.ndarray | Texts
"""A column: float64 numbers that float32 can hold, or texts."""


@dataclass(frozen=True)
class Table:
    """Columns by name, without the rows that cannot be used."""

    path: Path
    columns: dict[str, Values]
    rows: RowNames  # what a message calls a row, such as `line 17`
    choices: tuple[Choice, ...]  # which rows were left out
    size: int  # rows


def read_table(
    config: Tabular | Text,
    needed: dict[str, str],
    ignore: Sequence[str] | None = None,
    fitted: Preprocessing | None = None,
) -> Table:
    """The columns `needed` (by config key) of the table at `data.path`, all as texts.

    With `ignore`, every column but those, as numbers where it holds numbers; with `fitted`, its
    columns as what they were fitted as, in any order. A row with a cell that cannot be used is a
    DataError, or is left out with `data.bad_samples=drop`.
    """
    path = existing(config.path)
    if path.is_dir():
        raise ConfigError("data.path", f"{path} is a folder", "name the csv or parquet file in it")
    kinds = {} if fitted is None else _fitted_kinds(fitted)

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
            return list(dict.fromkeys([*trained, *wanted]))
        for key, name in [*needed.items(), *(("data.ignore", name) for name in ignore or ())]:
            if name not in names:
                near = suggestion(name, names, "its columns are")
                raise ConfigError(key, f"{path} has no column {name!r}", near)
        return wanted if ignore is None else [n for n in names if n in wanted or n not in ignore]

    def kind(name: str) -> Kind:
        return Kind.texts if ignore is None else kinds.get(name, Kind.any)

    content = read_content(path, select, kind)
    total = len(content.numbers) + len(content.malformed)
    if not total:
        raise DataError(f"data.path: {path} has no rows below its header")
    share = config.most_bad if config.bad_samples is BadSamples.drop else 0.0
    problems, values = dict(content.malformed), {}
    for name in list(content.columns):
        # its memory is free once it is parsed
        values[name], bad = _parse(content.columns.pop(name), name, path, share, kind(name))
        for row, problem in bad.items():
            problems.setdefault(int(content.numbers[row]), f", column {name!r}: {problem}")
    texts = {number: f"{content.word} {number}{text}" for number, text in problems.items()}
    choices = _without(texts, total, config, path)
    usable = ~np.isin(content.numbers, list(problems)) if problems else slice(None)
    rows = RowNames(content.word, content.numbers[usable])
    columns = {name: _select_rows(column, usable) for name, column in values.items()}
    return Table(path, columns, rows, choices, total - len(problems))


def _fitted_kinds(fitted: Preprocessing) -> dict[str, Kind]:
    """What the columns were fitted as: a new file may hold fewer, or other, cells than that one."""
    kinds = {c.name: Kind.texts if c.values else Kind.numbers for c in fitted.columns}
    if any(class_name(_number(name)) != name for name in fitted.sizes.class_names):
        kinds[fitted.target] = Kind.texts
    return kinds


def _without(
    problems: Mapping[int, str], total: int, config: DataConfig, path: Path
) -> tuple[Choice, ...]:
    """What is said of the bad rows that are left out; the first one is an error without `drop`."""
    if not problems:
        return ()
    texts = [problems[number] for number in sorted(problems)]
    if config.bad_samples is not BadSamples.drop:
        fix = f"correct it, leave such rows out with {KEY}=drop, or the column with data.ignore"
        raise DataError(f"{path}: {texts[0]}; {fix}")
    more = f"; and {len(texts) - NAMED:,} more" if len(texts) > NAMED else ""
    examples = "; ".join(texts[:NAMED]) + more
    if len(texts) / total > config.most_bad:
        problem = f"{len(texts):,} of {total:,} rows cannot be used, more than data.most_bad="
        raise DataError(f"{path}: {problem}{config.most_bad:g}: {examples}")
    return (Choice(KEY, f"{len(texts):,} of {total:,} left out", examples),)


# -- cells -----------------------------------------------------------------------------------------


def _parse(
    column: Any, name: str, path: Path, share: float, kind: Kind
) -> tuple[Values, dict[int, str]]:
    """Numbers or texts, and what is wrong with each row that cannot be used.

    A column of texts holds numbers where at most `share` of its cells is neither a number nor
    missing. Texts such as NA are missing among numbers only: elsewhere they may be a category.
    """
    import pyarrow

    if kind is not Kind.texts and NUMBERS.match(str(column.type)):
        numbers = column.cast(pyarrow.float64(), safe=False).to_numpy()
        return numbers, {row: _problem(numbers[row]) for row in _not_float32(numbers)}
    try:
        words, codes = _encode(column)
    except (pyarrow.ArrowException, UnicodeDecodeError):
        problem = f"column {name!r} is of type {column.type}, neither numbers nor UTF-8 texts"
        fix = f"convert it, or leave it out with data.ignore=[{name}]"
        raise DataError(f"{path}: {problem}; {fix}") from None
    parsed = np.array([_number(word) for word in words])
    numeric = kind is Kind.numbers
    if numeric or (kind is Kind.any and not np.isnan(parsed[codes]).all()):
        text = [np.isnan(n) and not _is_missing(w) for n, w in zip(parsed, words, strict=True)]
        if numeric or np.array(text)[codes].mean() <= share:
            numbers = parsed[codes]
            bad = _not_float32(numbers)
            return numbers, {row: _problem(numbers[row], words[codes[row]]) for row in bad}
    empty = [code for code, word in enumerate(words) if not word.strip()]
    rows = np.flatnonzero(np.isin(codes, empty)).tolist()
    return Texts(tuple(words), codes), dict.fromkeys(rows, "the value is missing")


def _encode(column: Any) -> tuple[list[str], np.ndarray]:
    """The different texts of a column, and which of them each row has; no value is ""."""
    import pyarrow

    if not pyarrow.types.is_dictionary(column.type):
        column = column.cast(pyarrow.string()).dictionary_encode()
    encoded = column.combine_chunks()
    words = [word or "" for word in encoded.dictionary.to_pylist()]
    codes = encoded.indices.fill_null(len(words)).to_numpy(zero_copy_only=False)
    return [*words, ""], codes


def _select_rows(values: Values, rows: np.ndarray | slice) -> Values:
    """The column at those rows; of texts only the words that occur, sorted."""
    if isinstance(values, np.ndarray):
        return values[rows]
    codes = values.codes[rows]
    words = sorted({values.words[code] for code in np.unique(codes).tolist()})
    place = {word: number for number, word in enumerate(words)}
    return Texts(tuple(words), np.array([place.get(word, 0) for word in values.words])[codes])


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        return float("nan")


def _is_missing(word: str) -> bool:
    return word.strip().lower() in MISSING


def _not_float32(numbers: np.ndarray) -> list[int]:
    rows: list[int] = np.flatnonzero(~(np.abs(numbers) <= LARGEST)).tolist()  # NaN is not
    return rows


def _problem(number: float, word: str | None = None) -> str:
    word = f"{number:g}" if word is None else word
    if _is_missing(word):
        return "the value is missing"
    what = "too large for float32" if np.isfinite(number) else "not a finite number"
    return f"{word[:LONGEST]} is {what}"
