"""Sample order and random seeds as pure functions, without generator state.

All are SplitMix64 hashes (Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195) of a sample's
position, seeded with the numbers that they may depend on. NumPy's generators are not used because
their streams may change between NumPy versions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from runner.core.errors import DataError

# Stream numbers; without them a split and a shuffle with one seed would have the same order.
_SPLIT, _SHUFFLE, _SAMPLE, _EPOCH, _BALANCE = range(5)
_MASK = 0xFFFF_FFFF_FFFF_FFFF

Fold = tuple[int, int]
"""The held-out fold of a cross-validation and the number of folds: (0, 5) is the first of 5."""


def mix(*numbers: int) -> int:
    """Hash integers to one 63-bit seed by SplitMix64's finaliser: neighbours are unrelated."""
    state = 0
    for number in numbers:
        state = (state ^ number) + 0x9E37_79B9_7F4A_7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58_476D_1CE4_E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D0_49BB_1331_11EB & _MASK
        state ^= state >> 31
    return state >> 1


def split(
    n: int, validation: float, split_seed: int, what: str = "the data", fold: Fold | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Split `n` samples; return training and validation indices, each ascending.

    The samples with the smallest hashes are held out: exactly the share `validation`, rounded, and
    a sample added at the end moves few others. Neither part is empty; fewer than two samples are a
    DataError, in which `what` names the data. With `fold`, that fold is held out instead.
    """
    if n < 2:
        raise DataError(f"{what}: {n} samples; training and validation need at least one each")
    held_out = min(max(round(n * validation), 1), n - 1)
    ranked = np.argsort(split_hash(split_seed, np.arange(n)), kind="stable")
    if fold is not None:
        return take_fold(ranked, fold, what)
    return np.sort(ranked[held_out:]), np.sort(ranked[:held_out])


def take_fold(
    ranked: np.ndarray, fold: Fold, what: str = "the data"
) -> tuple[np.ndarray, np.ndarray]:
    """Hold out every k-th of the ranked samples; DataError for fewer samples than folds."""
    number, folds = fold
    if len(ranked) < folds:
        raise DataError(f"{what}: {len(ranked)} samples are too few for data.folds={folds}")
    in_fold = np.arange(len(ranked)) % folds == number
    return np.sort(ranked[~in_fold]), np.sort(ranked[in_fold])


def split_hash(split_seed: int, indices: np.ndarray) -> np.ndarray:
    """Return one uint64 hash per sample; those with the smallest are held out."""
    return splitmix(indices, mix(_SPLIT, split_seed))


def permutation(seed: int, epoch: int, n: int) -> np.ndarray:
    """Return the order of `n` samples in `epoch`, int64. Costs 30 µs for 1,400 samples."""
    return np.argsort(splitmix(np.arange(n), mix(_SHUFFLE, seed, epoch)), kind="stable")


def balanced_order(seed: int, epoch: int, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return `len(labels)` class-balanced indices, and how often each was drawn before in `epoch`.

    Every k consecutive indices have each of the k classes once, in random order. A class is
    traversed in the order of `permutation`, again from its start until the epoch is full.
    """
    n, shuffled = len(labels), permutation(seed, epoch, len(labels))
    grouped = shuffled[np.argsort(labels[shuffled], kind="stable")]
    _, starts, counts = np.unique(labels[grouped], return_index=True, return_counts=True)
    classes = len(counts)
    slots = np.arange(-(-n // classes) * classes)
    drawn = splitmix(slots, mix(_BALANCE, seed, epoch))
    slots = np.lexsort((drawn, slots // classes))[:n]
    cycle, class_index = np.divmod(slots, classes)
    return grouped[starts[class_index] + cycle % counts[class_index]], cycle // counts[class_index]


def sample_seeds(seed: int, epoch: int, indices: np.ndarray) -> np.ndarray:
    """Return one uint64 seed per sample in `epoch`.

    The lower 32 bits depend on (seed, epoch, index) and drive augmentation; the upper 32 depend on
    (seed, epoch), for choices that a whole epoch shares.
    """
    per_sample = splitmix(indices, mix(_SAMPLE, seed, epoch)) & np.uint64(0xFFFF_FFFF)
    seeds: np.ndarray = per_sample | np.uint64((mix(_EPOCH, seed, epoch) & 0xFFFF_FFFF) << 32)
    return seeds


def splitmix(positions: np.ndarray, start: int = 0) -> np.ndarray:
    """SplitMix64 of whole numbers, from a start; uint64."""
    state = positions.astype(np.uint64)
    state *= np.uint64(0x9E37_79B9_7F4A_7C15)
    state += np.uint64(start)
    state ^= state >> np.uint64(30)
    state *= np.uint64(0xBF58_476D_1CE4_E5B9)
    state ^= state >> np.uint64(27)
    state *= np.uint64(0x94D0_49BB_1331_11EB)
    state ^= state >> np.uint64(31)
    return state


class Segment(NamedTuple):
    """The steps with one batch size; a run has several if it was resumed with another one."""

    step: int  # the first, from 0
    epoch: int
    sample: int  # of `epoch`, at which the first step starts
    batch_size: int
    rest: int  # batches in the rest of `epoch`
    batches: int  # in each later epoch
    share: float  # of `epoch` that is over at `sample`

    @classmethod
    def from_list(cls, values: Sequence[float]) -> Segment:
        """Return the segment that a checkpoint holds as a list; ValueError if it is none."""
        counts, share = values[:6], float(values[-1])
        is_whole = all(type(count) is int and count >= 0 for count in counts)
        if len(values) != 7 or not is_whole or 0 in counts[3:] or not 0 <= share < 1:
            raise ValueError("a segment of steps must be six counts and a share")
        step, epoch, sample, batch_size, rest, batches = map(int, counts)
        return cls(step, epoch, sample, batch_size, rest, batches, share)

    def locate(self, step: int) -> tuple[int, int]:
        """Return the epoch of a step's batch, and its number in it (in `epoch`: in its rest)."""
        number = step - self.step
        if number < self.rest:
            return self.epoch, number
        epochs, number = divmod(number - self.rest, self.batches)
        return self.epoch + 1 + epochs, number

    def position(self, step: int) -> tuple[int, int]:
        """Return the epoch of a step's batch, and the sample at which the batch starts."""
        epoch, number = self.locate(step)
        return epoch, number * self.batch_size + (self.sample if epoch == self.epoch else 0)

    def epochs_before(self, step: int) -> float:
        """Return the epochs that are over before a step."""
        number = step - self.step
        if not self.sample:
            return self.epoch + number / self.batches
        if number < self.rest:
            return self.epoch + self.share + (1 - self.share) * number / self.rest
        return self.epoch + 1 + (number - self.rest) / self.batches

    def steps_until(self, epochs: float) -> int:
        """Return the number of steps of a run after which so many epochs are over."""
        if not self.sample:
            return self.step + max(0, round((epochs - self.epoch) * self.batches))
        if epochs >= self.epoch + 1:
            return self.step + self.rest + round((epochs - self.epoch - 1) * self.batches)
        left = (epochs - self.epoch - self.share) / (1 - self.share)
        return self.step + max(0, round(left * self.rest))


@dataclass(eq=False)
class BatchSampler:
    """Sample indices and seeds of the batches of one split, by epoch."""

    indices: np.ndarray
    batch_size: int
    batches: int  # in an epoch
    seed: int
    shuffle: bool
    seeds: bool  # whether the samples get seeds
    labels: np.ndarray | None = None  # of `indices`: draw each class equally often
    rank_slice: Callable[[int], slice] | None = None  # batch size -> the slice of this process
    drop_last: bool = False
    start: tuple[int, int] = (0, 0)  # epoch, and the sample in it at which its batch 0 starts

    def __post_init__(self) -> None:
        self._epoch, self._order, self._repeats = -1, self.indices, np.zeros_like(self.indices)

    def count_batches(self, first: int = 0) -> int:
        """Return the number of batches in an epoch from sample `first` on."""
        left = max(0, len(self.indices) - first)
        return left // self.batch_size if self.drop_last else -(-left // self.batch_size)

    def batch(self, epoch: int, number: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the sample indices of a batch of `epoch`, and their seeds or None."""
        if epoch != self._epoch and self.shuffle:
            if self.labels is None:
                positions = permutation(self.seed, epoch, len(self.indices))
            else:
                positions, self._repeats = balanced_order(self.seed, epoch, self.labels)
            self._order, self._epoch = self.indices[positions], epoch
        first = number * self.batch_size + (self.start[1] if epoch == self.start[0] else 0)
        batch_slice = slice(first, first + self.batch_size)
        if self.rank_slice is not None:
            share = self.rank_slice(min(self.batch_size, len(self.indices) - first))
            if share.start == share.stop:  # no share: the first sample of the batch stands in
                share = slice(0, 1)
            batch_slice = slice(batch_slice.start + share.start, batch_slice.start + share.stop)
        chosen = self._order[batch_slice]
        if not self.seeds:
            return chosen, None
        # a repeated sample gets another seed, so another augmentation
        return chosen, sample_seeds(self.seed, epoch, chosen + (self._repeats[batch_slice] << 32))
