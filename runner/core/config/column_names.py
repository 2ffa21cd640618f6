"""Names of columns in overrides, encoded if Hydra cannot read them."""

from __future__ import annotations

import re
from typing import Any

import yaml  # type: ignore[import-untyped]

from runner.core.record.text import PLAIN_NAME, quote_for_hydra
from runner.core.schemas.data import ENCODED_NAME

NAMES_PATTERN = re.compile(
    r"(?P<sign>\+\+|\+|)(?P<key>data\.(?:types|date_formats))"
    r"(?:\.(?P<name>[^=]+))?=(?P<value>.*)",
    re.DOTALL,
)


def encode_names(text: str) -> str:
    """Encode names of columns that Hydra cannot read in a dictionary, or as a part of a key.

    Such a dictionary is read as YAML: `+data.types={"Größe (m²)": number}`.
    """
    match = NAMES_PATTERN.fullmatch(text)
    if match is None:
        return text
    values: Any = {match["name"]: match["value"].strip("'\"")}
    if match["name"] is None:
        try:
            values = yaml.load(match["value"], yaml.BaseLoader)  # noqa: S506  # makes texts only
        except yaml.YAMLError:
            return text
    if not isinstance(values, dict) or not all(isinstance(x, str) for x in values.values()):
        return text
    if "" in values.values():  # such as `{price:number}`: no mapping in YAML, but one in Hydra
        return text
    if match["name"] is None and all(map(PLAIN_NAME.fullmatch, values)):
        return text
    items = list[str]()
    for name, value in values.items():
        if not PLAIN_NAME.fullmatch(name):
            name = ENCODED_NAME + name.encode().hex()
        value = value.strip("'\"")
        items.append(f"{name}: {value if value.isidentifier() else quote_for_hydra(value)}")
    return f"{match['sign'] or '+'}{match['key']}={{{', '.join(items)}}}"
