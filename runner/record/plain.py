"""Values as JSON holds them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from typing import Any, TypeVar

from runner.masking import masked

T = TypeVar("T")


def plain(value: Any) -> Any:
    """Enums as their values, and what JSON has no number for as text."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def finite(value: Any) -> Any:
    """Null for every number that JSON cannot say; keys as text, and no text with a secret."""
    if isinstance(value, dict):
        return {masked(str(key)): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, str):
        return masked(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def made(kind: type[T], values: Mapping[str, Any]) -> T:
    """A dataclass of the keys that it knows; those of a newer version are left out."""
    known = {f.name for f in fields(kind)}  # type: ignore[arg-type]  # a dataclass, each of them
    return kind(**{name: value for name, value in values.items() if name in known})
