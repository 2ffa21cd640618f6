"""Reading of tables from csv and parquet files, and detection of bad rows."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from runner.core.data.labels import class_name
from runner.core.data.paths import existing_path, suggestion
from runner.core.data.preprocessing import Preprocessing
from runner.core.data.usable import BAD_SAMPLES_KEY, MAX_EXAMPLES, examples
from runner.core.errors import ConfigError, DataError, with_fix
from runner.core.findings import Choice, notice
from runner.core.format import join_names
from runner.core.interfaces.batch import Column, NumberFormat, RowNames
from runner.core.record.column_overrides import mapping_override
from runner.core.schemas.data import (
    BadSamples,
    ColumnType,
    DataConfig,
    Missing,
    SplitRule,
    Tabular,
    Text,
)
from runner.datasets.cells import (
    DATE_PARTS,
    MAX_CELL_CHARS,
    MISSING_FLAG,
    CellKind,
    CellRules,
    ColumnValues,
    ParsedColumn,
    TextColumn,
    cell_type,
    id_reason,
    missing_cells,
    parse_column,
    parse_number,
    select_rows,
)
from runner.datasets.date_format import DATE_EXAMPLES, describe_form, guess_form, parse_time
from runner.datasets.number_format import GROUPED_NUMBER, is_text_column
from runner.datasets.saved_dataset import is_saved
from runner.datasets.table_files import TableContent, is_blank, limit_cells, read_content

MAX_WORDS = 100  # texts read as missing that are stored for other data
KIND_BY_TYPE = {
    ColumnType.number: CellKind.numbers,
    ColumnType.text: CellKind.texts,
    ColumnType.date: CellKind.times,
    ColumnType.id: CellKind.texts,
}
MEASURED = (ColumnType.number, ColumnType.date)
Note = tuple[str, str, str]
"""What is said of a column's cells, and the key and value that read them otherwise."""
MISSING_KEY = "data.missing"
TYPES_KEY = "data.types"
FORMATS_KEY = "data.date_formats"
IGNORE_KEY = "data.ignore"
TARGET_KEY = "data.target"
UNUSED_COLUMNS = "columns that the model does not use:"
MAX_KINDS = 10  # kinds of bad rows, in a message
MAX_DROPPED = 0.5  # share of rows that advice may drop
NUMERIC_NAME = re.compile(r"\s*[+-]?[\d.,]*\d[\d.,]*(e[+-]?\d+)?\s*", re.IGNORECASE)


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
    formats: dict[str, NumberFormat] = field(default_factory=dict)  # of numbers, by column
    notes: dict[str, Note] = field(default_factory=dict)  # by column


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
    typed = config if isinstance(config, Tabular) and fitted is None else None
    problems = TableProblems(path, config, dict(needed), [*(ignore or ())])
    if typed is not None:
        problems.types, problems.formats = dict(typed.types), dict(typed.date_formats)

    def rules(name: str) -> CellRules:
        if ignore is None:
            return CellRules(CellKind.texts)
        return _cell_rules(name, problems, fitted)

    def select(names: Sequence[str], unreadable: Mapping[str, Any]) -> list[str]:
        return _select_columns(problems, ignore is None, fitted, names, unreadable)

    try:
        content = read_content(path, select, rules, config, fitted)
        limit_cells(content, config, path)
        problems.word, problems.total = content.word, len(content.numbers) + len(content.malformed)
        if not problems.total:
            raise DataError(f"data.path: {path} has no rows below its header")
    except DataError as error:
        problems.raise_if_any(error)
        raise
    index = _drop_index_column(content, path)
    ids, id_choices = _pop_id_columns(content, problems, fitted)
    columns = _parse_columns(content, rules, problems)
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
        content.formats,
        {name: (column.note, *column.remedy) for name, column in columns.items() if column.note},
    )


