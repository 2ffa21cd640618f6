"""Number formats in csv text: decimal commas, thousands separators and currency signs."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from runner.data.cells import MISSING_WORDS
from runner.data.config import SIGNS, Tabular, sign_of
from runner.data.preprocessing import Preprocessing
from runner.errors import DataError
from runner.techniques.base import Choice

log = logging.getLogger(__name__)

SPACES, APOSTROPHES = " \u00a0\u202f", "'’"
GROUP_SIGNS = f",._{SPACES}{APOSTROPHES}"
LIKE_A_NUMBER = rf"^\s*[+-]?[\d{GROUP_SIGNS}]*\d([eE][+-]?\d+)?\s*$"
DOTTED_DATE = r"^\s*\d{1,2}\.\d{1,2}\.\d{4}\s*$"  # 31.05.2024, in a file with other numbers
UNIT_SIGNS = "€$£¥₹%"
UNIT_SHARE = 0.99  # of a column's cells that must be numbers with the same sign
UNIT = rf"^\s*([+-]?{{0}}\s*[+-]?[\d{GROUP_SIGNS}]*\d|[+-]?[\d{GROUP_SIGNS}]*\d\s*{{0}})\s*$"
DECIMAL = r"^\s*[+-]?\d*{}\d+([eE][+-]?\d+)?\s*$"
GROUPED = r"^\s*[+-]?\d{{1,3}}({}\d{{3}})+([.,]\d+)?\s*$"
# 1,234.5 and 1,234,567 can be read in one way only, unlike 1,234
WITH_DECIMALS = r"^\s*[+-]?\d{{1,3}}([{0}]\d{{3}})+[{1}]\d+\s*$"
MANY_GROUPS = r"^\s*[+-]?\d{{1,3}}([{0}]\d{{3}}){{2,}}\s*$"
NUMBER_WITH_SIGNS = r"^\s*[+-]?(\d{{1,3}}([{0}]\d{{3}})+|\d*)([{1}]\d*)?([eE][+-]?\d+)?\s*$"
SIGN_PAIRS = [(",", "."), (".", ","), *((t, d) for t in (SPACES, APOSTROPHES) for d in ",.")]
COMMA, POINT = DECIMAL.format(","), DECIMAL.format("[.]")
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
    columns: dict[str, Any], path: Path, separator: str, config: Tabular
) -> tuple[Choice, ...]:
    """Rewrite numbers in text columns in Python's notation; return the recognised formats.

    Text columns become dictionary-encoded, so that each text is parsed once. A currency sign or %
    is stripped from a column if nearly all cells have it. A thousands separator is recognised if a
    number such as 1,234.5 needs it and all numbers fit it; a decimal comma if commas do not
    separate cells, no number has a decimal point, and a number such as 12,5 has no other reading.
    """
    import pyarrow

    text_columns = [
        _encode_column(name, c) for name, c in columns.items() if pyarrow.types.is_string(c.type)
    ]
    units = [choice for column in text_columns for choice in _strip_units(column)]
    numeric = [column for column in text_columns if _looks_numeric(column, config.most_bad)]
    has_points = any(str(column.type) == "double" for column in columns.values())
    decimal, thousands = sign_of(config.decimal), sign_of(config.thousands)
    choices: tuple[Choice, ...] = ()
    if decimal is None and thousands is None:
        decimal, thousands, choices = _recognise_signs(numeric, has_points)
    if thousands == ".":
        decimal = ","
    if thousands is not None:
        signs = next((s for s in (SPACES, APOSTROPHES) if thousands in s), thousands)
        for column in numeric:
            column.replace(GROUPED.format(f"[{signs}]"), f"[{signs}]", "")
    if decimal is None and thousands != "," and separator != "," and not has_points:
        certain = [column for column in numeric if column.count(COMMA, GROUPED_BY_COMMA)]
        if certain and not any(c.count(POINT) or c.count(GROUPED_BY_COMMA, COMMA) for c in numeric):
            example = certain[0].example(COMMA)
            reason = f"column {certain[0].name!r} holds numbers such as {example}"
            decimal, choices = ",", (Choice("data.decimal", "comma", reason),)
    if decimal is None and thousands is None:
        choices = tuple(choice for column in numeric for choice in _warn_ambiguous(column))
    if decimal == ",":
        for column in numeric:
            _convert_commas(column, path)
    columns.update({column.name: pyarrow.chunked_array([column.column]) for column in text_columns})
    return (*units, *choices)


def use_trained_format(
    config: Tabular, fitted: Preprocessing | None
) -> tuple[Tabular, tuple[Choice, ...]]:
    """Return the config with the training file's number format, unless it sets its own."""
    if fitted is None or config.decimal or config.thousands:
        return config, ()
    if not fitted.decimal and not fitted.thousands:
        return config, ()
    decimal, thousands = fitted.decimal or "point", fitted.thousands or None
    signs = {"data.decimal": decimal, "data.thousands": thousands}
    reason = "as in the training file"
    choices = tuple(Choice(key, word, reason) for key, word in signs.items() if word)
    return replace(config, decimal=decimal, thousands=thousands), choices


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


