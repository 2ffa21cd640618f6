"""What each column of a table says by itself: nothing, or the label."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runner.batch import Column

CELLS = 1_500_000  # of the sample that columns are judged by: about a tenth of a second
MOST_ROWS, FEWEST_ROWS = 50_000, 1_000
MOST_COLUMNS = 2_048  # the first so many are judged; more would take seconds
MOST_BINS = 256
ENOUGH = 100  # rows below which a column may give the label by chance
HARD = 20  # rows that are not of the commonest class, likewise
# Of up to so many rows one that is wrong is a larger share than a leak may miss. That a column of
# no meaning gets 19 of 20 among 100 has a chance of 1 in 10^15, and less among more rows.
RARE = 50
PAIRED = 0.99  # steps of a column that are steps of its own target too; rounding may join some

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(eq=False)
class Told:
    """What one column says of the label, and of itself."""

    name: str
    first: int  # of its inputs
    width: int
    value: str = ""  # that is the commonest, as it was read
    share: float = 0.0  # of the rows that have it
    skill: float | None = None  # errors it saves, of those made without it; None: not judged
    rare: bool = False  # its rows of the few that are not of the commonest class are right but one
    same: bool = False  # its values and those of the label pair off, one to one
    sorts: bool = False  # of a quantity: sorted by the column, the target goes one way
    counts_rows: bool = False  # a number of the row: it rises by the same from row to row
    trend: bool = False  # of a quantity: it goes one way along the rows, as a time does

    @property
    def constant(self) -> bool:
        """Whether all rows have the one value."""
        return self.share == 1.0


def sample_of(train: Ints, columns: int) -> Ints:
    """Rows that columns are judged by: all of them, or as many as take a bounded time.

    Evenly spaced ones of `train`, whose order is that of the file: no chance, so that a run that
    is resumed leaves out the same columns.
    """
    most = min(MOST_ROWS, max(FEWEST_ROWS, CELLS // max(1, columns)))
    if len(train) <= most:
        return train
    return train[np.linspace(0, len(train) - 1, most).astype(np.int64)]


def tell(
    inputs: Floats, target: NDArray[np.generic], columns: tuple[Column, ...], train: Ints,
    classes: int | None, whole: bool,
) -> tuple[list[Told], int]:  # fmt: skip
    """What the columns say over the rows `train`, and how many rows they were judged by.

    `inputs` [rows, features] are as a model gets them, `target` [rows] labels below `classes`, or
    quantities [rows] or [rows, targets] where that is None. With `whole` a constant column is held
    against every row, not those of the sample alone.
    """
    told: list[Told] = []
    first = 0
    for column in columns:
        told.append(Told(column.name, first, column.width))
        first += column.width
    seen = told[:MOST_COLUMNS]
    rows = sample_of(train, inputs.shape[1])
    # in an order of no meaning, so that equal values do not stand in that of the file
    rows = rows[np.argsort(mixed(rows), kind="stable")]
    label = _Label(target[rows], classes)
    last = seen[-1].first + seen[-1].width
    block: Floats = np.ascontiguousarray(inputs[rows, :last].T)  # each column in one piece
    codes: list[Ints | Floats] = []
    for fact, column in zip(seen, columns, strict=False):
        values = _values(block, fact)
        codes.append(values)
        fact.share, common = _commonest(values)
        fact.value = _as_read(common, column)
        if not fact.constant:
            fact.skill, fact.same, fact.sorts, fact.rare = label.told_by(values)
        if fact.share < 1 / 2 and not column.values:
            fact.counts_rows = _rises_evenly(values, rows)
            # rows that are sorted by the quantity itself are another matter
            fact.trend = classes is None and not fact.sorts and _goes_one_way(values, rows)
    if whole and len(rows) < len(train):
        _count_all(inputs, train, [f for f in seen if f.share > 0.98], codes, seen)
    return told, len(rows)


def _values(block: Floats, fact: Told) -> Ints | Floats:
    """The column's numbers, or which category each row has."""
    if fact.width == 1:
        number: Floats = block[fact.first]
        return number
    category: Ints = block[fact.first : fact.first + fact.width].argmax(0)
    return category


