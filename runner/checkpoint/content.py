"""What a checkpoint's state must consist of; checked before any of it is put into a run.

What the parts hold they check when they load it; tensors are held against those of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from runner.errors import CheckpointError

FIX = "name another checkpoint with checkpoint.resume, or start afresh"
STATE: dict[str, type] = {
    **dict.fromkeys(("progress", "update", "reader", "history", "stability"), dict),
    **dict.fromkeys(("random", "settings"), dict),
    **dict.fromkeys(("record", "threads", "steps_per_epoch"), int),
    "config_hash": str,
    "planned": bool,
}
UPDATE: dict[str, type] = {
    "optimizer": dict, "updates": Tensor, "backoff": float, "average": list, "scale": list,
}  # fmt: skip
STEPS = ("step", "skipped", "consecutive_skips", "best_step", "validated_step")


def check_state(state: Any, step: int, where: str) -> None:
    """Raise CheckpointError, naming the part, for what is not the state of a run at that step."""
    problem = (
        _check_types(state, STATE, "state")
        or _check_types(state["update"], UPDATE, "state.update")
        or _check_types(state["progress"], {"step": int}, "state.progress")
        or _check_counts(state, step)
    )
    if problem:
        raise state_error(where, problem)


def state_error(where: str, problem: str) -> CheckpointError:
    """The error for a checkpoint whose files are intact and whose content does not fit."""
    return CheckpointError(f"{where}: is not the state of a run: {problem}; {FIX}")


def _check_types(part: Any, types: Mapping[str, type], where: str) -> str:
    if type(part) is not dict:
        return f"{where} is a {type(part).__name__}, and must be a dict"
    for name, kind in types.items():
        if name not in part:
            return f"{where} has no {name!r}"
        if type(part[name]) is not kind:
            return f"{where}.{name} is a {type(part[name]).__name__}, and must be a {kind.__name__}"
    return ""


def _check_counts(state: Mapping[str, Any], step: int) -> str:
    progress, update = state["progress"], state["update"]
    if progress["step"] != step:
        return f"state.progress.step differs from the manifest's, {step}"
    for name in STEPS:
        value = progress.get(name, 0)
        if type(value) is not int or not 0 <= value <= step:
            return f"state.progress.{name} must be a whole number, 0 to {step}"
    updates = update["updates"]
    if updates.numel() != 1 or updates.is_floating_point() or not 0 <= int(updates) <= step:
        return f"state.update.updates must be a whole number, 0 to {step}"
    if not 0 < update["backoff"] <= 1:
        return f"state.update.backoff is {update['backoff']}, and must be in (0, 1]"
    return ""
