"""Splits, order and seeds as pure functions."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from runner.core.data.order import balanced_order, permutation, sample_seeds, split
from runner.core.errors import DataError


def test_a_split_has_the_asked_size_and_each_sample_once() -> None:
    train, validation = split(1000, 0.2, 0)
    assert len(validation) == 200
    assert sorted([*train, *validation]) == list(range(1000))
    assert not np.array_equal(validation, split(1000, 0.2, 1)[1])
    assert all(len(part) == 1 for share in (0.001, 0.999) for part in split(2, share, 0))
    with pytest.raises(DataError, match="table.csv"):
        split(1, 0.2, 0, "table.csv")


def test_samples_that_are_added_leave_most_others_in_their_part() -> None:
    before, after = (set(split(n, 0.2, 0)[1].tolist()) for n in (1000, 1010))
    assert len(before & after) > 190


def test_an_epoch_holds_every_sample_once_in_an_order_of_its_own() -> None:
    first, second = permutation(0, 0, 500), permutation(0, 1, 500)
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(500))
    assert (first == second).sum() < 10
    assert (first == permutation(1, 0, 500)).sum() < 10


def test_these_very_numbers_come_out_on_every_machine() -> None:
    assert permutation(0, 0, 8).tolist() == [4, 0, 6, 5, 1, 7, 3, 2]
    assert sample_seeds(1, 2, np.array([3])).tolist() == [3821468231969580552]


def test_the_upper_half_is_the_epochs_and_the_lower_half_differs_between_epochs() -> None:
    seeds = [sample_seeds(4, epoch, np.arange(99)) for epoch in (9, 10)]
    upper = [set((s >> np.uint64(32)).tolist()) for s in seeds]
    assert [len(half) for half in upper] == [1, 1] and upper[0] != upper[1]
    lower = [set((s & np.uint64(2**32 - 1)).tolist()) for s in seeds]
    assert not lower[0] & lower[1]


def test_a_balanced_epoch_has_each_class_equally_often_and_all_samples_in_turn() -> None:
    labels = np.array([0] * 90 + [1] * 9 + [4] * 4)  # 103; of classes 2 and 3 there are none
    seen: set[int] = set()
    extra: set[int] = set()
    orders: Counter[tuple[int, ...]] = Counter()
    for epoch in range(20):
        places, repeats = balanced_order(7, epoch, labels)
        assert len(places) == 103
        drawn = np.bincount(labels[places], minlength=5)
        assert sorted(drawn[[0, 1, 4]].tolist()) == [34, 34, 35]
        extra.add(int(drawn.argmax()))
        rounds = labels[places][:102].reshape(-1, 3)
        assert (np.sort(rounds, axis=1) == [0, 1, 4]).all()
        orders.update(map(tuple, rounds.tolist()))
        counts = np.bincount(places, minlength=103)
        for label in (0, 1, 4):  # as evenly as can be
            assert np.ptp(counts[labels == label]) <= 1
        assert len(set(zip(places.tolist(), repeats.tolist(), strict=True))) == 103
        assert (repeats < counts[places]).all()
        seen |= set(places.tolist())
    assert len(seen) == 103
    assert extra == {0, 1, 4}
    assert len(orders) == 6 and min(orders.values()) > 80  # of 680 rounds: no order is preferred
