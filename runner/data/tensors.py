"""A data set that is whole in memory as tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.data.batch import Batch, Column, RowNames, Sizes
from runner.data.dataset import Dataset, class_labels
from runner.techniques.base import Choice


class Tensors(Dataset):
    """Inputs and targets as two tensors, the sample first. What can be checked was, at opening."""

    def __init__(
        self,
        inputs: Tensor,
        target: Tensor,
        sizes: Sizes,
        parts: tuple[np.ndarray, np.ndarray],
        choices: tuple[Choice, ...] = (),
        columns: tuple[Column, ...] = (),  # what the inputs are made of, where that has names
        rows: RowNames | None = None,
        ignore: str = "",  # the key that leaves out a column, where there is one
        ids: Mapping[str, Any] | None = None,  # arrow columns
    ) -> None:
        self.inputs, self.target, self.sizes, self.choices = inputs, target, sizes, choices
        self.train, self.validation = parts
        self.columns, self.rows, self.ignore = columns, rows or RowNames(), ignore
        self.ids = ids or {}

    def fetch(self, indices: np.ndarray, seeds: np.ndarray | None) -> Batch:
        """A copy of the rows."""
        rows = torch.from_numpy(indices)
        return self.inputs.index_select(0, rows), self.target.index_select(0, rows)

    def labels(self) -> np.ndarray | None:
        """The target, where it is a class."""
        return class_labels(self.target, self.sizes)

    def named_columns(self) -> tuple[Column, ...]:
        """The columns, if the samples are rows of a table; `x[3]` where they have no name."""
        if self.inputs.ndim != 2 or self.inputs.dtype is not torch.float32:
            return ()
        return self.columns or tuple(Column(f"x[{i}]") for i in range(self.inputs.shape[1]))

    def without(
        self, columns: Sequence[int], rows: np.ndarray, choices: Sequence[Choice]
    ) -> Tensors:
        """The same table without those columns, and without those rows in validation."""
        inputs, sizes, kept = self.inputs, self.sizes, self.named_columns()
        if columns:
            ends = np.cumsum([column.width for column in kept])
            gone = [np.arange(ends[i] - kept[i].width, ends[i]) for i in columns]
            stay = np.delete(np.arange(inputs.shape[1]), np.concatenate(gone))
            inputs = inputs[:, torch.from_numpy(stay)]
            sizes = replace(sizes, in_features=len(stay))
            kept = tuple(column for i, column in enumerate(kept) if i not in set(columns))
        parts = (self.train, np.setdiff1d(self.validation, rows))
        choices = (*self.choices, *choices)
        known = (choices, kept, self.rows, self.ignore, self.ids)
        return Tensors(inputs, self.target, sizes, parts, *known)


def scale_of(target: np.ndarray, train: np.ndarray) -> tuple[float, float, Choice]:
    """The mean and deviation of regression targets over the rows `train`, and what that means."""
    mean, deviation = float(target[train].mean()), float(target[train].std()) or 1.0
    reason = f"the model predicts (target - {mean:.4g}) / {deviation:.4g}: any unit can be learned"
    return mean, deviation, Choice("data.target", "standardised", reason)


def fit_scale(x: np.ndarray, train: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of each column over the rows `train`; of a constant one: itself and 1.

    Only the training rows are looked at, so nothing is learned from those held out.
    """
    mean, deviation = x[train].mean(axis=0), x[train].std(axis=0)
    # the mean of one value a million times is off by a rounding, and so is the deviation from it
    constant = x[train].min(axis=0) == x[train].max(axis=0)
    return np.where(constant, x[train[0]], mean), np.where(constant, 1.0, deviation)


def scale(x: np.ndarray, mean: np.ndarray | float, deviation: np.ndarray | float) -> np.ndarray:
    """(x - mean) / deviation as float32."""
    scaled: np.ndarray = ((x - mean) / deviation).astype(np.float32)
    return scaled
