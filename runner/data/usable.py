"""Dropping of bad samples, with `data.bad_samples=drop`."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from runner.data.batch import Batch
from runner.data.config import BadSamples, DataConfig
from runner.errors import BadSample, DataError
from runner.techniques.base import Choice

if TYPE_CHECKING:
    from runner.data.dataset import Dataset
    from runner.data.order import BatchSampler

KEY = "data.bad_samples"
FIX = f"use {KEY}=drop"
NAMED = 5  # samples, in a message


@dataclass(frozen=True)
class Usable:
    """A batch without its bad samples; if all are bad, one other sample stands in."""

    batch: Batch
    kept: np.ndarray  # indices
    bad: dict[int, str]  # problem of each dropped sample, by index


def fetch_usable(
    source: Dataset, indices: np.ndarray, seeds: np.ndarray | None, others: np.ndarray
) -> Usable:
    """Fetch a batch without its bad samples, as a pure function of samples and seeds.

    It keeps no state, so every process and every resumed run gets the same batch. The first usable
    sample of `others` stands in if all are bad; DataError if there is none.
    """
    places, bad = np.arange(len(indices)), dict[int, str]()
    while len(places):
        kept = indices[places]
        try:
            batch = source.fetch(kept, None if seeds is None else seeds[places])
            return Usable(batch, kept, bad)
        except BadSample as error:
            bad[int(kept[error.place])] = error.problem
            places = np.delete(places, error.place)
    unusable = dict[int, str]()
    for other in others.tolist():
        try:
            return Usable(source.fetch(np.array([other]), None), indices[:0], bad)
        except BadSample as error:
            unusable[other] = error.problem
    raise DataError(f"none of {len(others):,} samples can be used: {examples(unusable)}")


class UsableFetch:
    """Fetches the batch of a key without bad samples, on the CPU; worker processes run it.

    In the training process it also records the dropped samples.
    """

    def __init__(self, source: Dataset, order: BatchSampler) -> None:
        self.source, self.order = source, order
        self.bad: dict[int, str] = {}  # problem of each sample dropped so far, by index
        self.last = Usable((None, None), order.indices, {})  # the last batch, without its tensors

    def __call__(self, key: tuple[int, int]) -> Usable:
        """Return the batch of `key`: (epoch, number in the epoch)."""
        return fetch_usable(self.source, *self.order.batch(*key), self.order.indices)

    def take(self, fetched: Usable) -> Batch:
        """Record which samples of `fetched` were kept, and return its batch."""
        self.last = Usable((None, None), fetched.kept, fetched.bad)
        return fetched.batch

    def remaining(self, key: tuple[int, int], indices: np.ndarray) -> np.ndarray:
        """Return the usable ones of `indices`, the samples of batch `key`; may fetch it again."""
        last = [*self.last.kept.tolist(), *self.last.bad]
        if sorted(last) == sorted(indices.tolist()):
            return self.last.kept
        return indices if self.bad.keys().isdisjoint(indices.tolist()) else self(key).kept

    def add(self, bad: Mapping[int, str]) -> list[str]:
        """Record dropped samples, and return the problems of those that are new."""
        new = [index for index in sorted(bad) if index not in self.bad]
        self.bad.update({index: bad[index] for index in new})
        return [bad[index] for index in new]


def lacks_resources(error: Exception) -> bool:
    """Whether the error is a lack of memory or file descriptors, not a fault of the data."""
    lacking = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
    return isinstance(error, MemoryError) or getattr(error, "errno", None) in lacking


def examples(problems: Mapping[Any, str]) -> str:
    """Return the first NAMED problems and the number of further ones, as one text."""
    texts = [problems[index] for index in sorted(problems)[:NAMED]]
    more = f"; and {len(problems) - NAMED:,} more" if len(problems) > NAMED else ""
    return "; ".join(texts) + more


def left_out(problems: Mapping[int, str], total: int) -> Choice:
    """Return the choice that reports the dropped samples."""
    return Choice(KEY, f"{len(problems):,} of {total:,} left out", examples(problems))


def check_share(problems: Mapping[Any, str], total: int, config: DataConfig) -> None:
    """Raise DataError if more than the share `data.most_bad` of the samples is bad."""
    if len(problems) > config.most_bad * total:
        count = f"{len(problems):,} of {total:,} samples cannot be used"
        limit = f"more than data.most_bad={config.most_bad:g}"
        raise DataError(f"{count}, {limit}: {examples(problems)}")


def leave_out(
    problems: Mapping[int, str], total: int, config: DataConfig
) -> tuple[np.ndarray, tuple[Choice, ...]]:
    """Return the indices of usable samples; DataError if bad ones may not be dropped."""
    if not problems:
        return np.arange(total), ()
    if config.bad_samples is BadSamples.stop:
        raise DataError(examples(problems) + f"; correct them, or {FIX}")
    check_share(problems, total, config)
    return np.delete(np.arange(total), sorted(problems)), (left_out(problems, total),)
