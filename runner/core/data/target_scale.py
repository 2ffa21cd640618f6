"""The scale of numbers to predict: fitted on the training rows, and checks."""

from __future__ import annotations

from collections.abc import Callable
from math import exp
from typing import Any

import numpy as np

from runner.core.errors import ConfigError, DataError
from runner.core.findings import Choice
from runner.core.interfaces.batch import Sizes
from runner.core.schemas.data import TargetTransform

TRANSFORM_KEY = "data.target_transform"
MAX_ROUNDING = 1e-5  # largest rounding error of a target in float32, in standard deviations


def fit_target_scale(
    target: np.ndarray, train: np.ndarray, transform: TargetTransform | None = None
) -> tuple[dict[str, Any], Choice]:
    """Return what `Sizes` has of the targets over the rows `train`, and the choice."""
    if transform is TargetTransform.none:
        return {}, Choice("data.target", "not standardised", f"{TRANSFORM_KEY}=none")
    log = transform is TargetTransform.log
    values = np.log(target[train]) if log else target[train]
    mean, deviation = float(values.mean()), float(values.std()) or 1.0
    what, value = ("log(target)", "logarithm, standardised") if log else ("target", "standardised")
    reason = f"the model predicts ({what} - {mean:.4g}) / {deviation:.4g}: any unit can be learned"
    scale = {"target_mean": mean, "target_deviation": deviation, "log_target": log}
    return scale, Choice("data.target", value, reason)


def check_log_target(target: np.ndarray, row_name: Callable[[int], str]) -> None:
    """Raise DataError, with the row's name, for a target that has no logarithm."""
    rows = np.flatnonzero(~(target.reshape(len(target), -1) > 0).all(1)).tolist()
    if rows:
        value = target.reshape(len(target), -1)[rows[0]].min()
        more = f" ({len(rows):,} rows have none)" if len(rows) > 1 else ""
        problem = f"the target {value:g} has no logarithm{more}"
        fix = f"correct it, or use {TRANSFORM_KEY}=standardise"
        raise DataError(f"{row_name(rows[0])}: {problem}; {fix}")


def check_transform(transform: TargetTransform | None, task: str, reason: str) -> None:
    """Raise ConfigError for a transform of targets that are no numbers."""
    if transform is not None and task != "regression":
        problem = f"{transform.name} is for numbers, but the task is {task} ({reason})"
        fix = "leave it out, or for numbers use data.task=regression"
        raise ConfigError(TRANSFORM_KEY, problem, fix)


def target_array(target: np.ndarray, deviation: float) -> np.ndarray:
    """Return targets as float32, or as float64 if that would round them visibly.

    Seconds since 1970 have steps of 128 s in float32.
    """
    rounded = target.astype(np.float32)
    error = np.abs(rounded - np.asarray(target, np.float64)).max(initial=0.0)
    return rounded if error <= MAX_ROUNDING * deviation else np.array(target, np.float64)


def in_model_unit(sizes: Sizes, target: Any) -> Any:
    """Return a regression's targets, a floating tensor, as the model predicts them."""
    target = target.log() if sizes.log_target else target
    if sizes.target_mean or sizes.target_deviation != 1.0:  # in the target's own precision
        target = (target - sizes.target_mean) / sizes.target_deviation
    return target


def target_center(sizes: Sizes) -> float:
    """Return the mean of the targets in their unit; of logarithms the geometric one."""
    return exp(sizes.target_mean) if sizes.log_target else sizes.target_mean


def target_spread(sizes: Sizes) -> float:
    """Return the targets' deviation in their unit, near the center for logarithms."""
    return sizes.target_deviation * (target_center(sizes) if sizes.log_target else 1.0)
