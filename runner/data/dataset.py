"""What a data set is to the loader: samples by index, and what it says about itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

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
