"""Samples that cannot be used are left out, where `data.bad_samples` is drop."""

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
    """What is left of a batch; one other sample stands in where none is."""

    batch: Batch
    kept: np.ndarray  # indices
    bad: dict[int, str]  # what is wrong with each sample that is left out, by index


def fetch_usable(
    source: Dataset, indices: np.ndarray, seeds: np.ndarray | None, others: np.ndarray
) -> Usable:
    """The batch without its bad samples: a function of the samples and their seeds alone.

    Nothing is remembered, so that it is the same in every process and after every resume. The first
    usable sample of `others` stands in for a batch without any; DataError where there is none.
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
    """What is left of the batch of a key, on the CPU; what a worker process runs.

    The process that trains also keeps here what was left out.
    """

    def __init__(self, source: Dataset, order: BatchSampler) -> None:
        self.source, self.order = source, order
        self.bad: dict[int, str] = {}  # what is wrong with the samples left out so far, by index
        self.last = Usable((None, None), order.indices, {})  # the batch handed over last

    def __call__(self, key: tuple[int, int]) -> Usable:
        """The batch with that number in that epoch."""
        return fetch_usable(self.source, *self.order.batch(*key), self.order.indices)

    def take(self, fetched: Usable) -> Batch:
        """The batch, which is handed over now."""
        self.last = Usable((None, None), fetched.kept, fetched.bad)
        return fetched.batch

    def remaining(self, key: tuple[int, int], indices: np.ndarray) -> np.ndarray:
        """Which of a batch's samples are left; it may be fetched once more for that."""
        last = [*self.last.kept.tolist(), *self.last.bad]
        if sorted(last) == sorted(indices.tolist()):
            return self.last.kept
        return indices if self.bad.keys().isdisjoint(indices.tolist()) else self(key).kept

    def add(self, bad: Mapping[int, str]) -> list[str]:
        """Take note of samples that are left out, and return what is wrong with new ones."""
        new = [index for index in sorted(bad) if index not in self.bad]
        self.bad.update({index: bad[index] for index in new})
        return [bad[index] for index in new]


def lacks_resources(error: Exception) -> bool:
    """Whether the machine lacks memory or descriptors: no fault of what was being read."""
    lacking = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
    return isinstance(error, MemoryError) or getattr(error, "errno", None) in lacking


def examples(problems: Mapping[Any, str]) -> str:
    """What is wrong with the first few."""
    texts = [problems[index] for index in sorted(problems)[:NAMED]]
    more = f"; and {len(problems) - NAMED:,} more" if len(problems) > NAMED else ""
    return "; ".join(texts) + more


def left_out(problems: Mapping[int, str], total: int) -> Choice:
    """What to say of the samples that are left out."""
    return Choice(KEY, f"{len(problems):,} of {total:,} left out", examples(problems))


def check_share(problems: Mapping[Any, str], total: int, config: DataConfig) -> None:
    """Raise DataError where more than `data.most_bad` of the samples cannot be used."""
    if len(problems) > config.most_bad * total:
        count = f"{len(problems):,} of {total:,} samples cannot be used"
        limit = f"more than data.most_bad={config.most_bad:g}"
        raise DataError(f"{count}, {limit}: {examples(problems)}")


def leave_out(
    problems: Mapping[int, str], total: int, config: DataConfig
) -> tuple[np.ndarray, tuple[Choice, ...]]:
    """Which samples remain of data that are read as a whole; DataError unless bad ones may go."""
    if not problems:
        return np.arange(total), ()
    if config.bad_samples is BadSamples.stop:
        raise DataError(examples(problems) + f"; correct them, or {FIX}")
    check_share(problems, total, config)
    return np.delete(np.arange(total), sorted(problems)), (left_out(problems, total),)
