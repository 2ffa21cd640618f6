"""What a data set is to the loader: samples by index, and what it says about itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.data.batch import Batch, Column, RowNames, Sizes
from runner.techniques.base import Choice


def class_labels(target: Any, sizes: Sizes) -> np.ndarray | None:
    """A target with one class for each sample, as a vector; else None."""
    target = np.asarray(target)
    one_each = sizes.task == "classification" and target.dtype.kind in "iu" and target.ndim == 1
    return target if one_each else None


def has_rare_class(counts: np.ndarray) -> bool:
    """Whether a class has under 5 % of the samples, and under half of an even share."""
    return bool(counts.min() < min(0.05, 0.5 / len(counts)) * counts.sum())


class Dataset(ABC):
    """Samples by index. `fetch` must depend on nothing but its arguments.

    `train` and `validation` are the indices of the two parts; `in_memory` says that a fetch
    is a copy and nothing more, so that worker processes would only add copies.
    """

    sizes: Sizes
    train: np.ndarray  # int64 indices
    validation: np.ndarray
    in_memory: bool = True
    augments: bool = False  # fetch reads the seeds it is given
    sample_seconds: float | None = None  # what one sample took to fetch, where it was measured
    choices: tuple[Choice, ...] = ()  # what was inferred about the data, and from what
    columns: tuple[Column, ...] = ()  # of a table, as fitted
    rows: RowNames = RowNames()  # what a message calls a sample
    ids: Mapping[str, Any] = {}  # columns of numpy or arrow that name the samples; not trained on

    def labels(self) -> np.ndarray | None:
        """The class of every sample, where it is known without reading each; else None."""
        return None

    def class_counts(self) -> np.ndarray | None:
        """Training samples of each class; None where `labels` are not known."""
        labels = self.labels()
        if labels is None or not self.sizes.classes:
            return None
        trained = labels[self.train]  # a negative one stands for no class
        return np.bincount(trained[trained >= 0], minlength=self.sizes.classes)

    def match_dtype(self, model: Any) -> tuple[Choice, ...]:
        """Return floats of the dtype of the model's weights from now on, and say so."""
        return ()

    @abstractmethod
    def fetch(self, indices: np.ndarray, seeds: np.ndarray | None) -> Batch:
        """A batch on the CPU. `seeds` (uint64, one per sample) drive augmentation; None: none.

        The upper 32 bits of the seeds are the same for a whole epoch (see `order.sample_seeds`).
        Raises DataError naming the file, row or key of a bad sample.
        """


@dataclass(eq=False)
class Tensors(Dataset):
    """Inputs and targets as two tensors, the sample first. What can be checked was, at opening."""

    inputs: Tensor
    target: Tensor
    sizes: Sizes
    parts: InitVar[tuple[np.ndarray, np.ndarray]]  # of training and validation
    choices: tuple[Choice, ...] = ()
    columns: tuple[Column, ...] = ()  # what the inputs are made of, where that has names
    rows: RowNames = RowNames()
    ignore: str = ""  # the key that leaves out a column, where there is one
    ids: Mapping[str, Any] = field(default_factory=dict)  # arrow columns

    def __post_init__(self, parts: tuple[np.ndarray, np.ndarray]) -> None:
        self.train, self.validation = parts

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
        named, inputs, sizes = self.named_columns(), self.inputs, self.sizes
        if columns:
            stays = [i not in columns for i in range(len(named))]
            mask = np.repeat(stays, [column.width for column in named])
            inputs, named = inputs[:, torch.from_numpy(mask)], tuple(compress(named, stays))
            sizes = replace(sizes, in_features=inputs.shape[1])
        parts = (self.train, np.setdiff1d(self.validation, rows))
        choices = (*self.choices, *choices)
        return replace(
            self, inputs=inputs, sizes=sizes, parts=parts, choices=choices, columns=named
        )


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
