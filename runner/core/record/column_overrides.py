"""Overrides with names of columns, as they are typed in a shell."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence

from runner.core.record.text import PLAIN_NAME, quote_for_hydra


def list_value(names: Sequence[str]) -> str:
    """Return names of columns as the value of a Hydra override, quoted if needed."""
    quoted = [n if PLAIN_NAME.fullmatch(n) else quote_for_hydra(n, "double") for n in names]
    return f"[{','.join(quoted)}]"


def list_override(key: str, names: Sequence[str]) -> str:
    """Return `key=[…]` as it is typed in a shell."""
    text = f"{key}={list_value(names)}"
    return shlex.quote(text) if '"' in text else text


def mapping_override(key: str, values: Mapping[str, str]) -> str:
    """Return `'+key={name: value}'` as it is typed in a shell; both are quoted as in YAML."""
    quoted = [
        text if PLAIN_NAME.fullmatch(text) else json.dumps(text, ensure_ascii=False)
        for pair in values.items()
        for text in pair
    ]
    pairs = ", ".join(map(": ".join, zip(quoted[::2], quoted[1::2], strict=True)))
    return shlex.quote(f"+{key}={{{pairs}}}")