def _cell_rules(name: str, problems: TableProblems, fitted: Preprocessing | None) -> CellRules:
    """Return how a column is read: as declared, as in training, or by its cells."""
    config = problems.config
    most_bad, is_target = config.most_bad, name == getattr(config, "target", None)
    if fitted is not None:
        trained = {c.name: c for c in (*fitted.columns, *fitted.target_columns)}
        column = trained.get(name, Column(name))
        kind = _fitted_kinds(fitted).get(name, CellKind.any)
        form = column.form if name in trained and kind is CellKind.times else None
        number_format = column.format or (NumberFormat() if column.declared else None)
        how = column.declared, column.missing, form, number_format
        return CellRules(kind, most_bad, *how, is_target=is_target)
    if form := problems.formats.get(name):
        return CellRules(CellKind.times, declared=True, form=form)
    if declared := problems.types.get(name):
        return CellRules(KIND_BY_TYPE[declared], declared=declared in MEASURED)
    return CellRules(most_bad=most_bad, is_target=is_target)


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
    content: TableContent, rules: Callable[[str], CellRules], problems: TableProblems
) -> dict[str, ParsedColumn]:
    """Parse each column, and add the problems of its cells to `problems`, by row."""
    config, needed = problems.config, problems.needed.values()
    policy = config.missing if isinstance(config, Tabular) else None
    problems.add_rows(BAD_SAMPLES_KEY, content.malformed)
    columns = dict[str, ParsedColumn]()
    for name in list(content.columns):
        cells = content.columns.pop(name)  # popped, so that its memory is free after parsing
        try:
            column = columns[name] = parse_column(cells, rules(name))
        except DataError as error:
            problems.add_unreadable({name: error})
            continue
        _check_declared(name, column, problems)
        if column.wrong:
            problems.wrong[name] = column.kind
        wrong = [(BAD_SAMPLES_KEY, column.bad)]
        if name in needed:
            wrong.append((BAD_SAMPLES_KEY, column.missing()))
        elif policy in (Missing.drop, Missing.error):
            wrong.append((MISSING_KEY, column.missing()))
        for key, bad in wrong:
            texts = {int(content.numbers[i]): f", column {name!r}: {bad[i]}" for i in sorted(bad)}
            problems.add_rows(key, texts)
    for row in problems.bad:
        problems.gaps.pop(row, None)
    return columns


def _check_declared(name: str, column: ParsedColumn, problems: TableProblems) -> None:
    """Raise ConfigError if most cells do not have the declared type."""
    key = FORMATS_KEY if name in problems.formats else TYPES_KEY
    if name not in {**problems.types, **problems.formats} or not column.unparsed:
        return
    count = len(column.unparsed)
    present = int((~missing_cells(column.values)).sum()) + count
    if 2 * count > present:
        example = next(iter(column.unparsed.values()))[:MAX_CELL_CHARS]
        cells = f"{count:,} of {present:,} cells of {name!r}, such as {example!r},"
        fix = f"to keep them as texts: {mapping_override(TYPES_KEY, {name: 'text'})}"
        if column.kind is CellKind.numbers and GROUPED_NUMBER.search(example):
            fix = f"for commas between thousands: data.thousands=comma; {fix}"
        if form := problems.formats.get(name):
            problem = f"{problems.path}: {cells} do not fit {form!r}"
            raise ConfigError(key, problem, "use the codes of strptime")
        if column.kind is CellKind.times:
            form = guess_form([*column.unparsed.values()]) or "%d/%b/%Y"
            other = mapping_override(FORMATS_KEY, {name: form})
            fix = f"dates are read as {DATE_EXAMPLES}; name another format, as {other}"
        raise ConfigError(key, f"{problems.path}: {cells} are not {column.kind.value}", fix)


def _drop_index_column(content: TableContent, path: Path) -> tuple[Choice, ...]:
    """Remove an unnamed column that numbers the rows, or is empty; DataError for others."""
    import pyarrow
    from pyarrow import compute

    if (cells := content.columns.pop("", None)) is None:
        return ()
    if cells.null_count == len(cells) or is_blank(cells):
        return (Choice(IGNORE_KEY, "1 column left out", "it has neither a name nor cells"),)
    is_integer = pyarrow.types.is_integer(cells.type) and not cells.null_count
    if not is_integer or compute.min(cells).as_py() < 0 or len(cells.unique()) < len(cells):
        problem = "a column has no name, and its cells are not row numbers"
        raise DataError(f"data.path: {path}: {problem}; name it in the first line")
    return (Choice(IGNORE_KEY, "1 column left out", "unnamed row numbers"),)