def _strip_units(column: _EncodedColumn) -> list[Choice]:
    """Strip a sign such as € or % that nearly all cells have; return the choices."""
    total, choices = int(column.counts.sum()), []
    for sign in UNIT_SIGNS if total else "":
        pattern = UNIT.format(re.escape(sign))
        if column.count(pattern) >= UNIT_SHARE * total:
            reason = f"its cells are numbers with {sign}, such as {column.example(pattern)}"
            choices.append(Choice("data.types", f"{column.name}: number", reason))
            column.replace(pattern, rf"\s*{re.escape(sign)}\s*", "")
    return choices


def _looks_numeric(column: _EncodedColumn, share: float) -> bool:
    """Whether some cells look like numbers, and at most `share` do not."""
    numbers = column.count(LIKE_A_NUMBER, DOTTED_DATE)
    return numbers > 0 and numbers >= (1 - share) * column.counts.sum()


def _recognise_signs(
    numeric: list[_EncodedColumn], has_points: bool
) -> tuple[str | None, str | None, tuple[Choice, ...]]:
    """Return decimal and thousands signs (None if ambiguous), and the choices."""
    candidates = []
    for thousands, decimal in SIGN_PAIRS:
        patterns = [p.format(thousands, decimal) for p in (WITH_DECIMALS, MANY_GROUPS)]
        if len(thousands) > 1:  # 12 345 678 may be a telephone number
            patterns.pop()
        evidence = [t.example(p) for t in numeric for p in patterns if t.count(p)]
        readable_number = NUMBER_WITH_SIGNS.format(thousands, decimal)
        if evidence and not any(t.count(LIKE_A_NUMBER, readable_number) for t in numeric):
            candidates.append((thousands, decimal, evidence[0]))
    if len(candidates) != 1 or (has_points and candidates[0][1] == ","):
        return None, None, ()
    thousands, decimal, example = candidates[0]
    reason = f"the file holds numbers such as {example}"
    choices = [Choice("data.thousands", sign_word(thousands[0]), reason)]
    if decimal == ",":
        choices.append(Choice("data.decimal", "comma", reason))
    return decimal, thousands, tuple(choices)


def _convert_commas(column: _EncodedColumn, path: Path) -> None:
    if column.count(POINT):
        problem = f"column {column.name!r} holds {column.example(POINT)}, and the decimal"
        fix = f"data.decimal=point, data.thousands=point, or data.ignore=[{column.name}]"
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
            reason = f"{problem} use data.{key}={sign}"
            log.warning("data.%s: %s", key, reason)
            return [Choice(f"data.{key}", "none", reason)]
    return []
