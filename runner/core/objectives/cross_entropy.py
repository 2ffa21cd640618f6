"""Cross-entropy and focal loss over class indices, and the weight of their mean."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from runner.core.errors import ConfigError, DataError, UsageError
from runner.core.interfaces.nested import DeferredLogits

NO_IGNORED_INDEX = -(2**31)  # never a target; torch's default would silently drop every -100


class CrossEntropy:
    """Mean loss over the targets that are not `ignore_index`, weighted by class.

    Targets of blended samples are class shares, float [n, classes]. With `ignore_index` None all
    targets count, so their number follows from the shape. `gamma` selects the focal loss,
    (1 - p)^gamma times the cross-entropy -log p (Lin et al. 2017, arXiv:1708.02002).
    """

    def __init__(
        self,
        ignore_index: int | None = -100,
        label_smoothing: float = 0.0,
        class_weights: Tensor | None = None,
        gamma: float | None = None,
    ) -> None:
        self.class_weights, self.gamma = class_weights, gamma
        self.ignore_index = ignore_index
        self.loss_ignore_index = NO_IGNORED_INDEX if ignore_index is None else ignore_index
        self.label_smoothing = label_smoothing

    def mean(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss, 0-d; NaN with gradients of 0 if all targets are ignored.

        `logits` [n, classes, …], `target` [n, …]. Raises a UsageError that names the problem.
        """
        try:
            if self.gamma is not None:
                return self._mean_focal(logits, target)
            weights = self.class_weights
            if target.is_floating_point() and target.shape == logits.shape:  # class shares
                return self._mean_soft(logits, target)
            return F.cross_entropy(
                logits,
                target,
                weight=None if weights is None else weights.to(logits.dtype),
                ignore_index=self.loss_ignore_index,
                label_smoothing=self.label_smoothing,
            )
        except (IndexError, RuntimeError, ValueError) as error:
            if (problem := self.find_problem(logits.shape, target)) is None:
                raise
            raise problem from error

    def mean_deferred(self, logits: DeferredLogits, target: Tensor) -> Tensor:
        """Return the mean loss over deferred logits; `target` has their leading shape."""
        # imported only where logits are deferred
        from runner.core.objectives.chunked_cross_entropy import mean_cross_entropy

        try:
            return mean_cross_entropy(logits, target, self.loss_ignore_index)
        except (IndexError, RuntimeError, ValueError) as error:
            rows = torch.Size((target.numel(), logits.shape[-1]))
            if (problem := self.find_problem(rows, target.flatten())) is None:
                raise
            raise problem from error

    def per_target(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the unweighted loss of each target, 0 for ignored ones."""
        loss = F.cross_entropy(
            logits,
            target,
            reduction="none",
            ignore_index=self.loss_ignore_index,
            label_smoothing=self.label_smoothing,
        )
        if self.gamma is None:
            return loss
        # at p = 1 the derivative of a power below 1 is infinite
        return (-torch.expm1(-loss)).clamp_min(1e-12) ** self.gamma * loss

    def _mean_soft(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross-entropy with class shares as targets."""
        weights = self.class_weights
        loss = F.cross_entropy(
            logits,
            target.to(logits.dtype),
            weight=None if weights is None else weights.to(logits.dtype),
            label_smoothing=self.label_smoothing,
            reduction="mean" if weights is None else "sum",
        )
        return loss if weights is None else loss / (target @ weights).sum()

    def _mean_focal(self, logits: Tensor, target: Tensor) -> Tensor:
        losses, weights = self.per_target(logits, target), self._target_weights(target)
        total = weights.sum()
        mean = (losses * weights.to(losses.dtype)).sum() / torch.where(total > 0, total, 1)
        return torch.where(total > 0, mean, torch.nan)

    def _target_weights(self, target: Tensor) -> Tensor:
        """Return the weight of each target, 0 for ignored ones."""
        mask = self.valid_mask(target)
        if self.class_weights is None:
            return mask
        return self.class_weights[torch.where(mask, target, 0).long()] * mask

    def weight(self, target: Tensor) -> Tensor | int:
        """Return the number of targets or the sum of their weights, a tensor if on the device."""
        if target.is_floating_point():  # shares of classes
            weights = self.class_weights
            return len(target) if weights is None else (target @ weights).sum()
        if self.class_weights is not None:
            return self._target_weights(target).sum()
        if self.ignore_index is None:
            return target.numel()
        return (target != self.ignore_index).sum()

    def valid_mask(self, target: Tensor) -> Tensor:
        """Return a boolean mask of the targets that are not ignored."""
        if self.ignore_index is None:
            return torch.ones_like(target, dtype=torch.bool)
        return target != self.ignore_index

    def find_problem(self, shape: torch.Size, target: Tensor) -> UsageError | None:
        """Return the error for shapes or values that torch refused, or None if they are valid."""
        if target.is_floating_point() or target.dtype is torch.bool:
            return DataError(f"targets must be class indices (int64), got {target.dtype}")
        if len(shape) < 2 or shape[:1] + shape[2:] != target.shape:
            problem = f"returns {list(shape)} for targets of {list(target.shape)}"
            return ConfigError("model", problem, "return a row of logits per target")
        if target.dtype not in (torch.int64, torch.uint8):
            return DataError(f"targets must be int64, got {target.dtype}")
        if target.device.type != "cpu":  # unreadable after a failed device assertion
            return None
        invalid = target[self.valid_mask(target) & ((target < 0) | (target >= shape[1]))]
        if not invalid.numel():
            return None
        value = int(invalid[0])
        fix = f"; if it means 'no target', set objective.ignore_index={value}" * (value < 0)
        return DataError(f"target {value} is out of range: classes are 0 to {shape[1] - 1}{fix}")
