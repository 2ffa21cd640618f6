"""The scale of numbers to predict: fitted on the training rows, and checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp
from typing import Any

import numpy as np
import torch

from runner.core.errors import ConfigError, DataError
from runner.core.findings import Choice
from runner.core.interfaces.batch import PerTarget, Sizes
from runner.core.schemas.data import TargetTransform

TRANSFORM_KEY = "data.target_transform"
MAX_ROUNDING = 1e-5  # largest rounding error of a target in float32, in standard deviations
LINKS = ("exp", "sigmoid")
"""Functions of a tensor from a model's output to the unit of the targets."""
_TENSORS: dict[tuple[Any, ...], Any] = {}  # of `_per_target`: a copy to the device waits for it


def fit_target_scale(
    target: np.ndarray, train: np.ndarray, transform: TargetTransform | None = None
) -> tuple[dict[str, Any], Choice]:
    """Return what `Sizes` has of the targets over the rows `train`, and the choice.

    Each target of [n, targets] has a scale; targets of more dimensions, such as images, share one.
    """
    if transform is TargetTransform.none:
        return {}, Choice("data.target", "not standardised", f"{TRANSFORM_KEY}=none")
    log = transform is TargetTransform.log
    columns = target_columns(np.log(target[train]) if log else target[train])
    means, deviations = tuple(float(x.mean()) for x in columns), target_deviations(columns)
    what, value = ("log(target)", "logarithm, standardised") if log else ("target", "standardised")
    formula = f"({what} - {means[0]:.4g}) / {deviations[0]:.4g}"
    scale: dict[str, Any] = {"target_mean": means[0], "target_deviation": deviations[0]}
    if len(columns) > 1:
        formula = f"({what} - mean) / deviation, each of {len(columns)} targets by its own"
        scale = {"target_mean": means, "target_deviation": deviations}
    reason = f"the model predicts {formula}: any unit can be learned"
    return {**scale, "log_target": log}, Choice("data.target", value, reason)


def target_columns(target: np.ndarray) -> list[np.ndarray]:
    """Return the parts of targets that have a scale each: the columns of [n, targets], or all."""
    return list(target.T) if target.ndim == 2 else [target]


def target_deviations(columns: Sequence[np.ndarray]) -> tuple[float, ...]:
    """Return the standard deviations; 1 for a constant."""
    return tuple(float(x.std()) or 1.0 for x in columns)


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


def target_array(target: np.ndarray, deviation: PerTarget) -> np.ndarray:
    """Return targets as float32, or as float64 if that would round them visibly.

    Seconds since 1970 have steps of 128 s in float32.
    """
    rounded = target.astype(np.float32)
    errors = np.abs(rounded - np.asarray(target, np.float64))
    is_exact = (errors <= MAX_ROUNDING * np.asarray(deviation)).all()
    return rounded if is_exact else np.array(target, np.float64)


def in_model_unit(sizes: Sizes, target: Any) -> Any:
    """Return a regression's targets, a floating tensor, as the model predicts them."""
    target = target.log() if sizes.log_target else target
    if sizes.target_mean or sizes.target_deviation != 1.0:  # in the target's own precision
        rows = _by_target(sizes, target)
        scaled = rows - _per_target(sizes.target_mean, rows)
        target = (scaled / _per_target(sizes.target_deviation, rows)).reshape(target.shape)
    return target


def in_target_unit(sizes: Sizes, output: Any) -> Any:
    """Return a regression's output, a floating tensor, in the unit of the targets."""
    rows = _by_target(sizes, output)
    scaled = rows * _per_target(sizes.target_deviation, rows)
    values = (scaled + _per_target(sizes.target_mean, rows)).reshape(output.shape)
    if sizes.log_target:
        return values.exp()
    return getattr(values, sizes.link)() if sizes.link in LINKS else values


def _by_target(sizes: Sizes, values: Any) -> Any:
    """Return a tensor as [..., targets] if each has a scale; its numbers are in their order."""
    targets = len(sizes.target_mean) if isinstance(sizes.target_mean, tuple) else 0
    if not targets or values.shape[-1:] == (targets,):
        return values
    if values.numel() % targets:
        problem = f"returns {list(values.shape)}, but the data has {targets} targets a sample"
        raise ConfigError("model", problem, "return a number for each of them")
    return values.reshape(-1, targets)


def _per_target(numbers: PerTarget, values: Any) -> Any:
    """Return the number, or those of several targets as a tensor like `values`, [targets]."""
    if not isinstance(numbers, tuple):
        return numbers
    key = numbers, values.dtype, values.device
    if key not in _TENSORS:
        with torch.inference_mode(False):  # for autograd, too
            tensor = values.new_tensor(numbers)  # host sync: once a device and precision
        if type(tensor) is not torch.Tensor:  # of a trace
            return tensor
        _TENSORS[key] = tensor
    return _TENSORS[key]


def target_center(sizes: Sizes, values: Any = None) -> Any:
    """Return the mean of the targets in their unit; of logarithms the geometric one.

    A number, or for several targets a tensor like `values`.
    """
    mean = _per_target(sizes.target_mean, values)
    if not sizes.log_target:
        return mean
    return mean.exp() if isinstance(sizes.target_mean, tuple) else exp(mean)


def target_spread(sizes: Sizes, values: Any = None) -> Any:
    """Return the targets' deviation in their unit, near the center for logarithms.

    A number, or for several targets a tensor like `values`.
    """
    deviation = _per_target(sizes.target_deviation, values)
    return deviation * (target_center(sizes, values) if sizes.log_target else 1.0)
