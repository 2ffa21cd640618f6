"""Overrides with names of columns, as they are typed in a shell."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence

from runner.core.record.text import PLAIN_NAME, quote_for_hydra


def quote_name(name: str) -> str:
    """Return the name of a column, quoted for a Hydra override if needed."""
    return name if PLAIN_NAME.fullmatch(name) else quote_for_hydra(name, "double")


def list_value(names: Sequence[str]) -> str:
    """Return names of columns as the value of a Hydra override."""
    return f"[{','.join(map(quote_name, names))}]"


def mapping_value(values: Mapping[str, str]) -> str:
    """Return names of columns and values as the value of an override; both quoted as in YAML."""
    quoted = [
        text if PLAIN_NAME.fullmatch(text) else json.dumps(text, ensure_ascii=False)
        for pair in values.items()
        for text in pair
    ]
    return f"{{{', '.join(map(': '.join, zip(quoted[::2], quoted[1::2], strict=True)))}}}"


def list_override(key: str, names: Sequence[str]) -> str:
    """Return `key=[…]` as it is typed in a shell."""
    text = f"{key}={list_value(names)}"
    return shlex.quote(text) if '"' in text else text


def mapping_override(key: str, values: Mapping[str, str]) -> str:
    """Return `'+key={name: value}'` as it is typed in a shell."""
    return shlex.quote(f"+{key}={mapping_value(values)}")
