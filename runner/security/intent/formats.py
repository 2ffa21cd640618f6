"""What the format of a log becomes: for each record one line, and nothing a terminal acts on.

A format is a small program: a number as a character (`%(levelno)c`) or `%n` in a date put out what
no letter of the format shows. So what may be filled in is a known list. The style `{`, which can
walk through objects, Hydra refuses as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from runner.errors import SecurityError

FORMATS = ("format", "fmt")
DATES = ("datefmt", "log_time_format")
ENCODINGS = ("utf-8", "utf8", "ascii", "us-ascii", "latin-1", "latin1", "iso-8859-1")
"""In which no printable character becomes an escape or the end of a line, as in UTF-16 `\\u5b1b`
does; compared as text, since looking one up imports a module.
"""


class _Fields(NamedTuple):
    """`marks` stand for themselves only as part of what is `known`; `shown` names what is not."""

    marks: str
    known: re.Pattern[str]
    shown: re.Pattern[str]
    fix: str


# widths of three digits: a line of a gigabyte is none
STYLES = {
    "%": _Fields(
        "%",
        re.compile(r"%%|%\(\w+\)[#0+ -]*\d{0,3}(?:\.\d{1,3})?[sdifeEgGxX]"),
        re.compile(r"%(?:\([^)]*\))?[#0+ -]*[\d*]*(?:\.[\d*]*)?.?"),
        "write fields as %(message)s, %(lineno)d or %(created).3f, and % as %%",
    ),
    "$": _Fields(
        "$",
        re.compile(r"\$\$|\$[A-Za-z_]\w*|\$\{[A-Za-z_]\w*\}", re.ASCII),
        re.compile(r"\$\{?\w*\}?"),
        "write fields as $message, and $ as $$",
    ),
}
_DATE = _Fields(
    "%",
    re.compile(r"%[-_0^#]?[aAbBcCdDeFfgGhHIjklmMpPrRsSTuUVwWxXyYzZ%]"),
    re.compile(r"%\W?\d*[EO]?.?"),
    "write dates as %Y-%m-%d %H:%M:%S and such, and % as %%",
)


def check_formats(entry: Mapping[Any, Any], where: str) -> None:
    """Raise SecurityError for what a formatter or a handler would put out besides its fields."""
    style = entry.get("style", "%")
    if style not in (*STYLES,):
        raise SecurityError(f"{where}.style: {style!r} is refused: there are % and $")
    for name, value in entry.items():
        key = f"{where}.{name}"
        if name in (*FORMATS, *DATES) and value is not None:
            _check_fields(value, STYLES[style] if name in FORMATS else _DATE, key)
        elif name == "encoding" and value is not None and _spelled(value) not in ENCODINGS:
            raise SecurityError(
                f"{key}: {value!r} is refused: in it letters can become what a terminal would act "
                "on; write utf-8"
            )


def _spelled(encoding: object) -> str:
    return str(encoding).lower().replace("_", "-")


def check_shown(value: object, key: str) -> None:
    """Raise SecurityError for a character that is not shown as itself; a tab is."""
    for letter in str(value):
        if letter != "\t" and not letter.isprintable():
            why = "not be shown but acted on; leave it out"
            if letter in "\r\n":
                why = "begin another line; write one line, a block of YAML as `>-`"
            raise SecurityError(f"{key}: is refused: it holds {ascii(letter)}, which would {why}")


def _check_fields(value: object, fields: _Fields, key: str) -> None:
    if not isinstance(value, str):
        raise SecurityError(f"{key}: {value!r} is refused: it is no text")
    rest = fields.known.sub(lambda found: " " * len(found[0]), value)
    at = next((place for place, letter in enumerate(rest) if letter in fields.marks), None)
    if at is not None:
        shown = fields.shown.match(value, at)
        raise SecurityError(
            f"{key}: {(shown or value[at])[0]!r} is refused: it could become a code or "
            f"another line; {fields.fix}"
        )
