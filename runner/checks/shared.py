"""Rows that a table's training and validation parts have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from runner.checks.columns import Floats, Ints, mixed

CELLS = 100_000_000  # of a table that is looked at whole: about a second
CHUNK = 131_072  # cells hashed at once, which then stay in a processor's cache
FEW = 1 / 20  # of the training rows: where no more are different, none is a copy of another
NAMED = 3


@dataclass
class Shared:
    """Which rows of validation are in training too."""

    exact: Ints  # of validation, whose inputs and label a training row has
    other: Ints  # whose inputs training rows have, always with another label
    both: int = 0  # of `exact`, whose inputs a training row has with another label, too
    pairs: list[tuple[int, int]] = field(default_factory=list)  # the first few, with their twins
    among_train: int = 0  # training rows that another training row equals
    distinct: int = 0  # training rows that differ from each other
    by_chance: int = 0  # how many would be shared with each column shuffled; 0: less than half
    train: int = 0  # rows held against each other
    validation: int = 0

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.exact) + len(self.other)

    @property
    def few_distinct(self) -> bool:
        """Whether they are no copies: the table has too few different rows to keep them apart."""
        return self.by_chance > 0 or self.distinct <= FEW * self.train


def shared_rows(
    inputs: Floats, target: NDArray[np.generic], train: Ints, validation: Ints,
    columns: Sequence[slice], whole: bool, quantities: bool = False,
) -> Shared:  # fmt: skip
    """Rows of `validation` that equal one of `train` in the inputs of `columns`.

    Equal is what a model gets as equal: all bits of the float32 inputs, with -0 as 0. Rows are
    held against each other by 64-bit hashes: two different rows of a million pass for equal once
    in a hundred million tables. Unless `whole`, a larger table than takes a second is looked at in
    evenly spaced rows. Another quantity for the same inputs is noise, and usual: with `quantities`
    only what has the same target too is held to be the same row.
    """
    most = max(1_000, CELLS // max(1, inputs.shape[1]))
    if not whole and len(train) + len(validation) > most:
        share = most / (len(train) + len(validation))
        train, validation = (_spaced(part, int(len(part) * share)) for part in (train, validation))
    weights = np.zeros(inputs.shape[1], np.uint64)
    for column in columns:
        weights[column] = mixed(np.arange(column.start, column.stop) + 1) | np.uint64(1)
    of_train, of_validation = (_hashes(inputs, rows, weights) for rows in (train, validation))
    labelled = [
        of_rows + _labels(target, rows)
        for of_rows, rows in ((of_train, train), (of_validation, validation))
    ]
    known = np.sort(labelled[0])
    exact = _among(labelled[1], known)
    ordered = np.sort(of_train)
    other = _among(of_validation, ordered) & ~exact & (not quantities)
    found = Shared(validation[exact], validation[other], train=len(train))
    more = _count(of_validation, ordered) > _count(labelled[1], known)
    found.both = 0 if quantities else int((exact & more).sum())
    found.distinct = _distinct(known if quantities else ordered)
    if similar := found.count:
        parts = [inputs[:, column] for column in columns]
        if quantities:
            parts.append(np.asarray(target, np.float32).reshape(len(target), -1))
        found.by_chance = by_chance(parts, train, validation, -(-similar // 2))
    found.validation = len(validation)
    found.among_train = int((known[1:] == known[:-1]).sum())
    for rows, theirs, ours in (
        (exact, labelled[0], labelled[1]), (other, of_train, of_validation),
    ):  # fmt: skip
        for row in np.flatnonzero(rows)[:NAMED].tolist():
            twin = int(train[np.flatnonzero(theirs == ours[row])[0]])
            found.pairs.append((int(validation[row]), twin))
    return found


def _spaced(rows: Ints, most: int) -> Ints:
    return rows[np.linspace(0, len(rows) - 1, max(1, most)).astype(np.int64)]


def _hashes(inputs: Floats, rows: Ints, weights: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One number for each row: its bits, weighed and summed, modulo 2^64, and mixed."""
    found = np.empty(len(rows), np.uint64)
    step = max(1, CHUNK // inputs.shape[1])
    for start in range(0, len(rows), step):
        part = inputs[rows[start : start + step]] + np.float32(0)  # which makes -0 a 0
        bits = part.view(np.uint32)
        bits ^= bits >> 16  # the last bits of round numbers are all 0
        # products of whole numbers wrap around, and lose nothing
        found[start : start + step] = bits.astype(np.uint64) @ weights
    return found


def _labels(target: NDArray[np.generic], rows: Ints) -> NDArray[np.uint64]:
    values = np.asarray(target[rows], np.float64).reshape(len(rows), -1) + 0.0
    weights = mixed(np.arange(1, values.shape[1] + 1) * 7_919) | np.uint64(1)
    found: NDArray[np.uint64] = mixed(values.view(np.uint64)) @ weights
    return found


def by_chance(columns: Sequence[Floats], train: Ints, validation: Ints, least: int) -> int:
    """Rows of validation that would equal one of train if each column were shuffled by itself.

    0 where they are fewer than `least`, which the first few columns mostly tell. Nothing is drawn:
    columns are moved along an order of no meaning, each by another number of rows.
    """
    rows = np.concatenate([train, validation])
    rows = rows[np.argsort(mixed(rows), kind="stable")]
    whole, alike = np.zeros(len(rows), np.uint64), 0
    for number, part in enumerate(columns, 1):
        weights = mixed(np.arange(1, part.shape[1] + 1)) | np.uint64(1)
        moved = np.roll(rows, int(mixed(np.array([number]))[0]) % len(rows))
        whole = mixed(whole + _hashes(part, moved, weights))
        if number & (number - 1) and number < len(columns):
            continue  # another column makes rows only less alike: 1, 2, 4, 8, … are looked at
        alike = int(_among(whole[len(train) :], np.sort(whole[: len(train)])).sum())
        if alike < least:
            return 0
    return alike


def _distinct(ordered: NDArray[np.uint64]) -> int:
    return int((ordered[1:] != ordered[:-1]).sum()) + 1


def _count(values: NDArray[np.uint64], ordered: NDArray[np.uint64]) -> Ints:
    last = np.searchsorted(ordered, values, "right")
    return last - np.searchsorted(ordered, values)


def _among(values: NDArray[np.uint64], ordered: NDArray[np.uint64]) -> NDArray[np.bool_]:
    at = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    found: NDArray[np.bool_] = ordered[at] == values
    return found
