"""Problems of a table, collected while it is read and raised as one error."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.core.data.paths import suggestion
from runner.core.data.usable import BAD_SAMPLES_KEY, MAX_EXAMPLES, examples
from runner.core.errors import ConfigError, DataError, with_fix
from runner.core.format import join_names, nearest
from runner.core.interfaces.technique import Choice
from runner.core.record.column_overrides import (
    list_value,
    mapping_override,
    mapping_value,
    quote_name,
)
from runner.core.record.provenance import changed_command
from runner.core.schemas.data import BadSamples, ColumnType, DataConfig, Missing, Tabular
from runner.datasets.cells import MAX_CELL_CHARS, CellKind

MISSING_KEY = "data.missing"
TYPES_KEY = "data.types"
FORMATS_KEY = "data.date_formats"
IGNORE_KEY = "data.ignore"
TARGET_KEY = "data.target"
UNUSED_COLUMNS = "columns that the model does not use:"
MAX_KINDS = 10  # kinds of bad rows, in a message
MAX_DROPPED = 0.5  # share of rows that a suggested command may drop
MAX_COMMAND_CHARS = 2_000  # characters; a longer command is left out
NUMERIC_NAME = re.compile(r"\s*[+-]?[\d.,]*\d[\d.,]*(e[+-]?\d+)?\s*", re.IGNORECASE)


@dataclass
class TableProblems:
    """Problems of a table, and the command that reads it in spite of them.

    `needed` are column names by config key. An absent column is replaced by the one with the
    nearest name, so that its cells are checked as well.
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
    avoidable: bool = True  # by other config values
    has_bad_cells: bool = False  # of a column that can be left out

    def __post_init__(self) -> None:
        gaps = isinstance(self.config, Tabular) and self.config.missing is Missing.drop
        self.drops = {
            BAD_SAMPLES_KEY: self.config.bad_samples is BadSamples.drop,
            MISSING_KEY: gaps,
        }

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
                self.columns, self.avoidable = f"{problem}{fix if others else ''}", False
            return
        if self.absent:  # the file is opened a second time
            return
        lists = {IGNORE_KEY: self.ignore, TYPES_KEY: self.types, FORMATS_KEY: self.formats}
        configured = [*self.needed.items(), *((k, n) for k, names in lists.items() for n in names)]
        if absent := [(key, name) for key, name in configured if name not in names]:
            self._replace(absent, names)

    def _replace(self, absent: list[tuple[str, str]], names: Sequence[str]) -> None:
        names = [name for name in names if name not in self.needed.values()]
        near = dict.fromkeys(
            suggestion(n, names, "its columns are") for _, n in absent[:MAX_EXAMPLES]
        )
        more = f", nor {join_names(f'{n!r} ({k})' for k, n in absent[1:])}" if absent[1:] else ""
        self.columns = f"has no column {absent[0][1]!r}{more}; {'; '.join(near)}"
        self.columns += _describe_numeric_names(names)
        self.absent = absent
        for key, name in absent:
            replacement = nearest(name, names)
            if key in self.needed:
                self.needed[key] = replacement or ""
                self.avoidable &= replacement is not None
            elif key == IGNORE_KEY:
                self.ignore = [replacement or "" if n == name else n for n in self.ignore]
            elif key == TYPES_KEY and (kind := self.types.pop(name)):
                self.types |= {replacement: kind} if replacement else {}
            elif key == FORMATS_KEY and (form := self.formats.pop(name)):
                self.formats |= {replacement: form} if replacement else {}
        self.ignore = [name for name in self.ignore if name]

    def add_unreadable(self, types: Mapping[str, Any]) -> None:
        """Record columns whose cells are not single numbers, times or texts."""
        self.unreadable |= {name: str(arrow)[:MAX_CELL_CHARS] for name, arrow in types.items()}
        needed = not types.keys().isdisjoint(self.needed.values())
        self.avoidable &= not types or (isinstance(self.config, Tabular) and not needed)

    def add_rows(self, key: str, problems: Mapping[int, str]) -> None:
        """Record problems of rows; they are dropped if the config key `key` says so."""
        rows = self.bad if key == BAD_SAMPLES_KEY else self.gaps
        needed = tuple(f", column {name!r}:" for name in self.needed.values())
        for row, text in problems.items():
            rows.setdefault(row, text)
            self.has_bad_cells |= text.startswith(", column") and not text.startswith(needed)
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
        if cause is not None and len(texts) == 1:
            raise cause
        if not texts:
            return
        self.avoidable &= cause is None
        text = f"{self.path}{'' if self.columns else ':'} {'; '.join(texts)}"
        fix = self._fix(bool(rows))
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

    def _fix(self, rows: bool) -> str:
        changes = self._changes()
        ways = ["correct them"] if rows or self.unreadable else []
        if changes.get(MISSING_KEY) == "drop":
            ways.append(f"fill missing values with {MISSING_KEY}=mean")
        can_ignore = isinstance(self.config, Tabular) and not self.columns_fixed
        if rows and can_ignore and self.has_bad_cells:
            ways.append(f"leave out a column with {IGNORE_KEY}")
            if self.wrong:
                types = {
                    n: "date" if k is CellKind.times else "number" for n, k in self.wrong.items()
                }
                override = mapping_override(TYPES_KEY, {**self._type_names(), **types})
                ways.append(f"read such cells as missing values with {override}")
        command = changed_command(changes) if self.avoidable else ""
        if command and len(command) <= MAX_COMMAND_CHARS:
            ways.append(f"or run with {command}" if ways else f"run with {command}")
        return ", ".join(ways)

    def _type_names(self) -> dict[str, str]:
        return {name: kind.name for name, kind in self.types.items()}

    def _changes(self) -> dict[str, str]:
        """Return the overrides that avoid the problems."""
        absent, max_share, total = dict(self.absent), self.config.most_bad, max(self.total, 1)
        changes = {key: quote_name(self.needed[key]) for key in absent if key in self.needed}
        if self.unreadable or IGNORE_KEY in absent:
            changes[IGNORE_KEY] = list_value([*self.ignore, *self.unreadable])
        if TYPES_KEY in absent:
            changes[f"+{TYPES_KEY}"] = mapping_value(self._type_names())
        if FORMATS_KEY in absent:
            changes[f"+{FORMATS_KEY}"] = mapping_value(self.formats)
        bad, gaps = len(self.bad) / total, len(self.gaps) / total
        if gaps and (not self.drops[MISSING_KEY] or bad + gaps >= 1):
            changes[MISSING_KEY] = "drop" if gaps <= max_share else "mean"
        if bad and not self.drops[BAD_SAMPLES_KEY]:
            changes[BAD_SAMPLES_KEY] = "drop"
        if bad > max_share:
            changes["data.most_bad"] = f"{math.ceil(100 * bad) / 100:g}"
            self.avoidable &= bad <= MAX_DROPPED
        return changes


def _describe_numeric_names(names: Sequence[str]) -> str:
    """Return a hint if at least half of the columns' names are numbers, else ""."""
    numeric = sum(NUMERIC_NAME.fullmatch(name) is not None for name in names)
    if not 0 < len(names) <= 2 * numeric:
        return ""
    return "; is a header missing? the first line must name the columns, and holds numbers"
