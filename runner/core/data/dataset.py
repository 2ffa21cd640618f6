"""The data set interface of the loader: samples by index, sizes, labels and split indices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.core.findings import Choice
from runner.core.interfaces.batch import Batch, Column, RowNames, Sizes


def class_labels(target: Any, sizes: Sizes) -> np.ndarray | None:
    """Return `target` as a vector if it has one class index per sample, else None."""
    target = np.asarray(target)
    has_classes = sizes.task == "classification" and target.dtype.kind in "iub" and target.ndim == 1
    return target.astype(np.int64, copy=False) if has_classes else None


def has_rare_class(counts: np.ndarray) -> bool:
    """Whether a class has under 5 % of the samples, and under half of an even share."""
    return bool(counts.min() < min(0.05, 0.5 / len(counts)) * counts.sum())


class Dataset(ABC):
    """Map-style data set. `fetch` must be a pure function of its arguments.

    `train` and `validation` are the sample indices of the two splits. With `in_memory` a fetch
    only copies rows, so worker processes would not help.
    """

    sizes: Sizes
    train: np.ndarray  # int64 indices
    validation: np.ndarray
    in_memory: bool = True
    augments: bool = False  # fetch uses its `seeds`
    is_stream: bool = False  # samples have no index; `train` stands for those of the first batch
    sample_seconds: float | None = None  # measured, to fetch one; None: not measured
    choices: tuple[Choice, ...] = ()  # inferred about the data, with reasons
    columns: tuple[Column, ...] = ()  # of a table, as fitted
    target_columns: tuple[Column, ...] = ()  # of a table: how the cells of the target are read
    rows: RowNames = RowNames()  # names of samples in messages
    ids: Mapping[str, Any] = {}  # id columns (NumPy or arrow) that name the samples; no inputs

    def target_key(self) -> str | None:
        """Return the key of the target in samples that are dicts; None for other samples."""
        return None

    def draws_itself(self) -> bool:
        """Whether samples draw from random generators that the data set keeps."""
        return False

    def labels(self) -> np.ndarray | None:
        """Return the class index of every sample, or None if that requires reading each sample."""
        return None

    def class_counts(self) -> np.ndarray | None:
        """Return the number of training samples per class, or None if unknown."""
        labels = self.labels()
        if labels is None or not self.sizes.classes:
            return None
        trained, classes = labels[self.train], self.sizes.classes  # other labels carry no class
        return np.bincount(trained[trained >= 0], minlength=classes)[:classes]

    def match_dtype(self, model: Any) -> tuple[Choice, ...]:
        """Let later fetches return floats in the dtype of the weights; return the choices."""
        return ()

    @abstractmethod
    def fetch(self, indices: np.ndarray, seeds: np.ndarray | None) -> Batch:
        """Return a batch on the CPU. `seeds` (uint64, one per sample) drive augmentation, if given.

        The upper 32 bits of the seeds are the same for a whole epoch (see `order.sample_seeds`).
        Raises DataError naming the file, row or key of a bad sample.
        """


@dataclass(eq=False)
class TensorsDataset(Dataset):
    """In-memory data set of two tensors with the sample as dimension 0, validated at opening."""

    inputs: Tensor
    target: Tensor
    sizes: Sizes
    parts: InitVar[tuple[np.ndarray, np.ndarray]]  # indices of training and validation
    choices: tuple[Choice, ...] = ()
    columns: tuple[Column, ...] = ()  # of the table that the inputs encode
    rows: RowNames = RowNames()
    ignore: str = ""  # config key that leaves out a column; "": none
    ids: Mapping[str, Any] = field(default_factory=dict)  # arrow columns
    target_columns: tuple[Column, ...] = ()

    def __post_init__(self, parts: tuple[np.ndarray, np.ndarray]) -> None:
        self.train, self.validation = parts

    def fetch(self, indices: np.ndarray, seeds: np.ndarray | None) -> Batch:
        """Return copies of the rows `indices`."""
        rows = torch.from_numpy(indices)
        return self.inputs.index_select(0, rows), self.target.index_select(0, rows)

    def labels(self) -> np.ndarray | None:
        """Return the target if it is one class per sample, else None."""
        return class_labels(self.target, self.sizes)

    def named_columns(self) -> tuple[Column, ...]:
        """Return the columns of tabular inputs (unnamed ones as `x[3]`), or () for other inputs."""
        if self.inputs.ndim != 2 or self.inputs.dtype is not torch.float32:
            return ()
        return self.columns or tuple(Column(f"x[{i}]") for i in range(self.inputs.shape[1]))

    def without(
        self, columns: Sequence[int], rows: np.ndarray, choices: Sequence[Choice]
    ) -> TensorsDataset:
        """Return a copy without these columns, and without `rows` in the validation split."""
        named, inputs, sizes = self.named_columns(), self.inputs, self.sizes
        if columns:
            keep = [i not in columns for i in range(len(named))]
            mask = np.repeat(keep, [column.width for column in named])
            inputs, named = inputs[:, torch.from_numpy(mask)], tuple(compress(named, keep))
            sizes = replace(sizes, in_features=inputs.shape[1])
        parts = (self.train, np.setdiff1d(self.validation, rows))
        choices = (*self.choices, *choices)
        return replace(
            self, inputs=inputs, sizes=sizes, parts=parts, choices=choices, columns=named
        )


def fit_scale(x: np.ndarray, train: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation per column over the rows `train`; 1 if constant.

    Only training rows are read, so nothing leaks from the validation split.
    """
    mean, deviation = x[train].mean(axis=0), x[train].std(axis=0)
    # the mean of a constant column has a rounding error, so its deviation would not be exactly 0
    constant = x[train].min(axis=0) == x[train].max(axis=0)
    return np.where(constant, x[train[0]], mean), np.where(constant, 1.0, deviation)


def scale(x: np.ndarray, mean: np.ndarray | float, deviation: np.ndarray | float) -> np.ndarray:
    """Return (x - mean) / deviation as float32."""
    scaled: np.ndarray = ((x - mean) / deviation).astype(np.float32)
    return scaled
