"""Reading preprocessing.json: only a run that continues or evaluates another one needs it."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from runner.data.preprocessing import FORMAT, Preprocessing
from runner.errors import CheckpointError


def parse_preprocessing(data: bytes, where: Path) -> Preprocessing:
    """From what `Preprocessing.dump` made; CheckpointError names `where` and what is wrong."""
    try:
        content = json.loads(data)
        if content.get("format") != FORMAT:
            wrong = f"has format {content.get('format')!r}, and {FORMAT} is read"
            raise ValueError(wrong)
        preprocessing: Preprocessing = _typed(Preprocessing, content, "it")
    except (ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{where}: is no preprocessing: {error}") from None
    return preprocessing


def _typed(kind: Any, value: Any, where: str) -> Any:
    """`value` as that type: a dataclass from a dict, a tuple from a list; else a ValueError."""
    if get_origin(kind) is UnionType:
        return None if value is None else _typed(get_args(kind)[0], value, where)
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where} must be a list")
        return tuple(_typed(get_args(kind)[0], item, where) for item in value)
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        # a field that came later has a default
        needed = {f.name for f in fields(kind) if f.default is MISSING}
        if not isinstance(value, dict) or not needed <= value.keys() <= hints.keys():
            raise ValueError(f"{where} must have the keys {sorted(hints)}")
        return kind(**{n: _typed(hints[n], item, f"{where}.{n}") for n, item in value.items()})
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise ValueError(f"{where} must be {kind.__name__}, got {type(value).__name__}")
    return kind(value)
