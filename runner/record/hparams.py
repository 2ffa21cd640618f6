"""What of a run's config gets a column in TensorBoard's HParams."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from typing import Any

Scalar = bool | int | float | str

SHOWN_FIRST = (
    "data.kind",
    "model.kind",
    "optimization.level",
    "optimizer.lr",
    "training.batch_size",
)
COLUMNS = (
    *SHOWN_FIRST,
    "seed",
    "model.width",
    "model.depth",
    "model.dropout",
    "optimizer.name",
    "optimizer.weight_decay",
    "optimizer.ema",
    "schedule.kind",
    "schedule.warmup",
    "stability.clip_norm",
    "training.micro_batch",
)
"""Of the whole config, what always gets a column; the rest is in the Text tab."""
NOT_OF_THE_RUN = ("checkpoint", "hydra", "job", "monitoring", "name", "security", "sweep")


def hparam_columns(
    settings: Mapping[str, Any], typed: Mapping[str, str]
) -> tuple[dict[str, Scalar], list[str]]:
    """The columns of a run's row, and which of them TensorBoard shows first: what was typed.

    `settings` is its config, flat; a key that is no setting is a group, such as `optimization`,
    and has the value that was typed. Keys without a value have no column.
    """
    own = [key for key in typed if key.partition(".")[0] not in NOT_OF_THE_RUN]
    values = {key: _scalar(settings.get(key, typed.get(key))) for key in (*COLUMNS, *own)}
    columns = {key: value for key, value in values.items() if value is not None}
    return columns, [key for key in own if key in columns] or list(SHOWN_FIRST)


def _scalar(value: Any) -> Scalar | None:
    """A value that HParams can hold as it is; None for any other, and for what is not finite."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, bool | int | float | str) else None
