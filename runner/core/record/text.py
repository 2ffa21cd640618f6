"""Prepare text for terminals, JSON, shells and Hydra; describe errors in one line."""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from traceback import walk_tb
from types import FrameType, NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from runner.core.errors import RunnerError, error_text
from runner.core.masking import mask_secrets

T = TypeVar("T")
LONGEST_TEXT = 4000  # characters of a message, a name or a cell that is written or shown
LONGEST_TRACE = 40_000  # of a traceback, and of a document's block
_types = cache(get_type_hints)  # cached, since a comparison reads hundreds of records

CONTROL = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Line ends, terminal control characters, bidirectional marks, and lone surrogates."""
INTERPOLATION = re.compile(r"(\\*)\$\{")
UNQUOTED = re.compile(r"[A-Za-z0-9_./:+-]+")  # needs no quoting in Hydra or a shell
PLAIN_NAME = re.compile(r"(?!(?i:null|true|false|nan|inf)$)[A-Za-z_]\w*", re.ASCII)
"""A name that needs no quotes in Hydra's lists and dictionaries."""
WORKING_FOLDER_REMOVED = "the working folder was removed: change to one that exists"
LIBRARY_PACKAGES = sys.stdlib_module_names | {"runner", "torch"}
INSTALLED_PREFIXES = tuple({sysconfig.get_path(kind) + os.sep for kind in ("purelib", "platlib")})


def escape_control_chars(text: str) -> str:
    """Escape control characters, line ends and direction marks; returns one line."""
    return CONTROL.sub(_escape, text)


def escape_lines(text: str) -> str:
    """Escape control characters, but keep line ends and tabs."""
    return CONTROL.sub(lambda match: match[0] if match[0] in "\n\t" else _escape(match), text)


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape", "surrogatepass").decode()


def shorten(text: str, max_chars: int) -> str:
    """Join `text` to one line; beyond `max_chars` cut it between words, with ` …`."""
    words = " ".join(mask_secrets(text).split())  # first: a part of a secret is not recognised
    if len(words) <= max_chars:
        return words
    return f"{words[:max_chars].rpartition(' ')[0] or words[:max_chars]} …"


def limit_length(text: str, max_chars: int = LONGEST_TEXT) -> str:
    """Return the text; if it is longer, only its beginning and end, masked before it is cut."""
    if len(text) <= max_chars:
        return text
    text, half = mask_secrets(text), max_chars // 2
    left_out = f"{len(text) - 2 * half:,} characters left out"
    return f"{text[:half]} … ({left_out}) … {text[-half:]}"


def describe_error(error: BaseException) -> tuple[str, str, int]:
    """Return an error in one line with its notes, and the file and line of its cause.

    That is the innermost frame of user code (not torch, Python or this package), preferably of code
    that is not installed; without one, the frame that raised the error.
    """
    file, line = innermost_user_line(list(walk_tb(error.__traceback__)))
    first = str(error).partition("\n")[0] if isinstance(error, RunnerError) else _name_error(error)
    folder_note = [WORKING_FOLDER_REMOVED] if is_working_folder_removed(error) else []
    text = "; ".join([first, *folder_note, *getattr(error, "__notes__", [])])
    return limit_length(" ".join(text.split())), file, line


def innermost_user_line(frames: list[tuple[FrameType, int]]) -> tuple[str, int]:
    """Return file and line of the last frame of user code; without one, of the last frame."""
    # by module name, since generated torch code lies in a cache folder
    user_frames = [row for row in frames if _top_package(row[0]) not in LIBRARY_PACKAGES]
    project = [r for r in user_frames if not _source_file(r[0]).startswith(INSTALLED_PREFIXES)]
    frame, line = (project or user_frames or frames)[-1]
    return _source_file(frame), line


def is_working_folder_removed(error: BaseException) -> bool:
    """Whether an error without a file name is due to the current folder, which does not exist."""
    try:
        return isinstance(error, OSError) and error.filename is None and not os.getcwd()
    except FileNotFoundError:
        return True


def summarize_error(error: BaseException) -> str:
    """Return type and message on one line; for a SystemExit also where it was raised."""
    if isinstance(error, RunnerError):
        return limit_length(str(error).partition("\n")[0])
    if isinstance(error, SystemExit) and error.__traceback__ is not None:
        return "{} ({}:{})".format(*describe_error(error))
    return _name_error(error)


