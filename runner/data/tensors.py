"""A data set that is whole in memory as tensors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from runner.batch import Batch, Sizes
from runner.data.source import Source
from runner.technique import Choice


class Tensors(Source):
    """Inputs and targets as two tensors, the sample first. What can be checked was, at opening."""

    def __init__(
        self,
        inputs: Tensor,
        target: Tensor,
        sizes: Sizes,
        parts: tuple[np.ndarray, np.ndarray],
        choices: tuple[Choice, ...] = (),
    ) -> None:
        self.inputs, self.target, self.sizes, self.choices = inputs, target, sizes, choices
        self.train, self.validation = parts

    def fetch(self, indices: np.ndarray, seeds: np.ndarray | None) -> Batch:
        """A copy of the rows."""
        rows = torch.from_numpy(indices)
        return self.inputs.index_select(0, rows), self.target.index_select(0, rows)


def scale_of(target: np.ndarray, train: np.ndarray) -> tuple[float, float, Choice]:
    """The mean and deviation of regression targets over the rows `train`, and what that means."""
    mean, deviation = float(target[train].mean()), float(target[train].std()) or 1.0
    reason = f"the model predicts (target - {mean:.4g}) / {deviation:.4g}: any unit can be learned"
    return mean, deviation, Choice("data.target", "standardised", reason)


def standardise(x: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Columns with mean 0 and standard deviation 1 over the rows `train`, as float32.

    Only the training rows are looked at, so nothing is learned from those held out. A column that
    is constant there becomes 0 there.
    """
    mean, deviation = x[train].mean(axis=0), x[train].std(axis=0)
    deviation[deviation == 0] = 1.0
    scaled: np.ndarray = ((x - mean) / deviation).astype(np.float32)
    return scaled
