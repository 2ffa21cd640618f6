"""Numbers in texts of a csv: decimal commas and signs between thousands."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from runner.data.config import SIGNS, CsvFormat, Tabular, sign_of
from runner.data.preprocessing import Preprocessing
from runner.errors import DataError
from runner.techniques.base import Choice

log = logging.getLogger(__name__)

MISSING = {"", "na", "n/a", "nan", "none", "null"}  # how tables write an unknown value
SPACES, APOSTROPHES = " \u00a0\u202f", "'’"
GROUP_SIGNS = f",._{SPACES}{APOSTROPHES}"
LIKE_A_NUMBER = rf"^\s*[+-]?[\d{GROUP_SIGNS}]*\d([eE][+-]?\d+)?\s*$"
DOTTED_DATE = r"^\s*\d{1,2}\.\d{1,2}\.\d{4}\s*$"  # 31.05.2024, in a file with other numbers
UNITS = "€$£¥₹%"
UNIT_SHARE = 0.99  # of the cells, that are a number with one of them before or behind
UNIT = rf"^\s*([+-]?{{0}}\s*[+-]?[\d{GROUP_SIGNS}]*\d|[+-]?[\d{GROUP_SIGNS}]*\d\s*{{0}})\s*$"
DECIMAL = r"^\s*[+-]?\d*{}\d+([eE][+-]?\d+)?\s*$"
GROUPED = r"^\s*[+-]?\d{{1,3}}({}\d{{3}})+([.,]\d+)?\s*$"
# 1,234.5 and 1,234,567 can be read in one way only, unlike 1,234
WITH_DECIMALS = r"^\s*[+-]?\d{{1,3}}([{0}]\d{{3}})+[{1}]\d+\s*$"
MANY_GROUPS = r"^\s*[+-]?\d{{1,3}}([{0}]\d{{3}}){{2,}}\s*$"
READABLE = r"^\s*[+-]?(\d{{1,3}}([{0}]\d{{3}})+|\d*)([{1}]\d*)?([eE][+-]?\d+)?\s*$"
PAIRS = [(",", "."), (".", ","), *((t, d) for t in (SPACES, APOSTROPHES) for d in ",.")]
COMMA, POINT = DECIMAL.format(","), DECIMAL.format("[.]")


@dataclass
class _Texts:
    """A column of texts nearly all of which look like numbers."""

    name: str
    column: Any  # pyarrow.DictionaryArray
    counts: np.ndarray  # cells of each different text

    def count(self, pattern: str, without: str = "^$") -> int:
        """Cells that match, and do not match the other one."""
        return int(self.counts[self._match(pattern) & ~self._match(without)].sum())

    def example(self, pattern: str) -> str:
        """The first text that matches."""
        words = self.column.dictionary.filter(self._match(pattern))
        return str(words[0].as_py()).strip()

    def replace(self, pattern: str, sign: str, by: str) -> None:
        """Write the texts that match with another sign."""
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


def encode_texts(columns: dict[str, Any]) -> None:
    """Make dictionaries of the columns of texts, of which each text is then parsed once."""
    import pyarrow

    for name, column in columns.items():
        if pyarrow.types.is_string(column.type):
            columns[name] = pyarrow.chunked_array([column.dictionary_encode().combine_chunks()])


def convert_numbers(
    columns: dict[str, Any], path: Path, separator: str, config: Tabular
) -> tuple[Choice, ...]:
    """Write numbers among encoded texts as Python reads them; returns what was recognised.

    Signs between thousands are recognised where some number, such as 1,234.5, needs them and all
    numbers can be read with them; a decimal comma where commas do not separate cells, no number has
    a decimal point, and some number, such as 12,5, cannot have it between thousands.
    """
    import pyarrow

    candidates = (_like_numbers(*item, config.most_bad) for item in columns.items())
    parsed = [texts for texts in candidates if texts is not None]
    if not parsed:
        return ()
    choices: tuple[Choice, ...] = ()
    points = any(str(column.type) == "double" for column in columns.values())
    decimal, thousands = sign_of(config.decimal), sign_of(config.thousands)
    if decimal is None and thousands is None:
        decimal, thousands, choices = _recognise_signs(parsed, points)
    if thousands == ".":
        decimal = ","
    if thousands is not None:
        signs = next((s for s in (SPACES, APOSTROPHES) if thousands in s), thousands)
        for texts in parsed:
            texts.replace(GROUPED.format(f"[{signs}]"), f"[{signs}]", "")
    if decimal is None and thousands is None:
        choices = _hints(parsed)
    if decimal is None and thousands != ",":
        certain = [t for t in parsed if t.count(COMMA, GROUPED.format(","))]
        mixed = any(t.count(POINT) or t.count(GROUPED.format(","), COMMA) for t in parsed)
        if certain and separator != "," and not points and not mixed:
            decimal, example = ",", certain[0].example(COMMA)
            reason = f"column {certain[0].name!r} holds numbers such as {example}"
            choices = (Choice("data.decimal", "comma", reason),)
    for choice in choices:
        if choice.value == "none":
            log.warning("%s: %s", choice.key, choice.reason)
    if decimal == ",":
        for texts in parsed:
            if texts.count(POINT):
                problem = f"column {texts.name!r} holds {texts.example(POINT)}, and the decimal"
                fix = f"data.decimal=point, data.thousands=point, or data.ignore=[{texts.name}]"
                raise DataError(f"{path}: {problem} sign is a comma; use {fix}")
            texts.replace(COMMA, ",", ".")
    columns.update({texts.name: pyarrow.chunked_array([texts.column]) for texts in parsed})
    return choices


def as_trained(config: CsvFormat, fitted: Preprocessing | None) -> Tabular | None:
    """The config with the signs of the training file, if it had any and the config names none."""
    if fitted is None or not isinstance(config, Tabular) or config.decimal or config.thousands:
        return None
    if not fitted.decimal and not fitted.thousands:
        return None
    decimal = fitted.decimal or "point"
    return replace(config, decimal=decimal, thousands=fitted.thousands or None)


def trained_signs(config: Tabular | None) -> tuple[Choice, ...]:
    """The signs of the training file, where it had any."""
    signs = () if config is None else ("decimal", "thousands")
    words = [(f"data.{key}", getattr(config, key)) for key in signs if getattr(config, key)]
    return tuple(Choice(key, word, "as in the file of the training") for key, word in words)


def uses_other_decimals(columns: Mapping[str, Any], config: Tabular) -> bool:
    """Whether some number has the other decimal sign for certain: 12.5, where 1.234 may be 1234."""
    other = "[.]" if sign_of(config.decimal) == "," else ","
    parsed = (_like_numbers(*item, config.most_bad) for item in columns.items())
    return any(t and t.count(DECIMAL.format(other), GROUPED.format(other)) for t in parsed)


def strip_units(columns: dict[str, Any]) -> tuple[Choice, ...]:
    """Take off the sign, such as € or %, that nearly all numbers of a column have; says which."""
    import pyarrow

    choices = []
    for name, column in columns.items():
        texts = _texts(name, column)
        total = 0 if texts is None else int(texts.counts.sum())
        for sign in UNITS if total else "":
            pattern = UNIT.format(re.escape(sign))
            if texts is not None and texts.count(pattern) >= UNIT_SHARE * total:
                reason = f"its cells are numbers with {sign}, such as {texts.example(pattern)}"
                choices.append(Choice("data.types", f"{name}: number", reason))
                texts.replace(pattern, rf"\s*{re.escape(sign)}\s*", "")
                columns[name] = pyarrow.chunked_array([texts.column])
    return tuple(choices)


def _texts(name: str, column: Any) -> _Texts | None:
    """The texts of a column and how many cells have each; missing values count as none."""
    import pyarrow
    from pyarrow import compute

    if not pyarrow.types.is_dictionary(column.type):
        return None
    encoded = column.combine_chunks()
    codes = encoded.indices.drop_null().to_numpy()
    counts = np.bincount(codes, minlength=len(encoded.dictionary))
    words = compute.utf8_lower(compute.utf8_trim_whitespace(encoded.dictionary))
    known = ~np.asarray(compute.is_in(words, pyarrow.array(sorted(MISSING))))
    return _Texts(name, encoded, counts * known)


def _like_numbers(name: str, column: Any, share: float) -> _Texts | None:
    """The texts of a column, if at most that share of its cells is not like a number."""
    texts = _texts(name, column)
    if texts is None:
        return None
    numbers = texts.count(LIKE_A_NUMBER, DOTTED_DATE)
    return texts if numbers and numbers >= (1 - share) * texts.counts.sum() else None


def _recognise_signs(
    parsed: list[_Texts], points: bool
) -> tuple[str | None, str | None, tuple[Choice, ...]]:
    """The decimal sign and the one between thousands, if they are certain."""
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
    choices = [Choice("data.thousands", _word(thousands[0]), reason)]
    if decimal == ",":
        choices.append(Choice("data.decimal", "comma", reason))
    return decimal, thousands, tuple(choices)


def _word(sign: str) -> str:
    """How a key names a sign."""
    if sign in SPACES:
        return "space"
    return "apostrophe" if sign in APOSTROPHES else next(w for w, s in SIGNS.items() if s == sign)


def _hints(parsed: list[_Texts]) -> tuple[Choice, ...]:
    """What to name for columns that hold numbers with signs that were not asked for."""
    choices = []
    for texts in parsed:
        for pattern, key in ((COMMA, "decimal"), (GROUPED.format(f"[{GROUP_SIGNS}]"), "thousands")):
            if not texts.count(pattern, "^$" if key == "thousands" else GROUPED.format(",")):
                continue
            example = texts.example(pattern)
            sign = next(iter(re.findall(rf"[{GROUP_SIGNS}]", example)))
            reason = f"column {texts.name!r} holds texts such as {example}; if they are numbers,"
            choices.append(Choice(f"data.{key}", "none", f"{reason} use data.{key}={_word(sign)}"))
            break
    return tuple(choices)
