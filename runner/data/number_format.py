"""Number formats in csv text: decimal commas, thousands separators and currency signs."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from runner.data.cells import MISSING
from runner.data.config import SIGNS, Tabular, sign_of
from runner.data.preprocessing import Preprocessing
from runner.errors import DataError
from runner.techniques.base import Choice

log = logging.getLogger(__name__)

SPACES, APOSTROPHES = " \u00a0\u202f", "'’"
GROUP_SIGNS = f",._{SPACES}{APOSTROPHES}"
LIKE_A_NUMBER = rf"^\s*[+-]?[\d{GROUP_SIGNS}]*\d([eE][+-]?\d+)?\s*$"
DOTTED_DATE = r"^\s*\d{1,2}\.\d{1,2}\.\d{4}\s*$"  # 31.05.2024, in a file with other numbers
UNITS = "€$£¥₹%"
UNIT_SHARE = 0.99  # of a column's cells that must be numbers with the same sign
UNIT = rf"^\s*([+-]?{{0}}\s*[+-]?[\d{GROUP_SIGNS}]*\d|[+-]?[\d{GROUP_SIGNS}]*\d\s*{{0}})\s*$"
DECIMAL = r"^\s*[+-]?\d*{}\d+([eE][+-]?\d+)?\s*$"
GROUPED = r"^\s*[+-]?\d{{1,3}}({}\d{{3}})+([.,]\d+)?\s*$"
# 1,234.5 and 1,234,567 can be read in one way only, unlike 1,234
WITH_DECIMALS = r"^\s*[+-]?\d{{1,3}}([{0}]\d{{3}})+[{1}]\d+\s*$"
MANY_GROUPS = r"^\s*[+-]?\d{{1,3}}([{0}]\d{{3}}){{2,}}\s*$"
READABLE = r"^\s*[+-]?(\d{{1,3}}([{0}]\d{{3}})+|\d*)([{1}]\d*)?([eE][+-]?\d+)?\s*$"
PAIRS = [(",", "."), (".", ","), *((t, d) for t in (SPACES, APOSTROPHES) for d in ",.")]
COMMA, POINT = DECIMAL.format(","), DECIMAL.format("[.]")
GROUPED_BY_COMMA, GROUPED_BY_ANY = GROUPED.format(","), GROUPED.format(f"[{GROUP_SIGNS}]")
NOTHING = "^$"


@dataclass
class _Texts:
    """A dictionary-encoded text column and the cells per text; missing values count as 0."""

    name: str
    column: Any  # pyarrow.DictionaryArray
    counts: np.ndarray

    def count(self, pattern: str, without: str = NOTHING) -> int:
        """Return the number of cells that match `pattern` and do not match `without`."""
        return int(self.counts[self._match(pattern) & ~self._match(without)].sum())

    def example(self, pattern: str) -> str:
        """Return the first text that matches."""
        words = self.column.dictionary.filter(self._match(pattern))
        return str(words[0].as_py()).strip()

    def replace(self, pattern: str, sign: str, by: str) -> None:
        """Replace the regex `sign` by `by` in the texts that match `pattern`."""
        import pyarrow
        from pyarrow import compute

        words = self.column.dictionary
        replaced = compute.replace_substring_regex(words, sign, by)
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

    texts = [
        _texts(name, column)
        for name, column in columns.items()
        if pyarrow.types.is_string(column.type)
    ]
    units = [choice for column in texts for choice in _strip_units(column)]
    parsed = [column for column in texts if _like_numbers(column, config.most_bad)]
    points = any(str(column.type) == "double" for column in columns.values())
    decimal, thousands = sign_of(config.decimal), sign_of(config.thousands)
    choices: tuple[Choice, ...] = ()
    if decimal is None and thousands is None:
        decimal, thousands, choices = _recognise_signs(parsed, points)
    if thousands == ".":
        decimal = ","
    if thousands is not None:
        signs = next((s for s in (SPACES, APOSTROPHES) if thousands in s), thousands)
        for column in parsed:
            column.replace(GROUPED.format(f"[{signs}]"), f"[{signs}]", "")
    if decimal is None and thousands != "," and separator != "," and not points:
        certain = [column for column in parsed if column.count(COMMA, GROUPED_BY_COMMA)]
        if certain and not any(c.count(POINT) or c.count(GROUPED_BY_COMMA, COMMA) for c in parsed):
            reason = f"column {certain[0].name!r} holds numbers such as {certain[0].example(COMMA)}"
            decimal, choices = ",", (Choice("data.decimal", "comma", reason),)
    if decimal is None and thousands is None:
        choices = tuple(choice for column in parsed for choice in _hint(column))
    if decimal == ",":
        for column in parsed:
            _convert_commas(column, path)
    columns.update({column.name: pyarrow.chunked_array([column.column]) for column in texts})
    return (*units, *choices)


def as_trained(config: Tabular, fitted: Preprocessing | None) -> tuple[Tabular, tuple[Choice, ...]]:
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


def word_of(sign: str) -> str:
    """Return the config word for a sign, such as comma; other signs unchanged."""
    sign = " " if sign in SPACES else "'" if sign in APOSTROPHES else sign
    return next((word for word, known in SIGNS.items() if known == sign), sign)


def _texts(name: str, column: Any) -> _Texts:
    import pyarrow
    from pyarrow import compute

    encoded = column.dictionary_encode().combine_chunks()
    codes = encoded.indices.drop_null().to_numpy()
    counts = np.bincount(codes, minlength=len(encoded.dictionary))
    words = compute.utf8_lower(compute.utf8_trim_whitespace(encoded.dictionary))
    known = ~np.asarray(compute.is_in(words, pyarrow.array(sorted(MISSING))))
    return _Texts(name, encoded, counts * known)


def _strip_units(texts: _Texts) -> list[Choice]:
    """Strip a sign such as € or % that nearly all cells have; return the choices."""
    total, choices = int(texts.counts.sum()), []
    for sign in UNITS if total else "":
        pattern = UNIT.format(re.escape(sign))
        if texts.count(pattern) >= UNIT_SHARE * total:
            reason = f"its cells are numbers with {sign}, such as {texts.example(pattern)}"
            choices.append(Choice("data.types", f"{texts.name}: number", reason))
            texts.replace(pattern, rf"\s*{re.escape(sign)}\s*", "")
    return choices


def _like_numbers(texts: _Texts, share: float) -> bool:
    """Whether some cells look like numbers, and at most `share` do not."""
    numbers = texts.count(LIKE_A_NUMBER, DOTTED_DATE)
    return numbers > 0 and numbers >= (1 - share) * texts.counts.sum()


def _recognise_signs(
    parsed: list[_Texts], points: bool
) -> tuple[str | None, str | None, tuple[Choice, ...]]:
    """Return decimal and thousands signs (None if ambiguous), and the choices."""
    readable = []
    for thousands, decimal in PAIRS:
        certain = [p.format(thousands, decimal) for p in (WITH_DECIMALS, MANY_GROUPS)]
        if len(thousands) > 1:  # 12 345 678 may be a telephone number
            certain.pop()
        evidence = [t.example(p) for t in parsed for p in certain if t.count(p)]
        other = READABLE.format(thousands, decimal)
        if evidence and not any(t.count(LIKE_A_NUMBER, other) for t in parsed):
            readable.append((thousands, decimal, evidence[0]))
    if len(readable) != 1 or (points and readable[0][1] == ","):
        return None, None, ()
    thousands, decimal, example = readable[0]
    reason = f"the file holds numbers such as {example}"
    choices = [Choice("data.thousands", word_of(thousands[0]), reason)]
    if decimal == ",":
        choices.append(Choice("data.decimal", "comma", reason))
    return decimal, thousands, tuple(choices)


def _convert_commas(texts: _Texts, path: Path) -> None:
    if texts.count(POINT):
        problem = f"column {texts.name!r} holds {texts.example(POINT)}, and the decimal"
        fix = f"data.decimal=point, data.thousands=point, or data.ignore=[{texts.name}]"
        raise DataError(f"{path}: {problem} sign is a comma; use {fix}")
    texts.replace(COMMA, ",", ".")


def _hint(texts: _Texts) -> list[Choice]:
    """Warn of a column with an ambiguous number format, and return the key that decides it."""
    for key, pattern, without in (
        ("decimal", COMMA, GROUPED_BY_COMMA),
        ("thousands", GROUPED_BY_ANY, NOTHING),
    ):
        if texts.count(pattern, without):
            example = texts.example(pattern)
            sign = word_of(next(char for char in example if char in GROUP_SIGNS))
            holds = f"column {texts.name!r} holds texts such as {example}; if they are numbers,"
            reason = f"{holds} use data.{key}={sign}"
            log.warning("data.%s: %s", key, reason)
            return [Choice(f"data.{key}", "none", reason)]
    return []