def _pop_id_columns(
    content: TableContent, problems: TableProblems, fitted: Preprocessing | None
) -> tuple[dict[str, Any], list[Choice]]:
    """Remove and return the id columns of `content`, and the choices."""
    declared, needed = problems.types, problems.needed.values()
    names = [name for name in content.columns if name not in needed]
    reasons = {name: "" for name, kind in declared.items() if kind is ColumnType.id}
    choices = list[Choice]()
    if fitted is not None:
        reasons = dict.fromkeys(fitted.ids, "")
    elif isinstance(problems.config, Tabular):
        unnamed = [name for name in content.columns if name not in declared]
        found = {name: id_reason(name, content.columns[name]) for name in unnamed}
        reasons |= {name: reason for name, reason in found.items() if reason and name in names}
        for name, reason in found.items():
            if reason and name in names:
                kind = "text" if is_text_column(content.columns[name]) else "number"
                override = mapping_override(TYPES_KEY, {name: kind})
                advice = f"not an input, but copied to predictions; to use it: {override}"
                choices.append(notice(TYPES_KEY, f"{name!r} is an id", f"{reason}: {advice}"))
            elif reason and name == problems.config.target:
                reason = f"{reason}: ids cannot be predicted; name another column"
                choices.append(notice("data.target", name, reason))
    columns = {name: content.columns.pop(name) for name in names if name in reasons}
    for name, column in columns.items():
        columns[name] = column.cast(cell_type(column))
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
    problem = f"column {split_by!r} holds {word[:MAX_CELL_CHARS]!r}, no number or ISO date"
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
    """Yield choices on unparsed cells and on recognised types."""
    for name, column in columns.items():
        if column.unparsed:
            cells = [
                f"{text[:MAX_CELL_CHARS]!r} in {content.word} {content.numbers[row]}"
                for row, text in list(column.unparsed.items())[:MAX_EXAMPLES]
            ]
            more = ", …" if len(column.unparsed) > MAX_EXAMPLES else ""
            count = f"{len(column.unparsed):,} of {len(content.numbers):,} cells of {name!r}"
            reason = f"not {column.kind.value}: {', '.join(cells)}{more}"
            yield notice(MISSING_KEY, f"{count} read as missing", reason)
        if column.form and not column.note:
            yield Choice(TYPES_KEY, f"{name}: date", f"its cells are {describe_form(column.form)}")
        if form := content.formats.get(name):
            if form.unit and column.kind is CellKind.numbers:
                yield Choice(TYPES_KEY, f"{name}: number", f"without its unit, {form.unit!r}")


def describe_notes(table: Table, left_out: Container[str] = ()) -> Iterator[Choice]:
    """Yield a notice on each column whose cells are read otherwise than most of them look."""
    for name, (note, key, value) in table.notes.items():
        values = table.columns.get(name)
        if isinstance(values, TextColumn) or values is None:
            use = "left out" if name in left_out else "category"
            effect = "date" if key == FORMATS_KEY else value
            effect = f"a column of {effect}s, and cells that are none are missing values"
        else:
            use = "date" if values.dtype.kind == "M" else "number"
            effect = describe_form(value) if key == FORMATS_KEY else "a category"
        if value:
            note = f"{note}; with {mapping_override(key, {name: value})} it is {effect}"
        yield notice(TYPES_KEY, f"{name}: {use}", note)


# -- problems of a table, collected while it is read and raised as one error -----------------------