def _commonest(values: Ints | Floats) -> tuple[float, float]:
    """The share of the commonest value, and which it is."""
    ordered = np.sort(values)
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    lengths = np.diff(starts, append=len(ordered))
    most = int(lengths.argmax())
    return float(lengths[most] / len(ordered)), float(ordered[starts[most]])


def _as_read(value: float, column: Column) -> str:
    if column.values:
        return repr(column.values[int(value) if column.width > 1 else 0])
    read = value * column.deviation + column.mean
    # float32 lies between, so what was 0 may come back as next to nothing
    small = abs(read) < 1e-6 * max(abs(column.mean), column.deviation)
    return f"{0.0 if small else read:.6g}"


def _rises_evenly(values: Ints | Floats, rows: Ints) -> bool:
    """Whether it is a number of the row; rows that were left out of the file leave gaps."""
    order = np.argsort(rows)
    x, number = values[order].astype(np.float64), rows[order].astype(np.float64)
    if len(x) < ENOUGH or not (np.all(x[1:] > x[:-1]) or np.all(x[1:] < x[:-1])):
        return False
    return bool(abs(np.corrcoef(x, number)[0, 1]) > 1 - 1e-4)


def _goes_one_way(values: Ints | Floats, rows: Ints) -> bool:
    rises = np.diff(values[np.argsort(rows)])
    return bool((rises >= 0).all() or (rises <= 0).all())


def _count_all(
    inputs: Floats, train: Ints, doubtful: list[Told], codes: list[Ints | Floats], seen: list[Told]
) -> None:
    """Hold columns that are one value in nearly all of the sample against every row, in one go."""
    if not doubtful:
        return
    common = [_commonest(codes[seen.index(fact)])[1] for fact in doubtful]
    pairs = zip(doubtful, common, strict=True)
    which = np.array([fact.first + (int(x) if fact.width > 1 else 0) for fact, x in pairs])
    pairs = zip(doubtful, common, strict=True)
    value = np.array([1 if fact.width > 1 else x for fact, x in pairs], np.float32)
    counts = np.zeros(len(doubtful), np.int64)
    for start in range(0, len(train), 65_536):
        rows = train[start : start + 65_536]
        counts += (inputs[np.ix_(rows, which)] == value).sum(axis=0)
    for fact, count in zip(doubtful, counts.tolist(), strict=True):
        fact.share = count / len(train)


