"""What of a run's config gets a column in TensorBoard's HParams, and which filters have boxes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

Scalar = bool | int | float | str

COLUMNS = (
    "seed",
    "data.kind",
    "model.kind",
    "model.width",
    "model.depth",
    "model.dropout",
    "optimization.level",
    "optimizer.name",
    "optimizer.lr",
    "optimizer.weight_decay",
    "optimizer.ema",
    "schedule.kind",
    "schedule.warmup",
    "stability.clip_norm",
    "training.batch_size",
    "training.micro_batch",
)
"""Of the whole config, what gets a column; the rest is in the Text tab."""
SHOWN_FIRST = (
    "data.kind",
    "model.kind",
    "optimization.level",
    "optimizer.lr",
    "training.batch_size",
)
NULL = "null"


def common_columns(settings: Mapping[str, Any]) -> dict[str, Scalar]:
    """The columns of every run; keys without a value have none. `settings` is its config, flat."""
    found = {name: scalar(settings[name]) for name in COLUMNS if settings.get(name) is not None}
    return {name: value for name, value in found.items() if value is not None}


def swept_columns(
    settings: Mapping[str, Any], typed: Mapping[str, str], domains: Mapping[str, Sequence[Any]]
) -> tuple[dict[str, Scalar], dict[str, list[Scalar]]]:
    """The columns of the keys in `domains`, and every value that each of them can have.

    A key that is no setting is a group, such as `optimization`; its value is what was `typed`.
    """
    values: dict[str, Scalar] = {}
    choices: dict[str, list[Scalar]] = {}
    for key, domain in domains.items():
        if key in settings:
            own = column_value(settings[key])
        elif key in typed:
            own = column_value(parse_value(typed[key]))
        else:
            continue
        known = [
            column_value(parse_value(item) if isinstance(item, str) else item) for item in domain
        ]
        own, *known = unify_types([own, *known])
        values[key] = own
        choices[key] = unique_sorted([*known, own])
    return values, choices


def scalar(value: Any) -> Scalar | None:
    """A value that HParams can hold as it is; None for any other, and for what is not finite."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, bool | int | float | str) else None


def column_value(value: Any) -> Scalar:
    """The same where there must be a value: `null`, or the text of it, in its place."""
    found = scalar(value)
    if found is not None:
        return found
    return NULL if value is None else str(value)


def parse_value(text: str) -> Any:
    """What was typed on a command line, as it is in the config."""
    bare = text.strip()
    words = {"null": None, "true": True, "false": False}
    if bare.lower() in words:
        return words[bare.lower()]
    for kind in (int, float):
        try:
            return kind(bare)
        except ValueError:
            continue
    return bare.strip("'\"")


def unify_types(values: Sequence[Scalar]) -> list[Scalar]:
    """The same values; all as text where not all are of one kind, as a column has to be."""
    kinds = {bool if isinstance(v, bool) else str if isinstance(v, str) else float for v in values}
    if len(kinds) < 2:
        return list(values)
    return [_text(value) for value in values]


def _text(value: Scalar) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def unique_sorted(values: Sequence[Scalar]) -> list[Scalar]:
    """Each value once: numbers by size, words as they came. All have to be of one kind."""
    once = list(dict.fromkeys(values))
    numbers = [value for value in once if not isinstance(value, str)]
    return once if len(numbers) < len(once) else [*sorted(numbers)]