@dataclass
class TableProblems:
    """Problems of a table, and the keys that read it in spite of them.

    `needed` are column names by config key. Absent columns are left out of it, so that the cells of
    the others are checked as well.
    """

    path: Path
    config: DataConfig
    needed: dict[str, str]
    ignore: list[str] = field(default_factory=list)
    types: dict[str, ColumnType] = field(default_factory=dict)
    formats: dict[str, str] = field(default_factory=dict)  # of dates, for strptime
    wrong: dict[str, CellKind] = field(default_factory=dict)  # columns with cells of another type
    word: str = "line"  # what a row is called
    total: int = 0  # rows
    bad: dict[int, str] = field(default_factory=dict)  # rows that data.bad_samples=drop drops
    gaps: dict[int, str] = field(default_factory=dict)  # rows that data.missing=drop drops
    columns_fixed: bool = False  # the columns are those the model was trained on
    absent: list[tuple[str, str]] = field(default_factory=list)  # by the key that names them
    columns: str = ""  # which are absent
    unreadable: dict[str, str] = field(default_factory=dict)  # columns and their types
    kinds: dict[str, tuple[str, list[int]]] = field(default_factory=dict)  # the first text; rows
    has_bad_target: bool = False  # or another cell that each row needs
    has_bad_cells: bool = False  # of any column

    def __post_init__(self) -> None:
        bad = self.config.bad_samples is BadSamples.drop
        gaps = isinstance(self.config, Tabular) and self.config.missing is Missing.drop
        self.drops = {BAD_SAMPLES_KEY: bad, MISSING_KEY: gaps}

    def check_names(self, names: Sequence[str], trained: Sequence[str]) -> None:
        """Check the file's column `names` against the configured ones, or those `trained` on."""
        for name, count in Counter(names).items():
            if count > 1:
                what = f"are called {name[:MAX_CELL_CHARS]!r}" if name else "have no name"
                fix = f"give each a unique name in the first line{_describe_numeric_names(names)}"
                raise DataError(f"data.path: {self.path}: {count} columns {what}; {fix}")
        names = [name for name in names if name]
        if trained:
            self.columns_fixed = True
            if missing := [name for name in dict.fromkeys(trained) if name not in names]:
                problem = f"lacks {join_names(map(repr, missing))}, which the model was trained on"
                others = [name for name in names if name not in trained]
                fix = f"; {suggestion(missing[0], others, UNUSED_COLUMNS)}"
                if self.needed.get(TARGET_KEY) in missing:
                    problem += "; job=predict needs no target"
                self.columns = f"{problem}{fix if others else ''}"
            return
        if self.absent:  # the file is opened a second time
            return
        lists = {IGNORE_KEY: self.ignore, TYPES_KEY: self.types, FORMATS_KEY: self.formats}
        configured = [*self.needed.items(), *((k, n) for k, names in lists.items() for n in names)]
        self.absent = [(key, name) for key, name in configured if name not in names]
        if self.absent:
            others = [name for name in names if name not in self.needed.values()]
            absent = [name for _, name in self.absent[:MAX_EXAMPLES]]
            near = dict.fromkeys(suggestion(n, others, "its columns are") for n in absent)
            nor = join_names(f"{n!r} ({k})" for k, n in self.absent[1:])
            more = f", nor {nor}" if nor else ""
            self.columns = f"has no column {self.absent[0][1]!r}{more}; {'; '.join(near)}"
            self.columns += _describe_numeric_names(names)
            self.needed = {key: name for key, name in self.needed.items() if name in names}

    def add_unreadable(self, types: Mapping[str, Any]) -> None:
        """Record columns whose cells are not single numbers, times or texts."""
        self.unreadable |= {name: str(arrow)[:MAX_CELL_CHARS] for name, arrow in types.items()}

    def add_rows(self, key: str, problems: Mapping[int, str]) -> None:
        """Record problems of rows; they are dropped if the config key `key` says so."""
        rows = self.bad if key == BAD_SAMPLES_KEY else self.gaps
        needed = tuple(f", column {name!r}:" for name in self.needed.values())
        for row, text in problems.items():
            rows.setdefault(row, text)
            self.has_bad_target |= text.startswith(needed)
            self.has_bad_cells |= text.startswith(", column")
            if not self.drops[key]:
                kind = re.sub(": .* is ", ": is ", text)
                self.kinds.setdefault(kind, (text, []))[1].append(row)

    def raise_if_any(self, cause: DataError | None = None) -> None:
        """Raise all problems, if any, as one error; `cause` is the error that ended the reading."""
        rows = [*self._rows()]
        types = join_names(f"{name!r} of type {arrow}" for name, arrow in self.unreadable.items())
        unreadable = f"cannot read the columns {types}" if types else ""
        texts = [self.columns, unreadable, "" if cause is None else str(cause), *rows]
        texts = [text for text in texts if text]
        is_own = cause is not None and bool(self.columns) and self.columns in str(cause)
        if cause is not None and (is_own or len(texts) == 1):
            raise cause
        if not texts:
            return
        text = f"{self.path}{'' if self.columns else ':'} {'; '.join(texts)}"
        fix = self._fix() if rows or unreadable else ""
        if self.absent:
            raise ConfigError(self.absent[0][0], text, fix)
        raise DataError(with_fix(text, fix))

    def dropped_choices(self) -> tuple[Choice, ...]:
        """Return the choices that report the dropped rows."""
        return tuple(
            Choice(key, f"{len(rows):,} of {self.total:,} left out", self._examples(rows), True)
            for key, rows in ((BAD_SAMPLES_KEY, self.bad), (MISSING_KEY, self.gaps))
            if rows
        )

    def _rows(self) -> Iterator[str]:
        """Yield a text for each kind of row problem: cells first, then whole rows."""
        kinds = sorted(self.kinds.values(), key=lambda kind: (", column" not in kind[0], kind[1]))
        for text, rows in kinds[:MAX_KINDS]:
            others = ", ".join(map(str, rows[1:MAX_EXAMPLES])) + ", …" * (len(rows) > MAX_EXAMPLES)
            more = f" ({len(rows):,} {self.word}s in all: also {others})" if rows[1:] else ""
            yield f"{self.word} {rows[0]}{text}{more}"
        if len(kinds) > MAX_KINDS:
            yield f"and {len(kinds) - MAX_KINDS:,} more kinds of bad rows"
        if self.drops[BAD_SAMPLES_KEY] and len(self.bad) > self.config.most_bad * self.total:
            limit = f"more than data.most_bad={self.config.most_bad:g}"
            count = f"{len(self.bad):,} of {self.total:,} rows cannot be used"
            yield f"{count}, {limit}: {self._examples(self.bad)}"
        elif self.gaps and self.drops[MISSING_KEY] and len(self.bad | self.gaps) >= self.total:
            yield f"no row is without a missing value: {self._examples(self.gaps)}"

    def _examples(self, rows: Mapping[int, str]) -> str:
        return examples({number: f"{self.word} {number}{rows[number]}" for number in rows})

    def _fix(self) -> str:
        """Return the ways to read the table: its cells corrected, or the keys of the config."""
        ways, share = ["correct them"], len(self.bad) / max(self.total, 1)
        # a row without its target cannot be used, whatever is done about other columns
        if isinstance(self.config, Tabular) and not self.columns_fixed and not self.has_bad_target:
            if self.has_bad_cells or self.unreadable.keys() - self.needed.values():
                ways.append(f"leave out a column with {IGNORE_KEY}")
            if self.wrong:
                words = {CellKind.times: "date"}
                kinds = {name: words.get(kind, "number") for name, kind in self.wrong.items()}
                override = mapping_override(TYPES_KEY, kinds)
                ways.append(f"read such cells as missing values with {override}")
        if self.gaps:
            ways.append(f"fill missing values with {MISSING_KEY}=mean")
        most_gaps = self.config.most_bad * self.total  # if more, few rows would be left
        gaps = self.gaps if len(self.gaps) <= most_gaps else ()
        rows = ((BAD_SAMPLES_KEY, self.bad), (MISSING_KEY, gaps))
        keys = [f"{key}=drop" for key, bad in rows if bad and not self.drops[key]]
        if share > self.config.most_bad:
            keys.append(f"data.most_bad={math.ceil(100 * share) / 100:g}")
        if keys and share <= max(MAX_DROPPED, self.config.most_bad):  # all of them are needed
            ways.append(f"leave out the rows with {' '.join(keys)}")
        return ", or ".join(ways)


def _describe_numeric_names(names: Sequence[str]) -> str:
    """Return a hint if at least half of the columns' names are numbers, else ""."""
    numeric = sum(NUMERIC_NAME.fullmatch(name) is not None for name in names)
    if not 0 < len(names) <= 2 * numeric:
        return ""
    return "; is a header missing? the first line must name the columns, and holds numbers"
