"""A column that gives away the label of a few rows among many is found, and none by chance."""

from __future__ import annotations

import numpy as np
import pytest

from runner.batch import Column
from runner.checks.config import TableConfig
from runner.checks.table import Looked, Table, check_table


def looked(x: np.ndarray, y: np.ndarray) -> Looked:
    rows = np.arange(len(y))
    columns = tuple(Column(f"c{i}") for i in range(x.shape[1]))
    table = Table(x.astype(np.float32), y, columns, rows, rows[:1], classes=2)
    return check_table(table, TableConfig(nearly=1.0))


def rare(rows: int, attacks: int, own: np.random.Generator) -> np.ndarray:
    y = np.zeros(rows, np.int64)
    y[own.choice(rows, attacks, replace=False)] = 1
    return y


@pytest.mark.parametrize(("rows", "attacks"), [(1500, 41), (60_000, 39), (1200, 20), (2000, 49)])
@pytest.mark.parametrize("wrong", [0, 1])
def test_a_column_that_tells_a_rare_class_is_named(rows: int, attacks: int, wrong: int) -> None:
    own = np.random.default_rng(attacks)
    y = rare(rows, attacks, own)
    x = own.normal(0, 1, (rows, 12))
    told = y.copy()
    told[np.flatnonzero(y)[:wrong]] = 0
    x[:, 5] = 5 * told + own.normal(0, 0.3, rows)
    x[:, 7] += 2 * y  # honest
    leaks = [r for r in looked(x, y).reasons if r.code == "table.leak"]
    assert [r.where for r in leaks] == ["column 'c5'"]


def test_columns_of_no_meaning_and_honest_ones_are_not_accused_of_a_rare_class() -> None:
    own = np.random.default_rng(3)
    for rows, attacks in ((100, 20), (1000, 30)):
        y = rare(rows, attacks, own)
        x = own.normal(0, 1, (rows, 1000))
        x[:, 1] += 3 * y
        assert not [r for r in looked(x, y).reasons if r.code == "table.leak"]
