"""Schema of a checkpoint's state, checked before any of it is restored.

Each part checks its own content when it is loaded, and compares tensors with those of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from runner.core.errors import CheckpointError

STATE: dict[str, type] = {
    **dict.fromkeys(("progress", "update", "reader", "history", "stability"), dict),
    **dict.fromkeys(("random", "settings"), dict),
    **dict.fromkeys(("record", "threads", "steps_per_epoch"), int),
    "config_hash": str,
    "planned": bool,
}
UPDATE_TYPES = {
    "optimizer": dict,
    "updates": Tensor,
    "backoff": float,
    "average": list,
    "scale": list,
}
COUNT_FIELDS = ("step", "skipped", "consecutive_skips", "best_step", "validated_step")


def check_state(state: Any, step: int, where: str) -> None:
    """Raise CheckpointError, naming the part, unless `state` is that of a run at `step`."""
    problem = (
        _check_types(state, STATE, "state")
        or _check_types(state["update"], UPDATE_TYPES, "state.update")
        or _check_numbers(state["progress"], state["update"], step)
    )
    if problem:
        raise state_error(where, problem)


def state_error(where: str, problem: str) -> CheckpointError:
    """Return the error for a checkpoint with intact files and content that does not fit."""
    fix = "name another checkpoint with checkpoint.resume, or start a new run"
    return CheckpointError(f"{where}: is not the state of a run: {problem}; {fix}")


def _check_types(part: Any, types: Mapping[str, type], where: str) -> str:
    for name, kind in types.items():
        value = part.get(name) if type(part) is dict else None
        if type(value) is not kind:
            return f"{where}.{name} must be a {kind.__name__}, got {type(value).__name__}"
    return ""


def _check_numbers(progress: Mapping[str, Any], update: Mapping[str, Any], step: int) -> str:
    updates: Tensor = update["updates"]
    is_integer = updates.numel() == 1 and not updates.is_floating_point()
    counts = {f"progress.{name}": progress.get(name, 0) for name in COUNT_FIELDS}
    counts["update.updates"] = int(updates) if is_integer else None
    if (averaged := update.get("ema_updates")) is not None:  # with a warm-up of the average
        is_count = isinstance(averaged, Tensor) and averaged.dtype is torch.int64
        counts["update.ema_updates"] = int(averaged) if is_count and averaged.ndim == 0 else None
    for name, value in counts.items():
        if type(value) is not int or not 0 <= value <= step:
            return f"state.{name} must be a whole number, 0 to {step}"
    if progress.get("step") != step:
        return f"state.progress.step differs from the manifest's, {step}"
    if not 0 < update["backoff"] <= 1:
        return f"state.update.backoff must be > 0 and ≤ 1, got {update['backoff']}"
    return ""
