"""Dropping of bad samples, with `data.bad_samples=drop`."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from runner.core.data.dataset import Dataset
from runner.core.data.order import BatchSampler
from runner.core.errors import BadSample, DataError
from runner.core.findings import Choice
from runner.core.interfaces.batch import Batch
from runner.core.schemas.data import BadSamples, DataConfig

BAD_SAMPLES_KEY = "data.bad_samples"
DROP_FIX = f"use {BAD_SAMPLES_KEY}=drop"
MAX_EXAMPLES = 5  # samples, in a message


@dataclass(frozen=True)
class UsableBatch:
    """A batch without its bad samples; if all are bad, one other sample stands in."""

    batch: Batch
    indices: np.ndarray  # of its samples, in the data set
    bad: dict[int, str]  # problem of each dropped sample, by index


def fetch_usable(
    source: Dataset, indices: np.ndarray, seeds: np.ndarray | None, others: np.ndarray
) -> UsableBatch:
    """Fetch a batch without its bad samples, as a pure function of samples and seeds.

    It keeps no state, so every process and every resumed run gets the same batch. The first usable
    sample of `others` stands in if all are bad; DataError if there is none.
    """
    positions, bad = np.arange(len(indices)), dict[int, str]()
    while len(positions):
        remaining = indices[positions]
        try:
            batch = source.fetch(remaining, None if seeds is None else seeds[positions])
            return UsableBatch(batch, remaining, bad)
        except BadSample as error:
            bad[int(remaining[error.batch_index])] = error.problem
            positions = np.delete(positions, error.batch_index)
    unusable = dict[int, str]()
    for other in others.tolist():
        try:
            return UsableBatch(source.fetch(np.array([other]), None), indices[:0], bad)
        except BadSample as error:
            unusable[other] = error.problem
    raise DataError(f"none of {len(others):,} samples can be used: {examples(unusable)}")


class UsableFetch:
    """Fetches batches without bad samples; in the training process it also records those."""

    def __init__(self, source: Dataset, order: BatchSampler) -> None:
        self.source, self.order = source, order
        self.bad: dict[int, str] = {}  # problem of each sample dropped so far, by index
        self.last = UsableBatch((None, None), order.indices, {})  # without the batch's tensors

    def __call__(self, key: tuple[int, int]) -> UsableBatch:
        """Return the batch of `key`: (epoch, number in the epoch)."""
        return fetch_usable(self.source, *self.order.batch(*key), self.order.indices)

    def record_batch(self, fetched: UsableBatch) -> Batch:
        """Record which samples of `fetched` were kept, and return its batch."""
        self.last = UsableBatch((None, None), fetched.indices, fetched.bad)
        return fetched.batch

    def usable_among(self, key: tuple[int, int], indices: np.ndarray) -> np.ndarray:
        """Return the usable ones of `indices`, the samples of batch `key`; may fetch it again."""
        last = [*self.last.indices.tolist(), *self.last.bad]
        if sorted(last) == sorted(indices.tolist()):
            return self.last.indices
        return indices if self.bad.keys().isdisjoint(indices.tolist()) else self(key).indices

    def add(self, bad: Mapping[int, str]) -> list[str]:
        """Record dropped samples, and return the problems of those that are new."""
        new = [index for index in sorted(bad) if index not in self.bad]
        self.bad.update({index: bad[index] for index in new})
        return [bad[index] for index in new]


def lacks_resources(error: Exception) -> bool:
    """Whether the error is a lack of memory or file descriptors, not a fault of the data."""
    lacking = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
    return isinstance(error, MemoryError) or getattr(error, "errno", None) in lacking


def examples(problems: Mapping[Any, str], most: int = MAX_EXAMPLES) -> str:
    """Return the first `most` problems and the number of further ones, as one text."""
    texts = [problems[index] for index in sorted(problems)[:most]]
    more = f"; and {len(problems) - most:,} more" if len(problems) > most else ""
    return "; ".join(texts) + more


def left_out(problems: Mapping[int, str], total: int) -> Choice:
    """Return the choice that reports the dropped samples."""
    value = f"{len(problems):,} of {total:,} left out"
    return Choice(BAD_SAMPLES_KEY, value, examples(problems), is_notice=True)


def check_bad_share(problems: Mapping[Any, str], total: int, config: DataConfig) -> None:
    """Raise DataError if more than the share `data.most_bad` of the samples is bad."""
    if len(problems) > config.most_bad * total:
        count = f"{len(problems):,} of {total:,} samples cannot be used"
        limit = f"more than data.most_bad={config.most_bad:g}"
        fix = "correct them, or raise that limit"
        raise DataError(f"{count}, {limit}: {examples(problems)}; {fix}")


def usable_indices(
    problems: Mapping[int, str], total: int, config: DataConfig
) -> tuple[np.ndarray, tuple[Choice, ...]]:
    """Return the indices of usable samples; DataError if bad ones may not be dropped."""
    if not problems:
        return np.arange(total), ()
    if config.bad_samples is BadSamples.stop:
        raise DataError(examples(problems) + f"; correct them, or {DROP_FIX}")
    check_bad_share(problems, total, config)
    return np.delete(np.arange(total), sorted(problems)), (left_out(problems, total),)