class _Label:
    """What is to be predicted, and how much of it a column gives away."""

    def __init__(self, target: NDArray[np.generic], classes: int | None) -> None:
        self.classes = classes
        self.labels = np.zeros(0, np.int64)
        self.ranks: list[NDArray[np.float64]] = []
        self.quantities: list[NDArray[np.float64]] = []
        n = len(target)
        if classes is not None:
            # those that there are, numbered anew: one may be no class at all, which others say
            found, self.labels, count = np.unique(target, return_inverse=True, return_counts=True)
            self.classes, self.common = len(found), int(count.argmax())
            self.wrong = int((self.labels != self.common).sum())  # without any column
            self.judged = n >= ENOUGH and self.wrong >= HARD
            return
        for values in np.asarray(target, np.float64).reshape(n, -1).T[:4]:
            if values.min() < values.max():
                self.ranks.append(_ranks(values))
                self.quantities.append(values)
        self.judged = n >= ENOUGH and bool(self.ranks)

    def told_by(self, values: Ints | Floats) -> tuple[float | None, bool, bool, bool]:
        """Its skill; whether it is the label, or sorts it; whether it misses one of few at most."""
        if not self.judged:
            return None, False, False, False
        order = np.argsort(values, kind="stable")
        ordered = values[order]
        codes, several = _bins(values, ordered)
        if self.classes is not None:
            labels = self.labels[order]
            # as often as there are classes it must change, and twice for a row among others
            changes = int((labels[1:] != labels[:-1]).sum()) - (self.classes - 1)
            by_class = self._by_class(codes)
            wrong = min(changes / 2, (1 - by_class) * self.wrong)
            rare = self.wrong < RARE and wrong < 1.5
            skill = max(0.0, 1 - changes / self.wrong, by_class)
            return skill, several and self._is_label(codes), False, rare
        skill = 0.0
        same = sorts = False
        moves = ordered[1:] != ordered[:-1]
        for ranks, quantity in zip(self.ranks, self.quantities, strict=True):
            steps = np.diff(ranks[order])
            near = 1 - float((steps * steps).mean()) / (2 * float(ranks.var()))
            skill = max(skill, near, _by_mean(codes, ranks))
            rises = np.diff(quantity[order])
            if (rises >= 0).all() or (rises <= 0).all():
                sorts = True
                same = same or bool((moves == (rises != 0)).mean() >= PAIRED)
        return skill, same, sorts, False

    def _by_class(self, codes: Ints) -> float:
        """Errors saved by the commonest class of each bin, learned on the other half of rows."""
        classes, size = self.classes or 1, int(codes.max()) + 1
        pairs = codes * classes + self.labels
        halves = [
            np.bincount(pairs[k::2], minlength=size * classes).reshape(size, classes)
            for k in (0, 1)
        ]
        right = 0
        for learned, held in (halves, halves[::-1]):
            guess = np.where(learned.any(1), learned.argmax(1), self.common)
            right += int(held[np.arange(size), guess].sum())
        return 1 - (len(codes) - right) / self.wrong

    def _is_label(self, codes: Ints) -> bool:
        """Whether values and labels pair off, one to one."""
        found = np.unique(codes * (self.classes or 1) + self.labels)
        values, labels = found // (self.classes or 1), found % (self.classes or 1)
        return len(found) == len(np.unique(values)) == len(np.unique(labels))


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks 0 to 1; equal values share theirs, as nothing tells which of them comes first."""
    _, number, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    shared: NDArray[np.float64] = (last - (count + 1) / 2) / (len(values) - 1)
    return shared[number]


def _bins(values: Ints | Floats, ordered: Ints | Floats) -> tuple[Ints, bool]:
    """A number from 0 for each value: its own where they are few, else a bin with its neighbours.

    Half of the bins hold the same number of rows, and half the same number of different values, so
    that neither a heavy tail nor a crowd of equal values takes them all.
    """
    distinct = ordered[np.concatenate([[True], ordered[1:] != ordered[:-1]])]
    most = max(8, min(MOST_BINS, len(values) // 40))
    few = len(distinct) <= most
    if not few:
        at = np.linspace(0, 1, most // 2)
        edges = (distinct, ordered)
        distinct = np.unique(np.concatenate([e[(at * (len(e) - 1)).astype(int)] for e in edges]))
    return np.searchsorted(distinct, values), few


def _by_mean(codes: Ints, ranks: NDArray[np.float64]) -> float:
    """The share of variance that the mean of each bin explains, learned on the other half."""
    size, error = int(codes.max()) + 1, 0.0
    for k in (0, 1):
        learned, held = slice(k, None, 2), slice(1 - k, None, 2)
        count = np.bincount(codes[learned], minlength=size)
        sums = np.bincount(codes[learned], ranks[learned], minlength=size)
        mean = np.where(count > 0, sums / np.maximum(count, 1), 0.5)
        error += float(np.square(mean[codes[held]] - ranks[held]).sum())
    return 1 - error / (len(ranks) * float(ranks.var()))


def mixed(values: NDArray[np.integer]) -> NDArray[np.uint64]:
    """Whole numbers hashed (SplitMix64's last step), so that their order means nothing."""
    state: NDArray[np.uint64] = values.astype(np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15)
    state ^= state >> np.uint64(30)
    state *= np.uint64(0xBF58_476D_1CE4_E5B9)
    state ^= state >> np.uint64(27)
    return state
