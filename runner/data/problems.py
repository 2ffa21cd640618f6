"""What is wrong with a table, collected while it is read and raised as one error."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.data.config import BadSamples, ColumnType, DataConfig, Missing, Tabular
from runner.data.paths import nearest, suggestion
from runner.data.usable import KEY, NAMED, examples
from runner.errors import ConfigError, DataError
from runner.record.provenance import changed_command
from runner.record.text import quote_for_hydra
from runner.techniques.base import Choice

GAPS = "data.missing"
TYPES = "data.types"
IGNORE = "data.ignore"
LONGEST = 40  # characters of a cell or a name, in a message
KINDS = 10  # kinds of bad rows, in a message
MOST_DROPPED = 0.5  # of the rows, by a command that is suggested
COMMAND = 2_000  # characters; a longer command is left out
PLAIN = re.compile(r"(?!(?i:null|true|false|nan|inf)$)[A-Za-z_]\w*")


@dataclass
class RowProblem:
    """What is wrong with some rows, such as a cell of one column."""

    text: str  # about the first row
    count: int = 0
    rows: list[int] = field(default_factory=list)  # the first ones

    def describe(self, word: str) -> str:
        """The first row, how many rows there are, and the next ones."""
        following = ", ".join(map(str, self.rows[1:]))
        more = f" ({self.count:,} {word}s in all: also {following}" if following else ""
        more += (", …)" if self.count > NAMED else ")") if more else ""
        return f"{word} {self.rows[0]}{self.text}{more}"


@dataclass
class Problems:
    """What is wrong with a table, and the command with which it can be read all the same.

    `needed` are columns by config key. In place of an absent column the one with the nearest name
    is read, so that its cells are checked as well.
    """

    path: Path
    config: DataConfig
    needed: dict[str, str]
    ignore: list[str] = field(default_factory=list)
    types: dict[str, ColumnType] = field(default_factory=dict)
    absent: list[tuple[str, str]] = field(default_factory=list)  # by the key that names them
    columns: list[str] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)  # columns and their types
    word: str = "line"  # what a row is called
    total: int = 0  # rows
    bad: dict[int, str] = field(default_factory=dict)  # rows that data.bad_samples=drop leaves out
    gaps: dict[int, str] = field(default_factory=dict)  # those that data.missing=drop does
    kinds: dict[str, RowProblem] = field(default_factory=dict)
    avoidable: bool = True  # by other values of keys
    fixed: bool = False  # the columns are those of a training

    def check_names(self, names: Sequence[str], trained: Sequence[str]) -> None:
        """Compare what is asked for, or what the model was `trained` on, with the file's names."""
        for name, count in Counter(names).items():
            if count > 1:
                what = f"are called {name[:LONGEST]!r}" if name else "have no name"
                fix = "each needs a name of its own in the first line"
                raise DataError(f"data.path: {self.path}: {count} columns {what}; {fix}")
        names = [name for name in names if name]
        if trained:
            self.fixed = True
            if missing := [name for name in dict.fromkeys(trained) if name not in names]:
                problem = f"lacks {_listed(map(repr, missing))}, which the model was trained on"
                others = [name for name in names if name not in trained]
                fix = f"; {suggestion(missing[0], others, 'its other columns are')}"
                self.columns = [f"{problem}{fix if others else ''}"]
                self.avoidable = False
            return
        if self.absent:  # the file is opened a second time
            return
        lists = {IGNORE: self.ignore, TYPES: self.types}
        asked = [*self.needed.items(), *((key, n) for key, some in lists.items() for n in some)]
        if absent := [(key, name) for key, name in asked if name not in names]:
            self._replace(absent, names)

    def _replace(self, absent: list[tuple[str, str]], names: Sequence[str]) -> None:
        names = [name for name in names if name not in self.needed.values()]
        near = dict.fromkeys(suggestion(n, names, "its columns are") for _, n in absent[:NAMED])
        more = f", nor {_listed(f'{n!r} ({key})' for key, n in absent[1:])}" if absent[1:] else ""
        self.columns = [f"has no column {absent[0][1]!r}{more}; {'; '.join(near)}"]
        self.absent = absent
        for key, name in absent:
            instead = nearest(name, names)
            if key in self.needed:
                self.needed[key] = instead or ""
                self.avoidable &= instead is not None
            elif key == IGNORE:
                self.ignore = [instead or "" if n == name else n for n in self.ignore]
            elif kind := self.types.pop(name):
                self.types |= {instead: kind} if instead else {}
        self.ignore = [name for name in self.ignore if name]

    def add_unreadable(self, types: Mapping[str, Any]) -> None:
        """Keep columns whose cells are no single number, time or text."""
        if not types:
            return
        self.unreadable |= {name: str(arrow)[:LONGEST] for name, arrow in types.items()}
        needed = not types.keys().isdisjoint(self.needed.values())
        self.avoidable &= isinstance(self.config, Tabular) and not needed

    def add_rows(self, key: str, problems: Mapping[int, str]) -> None:
        """Keep what is wrong with rows, which are left out where `key` is drop."""
        rows = self.bad if key == KEY else self.gaps
        for row, text in problems.items():
            rows.setdefault(row, text)
        if self._drops()[key]:
            return
        for row, text in problems.items():
            kind = self.kinds.setdefault(re.sub(": .* is ", ": is ", text), RowProblem(text))
            kind.count += 1
            if len(kind.rows) < NAMED:
                kind.rows.append(row)

    def refuse(self, cause: DataError | None = None) -> None:
        """Raise all that is wrong as one error; the `cause` is what ended the reading."""
        rows = [*self._rows()]
        texts = [*self.columns, *self._unreadable(), *([str(cause)] if cause else []), *rows]
        if cause is not None and len(texts) == 1:
            raise cause
        if not texts:
            return
        self.avoidable &= cause is None
        text = f"{self.path}{'' if self.columns else ':'} {'; '.join(texts)}"
        fix = self._fix(bool(rows))
        if self.absent:
            raise ConfigError(self.absent[0][0], text, fix)
        raise DataError(f"{text}; {fix}" if fix else text)

    def left_out(self) -> tuple[Choice, ...]:
        """What to say of the rows that are left out."""
        return tuple(
            Choice(key, f"{len(rows):,} of {self.total:,} left out", self._examples(rows))
            for key, rows in ((KEY, self.bad), (GAPS, self.gaps))
            if rows
        )

    def _unreadable(self) -> list[str]:
        listed = _listed(f"{name!r} of type {arrow}" for name, arrow in self.unreadable.items())
        return [f"cannot read the columns {listed}"] if listed else []

    def _drops(self) -> dict[str, bool]:
        """Whether rows are left out, by key."""
        gaps = isinstance(self.config, Tabular) and self.config.missing is Missing.drop
        return {KEY: self.config.bad_samples is BadSamples.drop, GAPS: gaps}

    def _rows(self) -> Iterator[str]:
        """Each kind of problem with rows: cells first, then whole rows."""
        kinds = sorted(self.kinds.values(), key=lambda k: (", column" not in k.text, k.rows[0]))
        yield from (kind.describe(self.word) for kind in kinds[:KINDS])
        if len(kinds) > KINDS:
            yield f"and {len(kinds) - KINDS:,} more kinds of bad rows"
        drops = self._drops()
        for key, rows in ((KEY, self.bad), (GAPS, self.gaps)):
            if drops[key] and len(rows) > self.config.most_bad * self.total:
                limit = f"more than data.most_bad={self.config.most_bad:g}"
                count = f"{len(rows):,} of {self.total:,} rows cannot be used"
                yield f"{count}, {limit}: {self._examples(rows)}"

    def _examples(self, rows: Mapping[int, str]) -> str:
        return examples({number: f"{self.word} {number}{rows[number]}" for number in rows})

    def _fix(self, rows: bool) -> str:
        changes = self._changes()
        ways = ["correct them"] if rows or self.unreadable else []
        ways += [f"fill the missing with {GAPS}=mean"] if changes.get(GAPS) == "drop" else []
        ways += [f"leave out a column with {IGNORE}"] if rows and not self.fixed else []
        command = changed_command(changes) if self.avoidable else ""
        if command and len(command) <= COMMAND:
            ways.append(f"or run with {command}" if ways else f"run with {command}")
        return ", ".join(ways)

    def _changes(self) -> dict[str, str]:
        """The overrides that avoid the problems."""
        changes = {key: _typed(self.needed[key]) for key, _ in self.absent if key in self.needed}
        ignore = [*self.ignore, *self.unreadable]
        if self.unreadable or IGNORE in dict(self.absent):
            changes[IGNORE] = f"[{','.join(map(_typed, ignore))}]"
        if TYPES in dict(self.absent):
            changes[f"+{TYPES}"] = (
                f"{{{', '.join(f'{n}: {k.name}' for n, k in self.types.items())}}}"
            )
        most, drops = self.config.most_bad, self._drops()
        share = {KEY: len(self.bad) / max(self.total, 1), GAPS: len(self.gaps) / max(self.total, 1)}
        if self.gaps and not drops[GAPS]:
            changes[GAPS] = "drop" if share[GAPS] <= most else "mean"
            drops[GAPS], share[GAPS] = True, share[GAPS] if share[GAPS] <= most else 0.0
        if self.bad and not drops[KEY]:
            changes[KEY] = "drop"
        if (largest := max(share.values())) > most:
            changes["data.most_bad"] = f"{math.ceil(100 * largest) / 100:g}"
            self.avoidable &= largest <= MOST_DROPPED
        return changes


def _listed(texts: Iterable[str]) -> str:
    """The first ones, and how many there are."""
    listed = [*texts]
    more = f", … ({len(listed)} in all)" if len(listed) > NAMED else ""
    return ", ".join(listed[:NAMED]) + more


def _typed(name: str) -> str:
    """A value as an override has it."""
    return name if PLAIN.fullmatch(name) else quote_for_hydra(name, "double")
