"""Regression: one or more numbers per sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from runner.core.data.target_scale import (
    in_model_unit,
    in_target_unit,
    target_center,
    target_spread,
)
from runner.core.errors import ConfigError, DataError, UsageError
from runner.core.interfaces.batch import PerTarget, Sizes
from runner.core.interfaces.objective import Objective
from runner.core.objectives import model_output
from runner.core.schemas.data import CLASS_TARGET_FIX


class RegressionObjective(Objective):
    """MSE, MAE or Huber loss; metrics MSE, MAE, RMSE and R².

    Output and target: [batch] or [batch, targets]. The model predicts (target - mean) / deviation,
    or that of log(target), and the loss is in that unit; other metrics are in the target's unit.
    """

    def __init__(
        self,
        mean: PerTarget = 0.0,
        deviation: PerTarget = 1.0,
        loss: str = "mse",
        delta: float = 1.0,
        log_target: bool = False,
    ) -> None:
        scale = Sizes("regression", target_mean=mean, target_deviation=deviation)
        self.sizes = replace(scale, log_target=log_target)
        losses: dict[str, Callable[..., Tensor]] = {
            "mse": F.mse_loss,
            "mae": F.l1_loss,
            "huber": partial(F.huber_loss, delta=delta),
        }
        self.loss = losses[loss]

    monitor = "val/loss"
    higher_is_better = False
    indices = 0

    def __call__(self, output: Any, target: Any) -> Tensor:
        """Return the mean loss over samples and targets, 0-d."""
        predicted = model_output.logits(output)
        target = self._match_shape(predicted, target)
        return self.loss(predicted, in_model_unit(self.sizes, target).to(predicted.dtype))

    def weight(self, target: Tensor) -> int:
        """Return the number of samples."""
        return target.shape[0]

    def batch_sums(self, output: Any, target: Any) -> dict[str, Tensor]:
        """Return sums per target, in float64: losses, errors, targets, predictions, squares."""
        predicted = model_output.logits(output).detach()
        target = self._match_shape(predicted, target)
        if predicted.device.type == "mps":  # no float64; host sync
            predicted, target = predicted.cpu(), target.cpu()
        scaled = predicted.double().reshape(len(predicted), -1)
        target = target.double().reshape(len(target), -1)
        losses = self.loss(scaled, in_model_unit(self.sizes, target), reduction="none")
        predicted, center = in_target_unit(self.sizes, scaled), target_center(self.sizes, scaled)
        error, target = predicted - target, target - center  # for precise sums of squares
        return {
            "loss": losses.sum(0),
            "count": torch.full((), len(error), dtype=torch.int64, device=error.device),
            "squared_error": error.square().sum(0),
            "absolute_error": error.abs().sum(0),
            "target": target.sum(0),
            "target_squared": target.square().sum(0),
            "prediction": (predicted - center).sum(0),
            "prediction_squared": (predicted - center).square().sum(0),
        }

    def metric_names(self) -> list[str]:
        """Return the names of `metrics`."""
        return ["loss", "mse", "mae", "rmse", "r2"]

    def metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        """Return `loss`, `mse`, `mae`, `rmse`, and `r2`, the mean over the targets that vary."""
        count = model_output.require_count(totals)
        squared_error = totals["squared_error"]
        mse = squared_error.mean().item() / count
        values = {
            "loss": totals["loss"].mean().item() / count,
            "mse": mse,
            "mae": totals["absolute_error"].mean().item() / count,
            "rmse": sqrt(mse),
        }
        squared = totals["target_squared"]
        deviation = squared - totals["target"].square() / count
        # the difference of two large sums, which is a rounding error for a constant target
        varies = deviation > 1e-12 * squared
        if bool(varies.any()):
            values["r2"] = (1 - squared_error / deviation)[varies].mean().item()
        return values

    def has_constant_output(self, totals: dict[str, Tensor], confusion: Tensor | None) -> bool:
        """Whether predictions vary by at most 1e-6 of their size, while a target varies."""
        if "prediction" not in totals:  # the sums of a derived class
            return False
        count = model_output.require_count(totals)

        def is_constant(name: str) -> bool:
            squared = totals[f"{name}_squared"] / count
            variance = squared - (totals[name] / count).square()
            least = target_spread(self.sizes, squared) ** 2
            return bool((variance <= 1e-12 * squared.clamp(min=least)).all())

        return count > 1 and is_constant("prediction") and not is_constant("target")

    def _match_shape(self, predicted: Tensor, target: Tensor) -> Tensor:
        """Return the target in the output's shape: [n] and [n, 1] would broadcast to [n, n]."""
        if target.shape != predicted.shape:
            if not predicted.ndim or not target.numel() == predicted.numel() == predicted.shape[0]:
                raise _mismatch_error(predicted.shape, target)
            target = target.reshape(predicted.shape)
        return target if target.dtype == torch.float64 else target.to(predicted.dtype)


def _mismatch_error(shape: torch.Size, target: Tensor) -> UsageError:
    problem = f"returns {list(shape)} for targets of {list(target.shape)}"
    fix = "return as many numbers a sample as the data has targets (`classes`)"
    one_row_per_target = len(shape) == 2 and shape[0] == target.numel()
    if not (one_row_per_target and target.is_floating_point()):
        return ConfigError("model", problem, fix)
    problem = f"data: the targets are floats, so regression, but the model {problem}"
    return DataError(f"{problem}; if they are classes, {CLASS_TARGET_FIX}; if not, {fix}")
