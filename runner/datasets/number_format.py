"""Number formats in csv text: decimal commas, thousands separators and currency signs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from runner.core.data.preprocessing import Preprocessing
from runner.core.errors import DataError
from runner.core.findings import Choice, notice
from runner.core.format import join_names
from runner.core.interfaces.batch import NumberFormat
from runner.core.record.column_overrides import list_override
from runner.core.schemas.data import SIGNS, Tabular, sign_of
from runner.datasets.cells import (
    MISSING_WORDS,
    CellKind,
    CellRules,
    cell_type,
    commonest_unit,
    is_text,
    plain_number,
)

SPACES, APOSTROPHES = " \u00a0\u202f", "'’"
GROUP_SIGNS = f",._{SPACES}{APOSTROPHES}"
LIKE_A_NUMBER = rf"^\s*[+-]?[\d{GROUP_SIGNS}]*\d([eE][+-]?\d+)?\s*$"
DOTTED_DATE = r"^\s*\d{1,2}\.\d{1,2}\.\d{4}\s*$"  # 31.05.2024, in a file with other numbers
CODE = r"^\s*[+-]?0\d+\s*$"  # with leading zeros, such as a ZIP code
DECIMAL = r"^\s*[+-]?\d*{}\d+([eE][+-]?\d+)?\s*$"
GROUPED = r"^\s*[+-]?[1-9]\d{{0,2}}({}\d{{3}})+([.,]\d+)?\s*$"
# 1,234.5 and 1,234,567 can be read in one way only, unlike 1,234
WITH_DECIMALS = r"^\s*[+-]?\d{{1,3}}([{0}]\d{{3}})+[{1}]\d+\s*$"
MANY_GROUPS = r"^\s*[+-]?\d{{1,3}}([{0}]\d{{3}}){{2,}}\s*$"
NUMBER_WITH_SIGNS = r"^\s*[+-]?(\d{{1,3}}([{0}]\d{{3}})+|\d*)([{1}]\d*)?([eE][+-]?\d+)?\s*$"
SIGN_PAIRS = [(",", "."), (".", ","), *((t, d) for t in (SPACES, APOSTROPHES) for d in ",.")]
COMMA, POINT = DECIMAL.format(","), DECIMAL.format("[.]")
GROUPED_NUMBER = re.compile(r"\d,\d{3}(?!\d)")  # within a text, with a currency sign, say
GROUPED_BY_COMMA, GROUPED_BY_ANY = GROUPED.format(","), GROUPED.format(f"[{GROUP_SIGNS}]")
NO_MATCH = "^$"


@dataclass
class _EncodedColumn:
    """A dictionary-encoded text column and the cells per text; missing values count as 0."""

    name: str
    column: Any  # pyarrow.DictionaryArray
    counts: np.ndarray

    def count(self, pattern: str, excluding: str = NO_MATCH) -> int:
        """Return the number of cells that match `pattern` and do not match `excluding`."""
        return int(self.counts[self._match(pattern) & ~self._match(excluding)].sum())

    def example(self, pattern: str) -> str:
        """Return the first text that matches."""
        words = self.column.dictionary.filter(self._match(pattern))
        return str(words[0].as_py()).strip()

    def replace(self, pattern: str, sign: str, replacement: str) -> None:
        """Replace the regex `sign` by `replacement` in the texts that match `pattern`."""
        import pyarrow
        from pyarrow import compute

        words = self.column.dictionary
        replaced = compute.replace_substring_regex(words, sign, replacement)
        words = compute.if_else(pyarrow.array(self._match(pattern)), replaced, words)
        self.column = pyarrow.DictionaryArray.from_arrays(self.column.indices, words)

    def _match(self, pattern: str) -> np.ndarray:
        from pyarrow import compute

        matches = compute.match_substring_regex(self.column.dictionary, pattern)
        return np.asarray(matches.fill_null(False))


def convert_numbers(
    columns: dict[str, Any],
    rules: Callable[[str], CellRules],
    path: Path,
    config: Tabular | None = None,
    separator: str = "",
) -> tuple[dict[str, NumberFormat], tuple[Choice, ...]]:
    """Rewrite numbers in text columns in Python's notation; return their formats, and choices.

    Text columns become dictionary-encoded, so that each text is parsed once. Each column has a
    format of its own: that of its `rules`, or of its cells. Units, currency and per-cent signs are
    stripped from a column that is declared as numbers; without `config` (parquet) nothing else. A
    thousands separator is recognised if a number such as 1,234.5 needs it and all numbers fit it,
    spaces and apostrophes only in a column that is declared; a decimal comma if commas do not
    separate cells, no number has a decimal point, and a number such as 12,5 has no other reading.
    """
    import pyarrow

    formats, choices = dict[str, NumberFormat](), list[Choice]()
    has_decimal_point = [name for name, c in columns.items() if pyarrow.types.is_float64(c.type)]
    for name, cells in columns.items():
        rule = rules(name)
        is_text = is_text_column(cells) and rule.kind in (CellKind.any, CellKind.numbers)
        if not is_text or (config is None and not (rule.declared or rule.format)):
            continue
        column, known, unit = _encode_column(name, cells), rule.format or NumberFormat(), ""
        if rule.declared or rule.format:
            unit = _strip_unit(column, known.unit if rule.format else None)
        decimal, thousands = known.decimal, known.thousands
        looks_numeric = rule.kind is CellKind.numbers or _looks_numeric(column, rule.most_bad)
        if config is not None and looks_numeric:
            set_signs = sign_of(config.decimal), sign_of(config.thousands)
            if any(set_signs):
                decimal, thousands = (sign or "" for sign in set_signs)
            elif not decimal and not thousands:
                pairs = SIGN_PAIRS if rule.declared else SIGN_PAIRS[:2]
                decimal, thousands = _recognise_signs(column, pairs, choices)
            decimal = "," if thousands == "." else decimal
            if thousands:
                signs = next((s for s in (SPACES, APOSTROPHES) if thousands in s), thousands)
                column.replace(GROUPED.format(f"[{signs}]"), f"[{signs}]", "")
            if not decimal and thousands != ",":
                decimal = _recognise_comma(column, separator, choices)
            if not decimal and not thousands:
                choices += _warn_ambiguous(column)
            if decimal == ",":
                _convert_commas(column, path, rule.is_target, thousands)
        formats[name] = NumberFormat(decimal, thousands, unit)
        columns[name] = pyarrow.chunked_array([column.column])
    with_comma = [name for name, form in formats.items() if form.decimal == ","]
    if with_comma and has_decimal_point and config is not None and config.decimal is None:
        points, commas = (join_names(map(repr, x)) for x in (has_decimal_point, with_comma))
        reason = f"{points} have decimal points, but {commas} decimal commas; "
        reason += "if the points separate thousands: data.thousands=point"
        choices.append(notice("data.decimal", "point and comma", reason))
    return formats, tuple(choices)


def use_trained_format(
    config: Tabular, fitted: Preprocessing | None
) -> tuple[Tabular, tuple[Choice, ...]]:
    """Return the config with the number format set in training, unless it sets its own."""
    if fitted is None or config.decimal or config.thousands:
        return config, ()
    if not fitted.decimal and not fitted.thousands:
        return config, ()
    decimal, thousands = fitted.decimal or "point", fitted.thousands or None
    signs = {"data.decimal": decimal, "data.thousands": thousands}
    reason = "as in the training file"
    choices = tuple(Choice(key, word, reason) for key, word in signs.items() if word)
    return replace(config, decimal=decimal, thousands=thousands), choices


def is_text_column(column: Any) -> bool:
    """Whether an arrow column holds texts, dictionary-encoded or not."""
    return is_text(cell_type(column))


def sign_word(sign: str) -> str:
    """Return the config word for a sign, such as comma; other signs unchanged."""
    sign = " " if sign in SPACES else "'" if sign in APOSTROPHES else sign
    return next((word for word, known_sign in SIGNS.items() if known_sign == sign), sign)


def _encode_column(name: str, column: Any) -> _EncodedColumn:
    import pyarrow
    from pyarrow import compute

    encoded = column.dictionary_encode().combine_chunks()
    codes = encoded.indices.drop_null().to_numpy()
    counts = np.bincount(codes, minlength=len(encoded.dictionary))
    words = compute.utf8_lower(compute.utf8_trim_whitespace(encoded.dictionary))
    is_present = ~np.asarray(compute.is_in(words, pyarrow.array(sorted(MISSING_WORDS))))
    return _EncodedColumn(name, encoded, counts * is_present)


def _strip_unit(column: _EncodedColumn, unit: str | None) -> str:
    """Write numbers with `unit` plainly (None: the most frequent unit), and return the unit."""
    import pyarrow

    words = column.column.dictionary.to_pylist()
    numbers = [plain_number(word) for word in words]
    if unit is None:
        unit = commonest_unit(numbers, column.counts)
    plain = [
        number[0]
        if number is not None and number[1] == unit
        else f"{word} without {unit}"
        if number is not None and not number[1]
        else word
        for word, number in zip(words, numbers, strict=True)
    ]
    dictionary = pyarrow.array(plain, column.column.dictionary.type)
    column.column = pyarrow.DictionaryArray.from_arrays(column.column.indices, dictionary)
    return unit


def _looks_numeric(column: _EncodedColumn, share: float) -> bool:
    """Whether some cells look like numbers, none like a code, and at most `share` do not."""
    numbers = column.count(LIKE_A_NUMBER, DOTTED_DATE)
    return numbers > column.count(CODE) * numbers and numbers >= (1 - share) * column.counts.sum()


def _recognise_signs(
    column: _EncodedColumn, pairs: Sequence[tuple[str, str]], choices: list[Choice]
) -> tuple[str, str]:
    """Return decimal and thousands signs of a column, of these pairs; "": none, or ambiguous."""
    candidates = []
    for thousands, decimal in pairs:
        patterns = [p.format(thousands, decimal) for p in (WITH_DECIMALS, MANY_GROUPS)]
        if len(thousands) > 1:  # of a declared column: 12 345 678 may be a telephone number
            patterns.append(GROUPED.format(f"[{thousands}]"))
        evidence = [column.example(pattern) for pattern in patterns if column.count(pattern)]
        readable_number = NUMBER_WITH_SIGNS.format(thousands, decimal)
        if evidence and not column.count(LIKE_A_NUMBER, readable_number):
            candidates.append((decimal, thousands, evidence[0]))
    if len({thousands for _, thousands, _ in candidates}) == 1:
        decimal, thousands, example = candidates[0]
        decimal = decimal if len(candidates) == 1 else ""  # 1 234 fits both
        reason = f"column {column.name!r} holds numbers such as {example}"
        choices.append(Choice("data.thousands", sign_word(thousands[0]), reason))
        if decimal == ",":
            choices.append(Choice("data.decimal", "comma", reason))
        return decimal, thousands[0]
    return "", ""


def _recognise_comma(column: _EncodedColumn, separator: str, choices: list[Choice]) -> str:
    """Return a comma if it is certainly the decimal sign of a column, else ""."""
    is_certain = separator != "," and column.count(COMMA, GROUPED_BY_COMMA)
    if not is_certain or column.count(POINT) or column.count(GROUPED_BY_COMMA, COMMA):
        return ""
    reason = f"column {column.name!r} holds numbers such as {column.example(COMMA)}"
    choices.append(Choice("data.decimal", "comma", reason))
    return ","


def _convert_commas(column: _EncodedColumn, path: Path, is_target: bool, thousands: str) -> None:
    if column.count(POINT):
        problem = f"column {column.name!r} holds {column.example(POINT)}, and the decimal"
        ways = ["data.decimal=point"]
        ways += ["data.thousands=point"] * (thousands != ".")
        ways += [list_override("data.ignore", [column.name])] * (not is_target)
        fix = ", ".join([*ways, "or write all numbers with one decimal sign"])
        raise DataError(f"{path}: {problem} sign is a comma; use {fix}")
    column.replace(COMMA, ",", ".")


def _warn_ambiguous(column: _EncodedColumn) -> list[Choice]:
    """Warn of a column with an ambiguous number format, and return the key that decides it."""
    for key, pattern, excluding in (
        ("decimal", COMMA, GROUPED_BY_COMMA),
        ("thousands", GROUPED_BY_ANY, NO_MATCH),
    ):
        if column.count(pattern, excluding):
            example = column.example(pattern)
            sign = sign_word(next(char for char in example if char in GROUP_SIGNS))
            problem = f"column {column.name!r} holds texts such as {example}; if they are numbers,"
            return [notice(f"data.{key}", "none", f"{problem} use data.{key}={sign}")]
    return []
