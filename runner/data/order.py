"""Which sample comes when, and with which random seed: pure functions, so nothing has a history.

All of it is one hash: SplitMix64 (Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195) of a
sample's position, started from the numbers it may depend on. NumPy's own generators are left
aside because their streams may change between NumPy versions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from runner.errors import DataError

# Which of the streams; without it a split and a shuffle with the same seed would be the same order.
_SPLIT, _SHUFFLE, _SAMPLE, _EPOCH, _BALANCE = range(5)
_MASK = 0xFFFF_FFFF_FFFF_FFFF

Fold = tuple[int, int]
"""Which part of a cross-validation is held out, and of how many: (0, 5) is the first of five."""


def mix(*numbers: int) -> int:
    """One well-mixed 63-bit seed from several whole numbers.

    SplitMix64's finaliser, folded over the numbers, so that neighbouring seeds and steps share
    nothing.
    """
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
    """Indices of the training and of the validation part of `n` samples, each ascending.

    The validation part is the share `validation` of the samples, rounded, with the smallest
    hashes: it has that exact size, and a sample added at the end moves few others. Neither part
    is empty; fewer than two samples are a DataError, in which `what` names the data. With a `fold`
    that one is held out, whatever the share.
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
    """Every k-th of the ranked samples is held out. DataError for fewer samples than folds."""
    number, folds = fold
    if len(ranked) < folds:
        raise DataError(f"{what}: {len(ranked)} samples make no data.folds={folds}; use fewer")
    within = np.arange(len(ranked)) % folds == number
    return np.sort(ranked[~within]), np.sort(ranked[within])


def split_hash(split_seed: int, indices: np.ndarray) -> np.ndarray:
    """One number (uint64) for each sample: the smallest are held out."""
    return splitmix(indices, mix(_SPLIT, split_seed))


def permutation(seed: int, epoch: int, n: int) -> np.ndarray:
    """The order of `n` samples in that epoch, int64. Costs 30 µs for 1,400 samples."""
    return np.argsort(splitmix(np.arange(n), mix(_SHUFFLE, seed, epoch)), kind="stable")


def balanced(seed: int, epoch: int, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places in `labels`, as many as there are, and how often each was drawn before in that epoch.

    Of k classes every k consecutive places have one of each, in random order. A class is gone
    through in the order of `permutation`, and once more from its start until the epoch is full: of
    a frequent class each epoch has others.
    """
    n, shuffled = len(labels), permutation(seed, epoch, len(labels))
    grouped = shuffled[np.argsort(labels[shuffled], kind="stable")]
    _, starts, counts = np.unique(labels[grouped], return_index=True, return_counts=True)
    classes = len(counts)
    slots = np.arange(-(-n // classes) * classes)
    drawn = splitmix(slots, mix(_BALANCE, seed, epoch))
    slots = np.lexsort((drawn, slots // classes))[:n]
    turn, which = np.divmod(slots, classes)
    return grouped[starts[which] + turn % counts[which]], turn // counts[which]


def sample_seeds(seed: int, epoch: int, indices: np.ndarray) -> np.ndarray:
    """One seed (uint64) for each sample in that epoch.

    The lower 32 bits depend on (seed, epoch, index): they are what drives a sample's augmentation,
    and alone are enough for generators that take 32 bits. The upper 32 depend on (seed, epoch),
    for what a whole epoch has in common.
    """
    own = splitmix(indices, mix(_SAMPLE, seed, epoch)) & np.uint64(0xFFFF_FFFF)
    common: np.ndarray = own | np.uint64((mix(_EPOCH, seed, epoch) & 0xFFFF_FFFF) << 32)
    return common


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


@dataclass(eq=False)
class BatchSampler:
    """The batches of a part of a data set: which samples, with which seeds, epoch after epoch."""

    indices: np.ndarray
    batch_size: int
    batches: int  # in an epoch
    seed: int
    shuffle: bool
    seeds: bool  # whether the samples get seeds
    labels: np.ndarray | None = None  # of `indices`: draw each class equally often
    part: Callable[[int], slice] | None = None  # which of so many samples one process takes

    def __post_init__(self) -> None:
        self._epoch, self._order, self._repeats = -1, self.indices, np.zeros_like(self.indices)

    def samples(self, number: int) -> int:
        """How many samples that batch of an epoch has, those of other processes included."""
        return min(self.batch_size, len(self.indices) - number * self.batch_size)

    def batch(self, epoch: int, number: int) -> tuple[np.ndarray, np.ndarray | None]:
        """The samples of that batch of the epoch, and their seeds."""
        if epoch != self._epoch and self.shuffle:
            if self.labels is None:
                places = permutation(self.seed, epoch, len(self.indices))
            else:
                places, self._repeats = balanced(self.seed, epoch, self.labels)
            self._order, self._epoch = self.indices[places], epoch
        part = slice(number * self.batch_size, (number + 1) * self.batch_size)
        if self.part is not None:
            own = self.part(self.samples(number))
            if own.start == own.stop:  # the first sample of the batch stands in
                own = slice(0, 1)
            part = slice(part.start + own.start, part.start + own.stop)
        chosen = self._order[part]
        if not self.seeds:
            return chosen, None
        # a sample that is drawn again is augmented in another way
        return chosen, sample_seeds(self.seed, epoch, chosen + (self._repeats[part] << 32))