def _name_error(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"user code called sys.exit({shorten(repr(error.code), 100)})"
    return limit_length(" ".join(error_text(error).split()))


def _top_package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def _source_file(frame: FrameType) -> str:
    return frame.f_code.co_filename


def quote_for_hydra(text: str, mark: str = "single") -> str:
    """Quote text so that Hydra reads it literally; `mark` is `single` or `double`.

    Backslashes are escapes in Hydra only before a quote, and in OmegaConf only before `${`.
    """
    from hydra.core.override_parser.types import Quote, QuotedString

    literal = INTERPOLATION.sub(r"\1\1\\${", text)
    return QuotedString(literal, Quote[mark]).with_quotes()


def value_for_hydra(value: Any) -> str:
    """Return a plain value of a config as the value of a Hydra override; interpolations stay."""
    from hydra.core.override_parser.types import Quote, QuotedString

    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{value_for_hydra(x)}' for key, x in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(value_for_hydra, value))}]"
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, str):
        return QuotedString(value, Quote.single).with_quotes()
    return "null" if value is None else str(value)


def quote_for_shell(key: str, value: object) -> str:
    """Return `key=value`, quoted for a shell if needed."""
    text = str(value)
    if UNQUOTED.fullmatch(text):
        return f"{key}={text}"
    return shlex.quote(f"{key}={quote_for_hydra(text, 'double')}")


def resume_argument(folder: Path) -> str:
    """Return the override that resumes the run in `folder`."""
    return quote_for_shell("checkpoint.resume", folder)


def json_safe(value: Any, nonfinite: Callable[[float], Any] = lambda number: None) -> Any:
    """Convert a value for JSON: enums to their values, keys to text; secrets are masked.

    NaN and Inf become `nonfinite(number)`: null by default, their names with `str`.
    """
    if isinstance(value, dict):
        return {mask_secrets(str(key)): json_safe(item, nonfinite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item, nonfinite) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str):
        return mask_secrets(value)
    return nonfinite(value) if isinstance(value, float) and not math.isfinite(value) else value


def dataclass_from_json(kind: type[T], values: Mapping[str, Any], path: str = "") -> T:
    """Build a dataclass from JSON, without unknown keys (newer versions).

    Raises ValueError or TypeError naming the value that does not fit its type.
    """
    hints, field_names = _types(kind), {f.name for f in fields(kind)}  # type: ignore[arg-type]
    known = {name: value for name, value in values.items() if name in field_names}
    return kind(**{name: _convert(hints[name], x, f"{path}{name}") for name, x in known.items()})


def _convert(kind: Any, value: Any, path: str) -> Any:
    """Convert `value` to the field's type; null in a float field becomes NaN."""
    inner, shape = get_args(kind), get_origin(kind) or kind
    if shape is Any:
        return value
    if shape is UnionType:
        optional = value is None and NoneType in inner
        lists = [kind for kind in inner if isinstance(value, list) and get_origin(kind) is tuple]
        return None if optional else _convert((lists or inner)[0], value, path)
    if shape is float and (value is None or type(value) in (int, float)):
        return math.nan if value is None else float(value)
    if is_dataclass(kind) and isinstance(value, dict):
        return dataclass_from_json(kind, value, f"{path}.")  # type: ignore[arg-type]  # a class, no instance
    if shape is tuple and inner[-1] is ... and isinstance(value, list):
        return tuple(_convert(inner[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if shape is tuple and isinstance(value, list) and len(value) == len(inner):
        low, high = (_convert(inner[0], item, path) for item in value)
        return low, math.inf if math.isnan(high) else high  # null: an unbounded interval
    if shape is list and isinstance(value, list):
        return [_convert(inner[0], item, f"{path}[{i}]") for i, item in enumerate(value)]
    if shape is dict and isinstance(value, dict):
        return {key: _convert(inner[1], item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(shape, type) and issubclass(shape, Enum):
        return shape(value)
    if type(value) is shape and shape in (bool, int, str):
        return value
    raise ValueError(f"{path} is {str(value)[:40]!r}")
