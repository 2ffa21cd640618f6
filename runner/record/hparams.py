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
WORDS = {"null": None, "true": True, "false": False}


def common_columns(settings: Mapping[str, Any]) -> dict[str, Scalar]:
    """The columns of every run; keys without a value have none. `settings` is its config, flat."""
    found = {name: _scalar(settings.get(name)) for name in COLUMNS}
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
        if key in settings or key in typed:
            own = settings[key] if key in settings else typed[key]
            values[key], *known = column_values([own, *domain])
            once = list(dict.fromkeys([*known, values[key]]))
            choices[key] = once if isinstance(once[0], str) else sorted(once)
    return values, choices


def column_values(values: Sequence[Any]) -> list[Scalar]:
    """Values as typed or configured, of one type, as a column has to be: else all are text."""
    parsed = [_parse(value) if isinstance(value, str) else value for value in values]
    scalars = [str(value) if _scalar(value) is None else _scalar(value) for value in parsed]
    kinds = {type(value) if isinstance(value, bool | str) else float for value in scalars}
    if len(kinds) < 2:
        return [value for value in scalars if value is not None]
    return [_as_typed(value) for value in parsed]


def _scalar(value: Any) -> Scalar | None:
    """A value that HParams can hold as it is; None for any other, and for what is not finite."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, bool | int | float | str) else None


def _parse(text: str) -> Any:
    """What was typed on a command line, as it is in the config."""
    bare = text.strip()
    if bare.lower() in WORDS:
        return WORDS[bare.lower()]
    for kind in (int, float):
        try:
            return kind(bare)
        except ValueError:
            continue
    return bare.strip("'\"")


def _as_typed(value: Any) -> str:
    """Text of a value as it would be typed."""
    words = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return words[value]
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
