"""A column that gives a quantity away is described by what was found, and by no more."""

from __future__ import annotations

import numpy as np
import pytest

from runner.batch import Column
from runner.checks.config import TableConfig
from runner.checks.table import Table, check_table

RNG = np.random.default_rng(0)
N = 400
X = RNG.standard_normal((N, 3)).astype(np.float32)
ITSELF = "it is the label itself"


@pytest.mark.parametrize(
    ("target", "says", "never"),
    [
        ((X[:, 0] > 0).astype(np.float32), "only rise or only fall", ITSELF),
        (np.floor(4 * X[:, 0]), "only rise or only fall", ITSELF),
        (X[:, 0] * 2.54 + 7, ITSELF, "only rise"),
        (-np.exp(X[:, 0].astype(float)), ITSELF, "only rise"),
    ],
    ids=["a threshold", "rounded", "another unit", "another scale"],
)
def test_only_values_that_pair_off_are_the_label_itself(
    target: np.ndarray, says: str, never: str
) -> None:
    columns = tuple(Column(name) for name in "abc")
    every = np.arange(N)
    looked = check_table(Table(X, target, columns, every[:300], every[300:]), TableConfig())
    (reason,) = [r for r in looked.reasons if r.code == "table.leak"]
    assert reason.where == "column 'a'"
    assert says in reason.evidence
    assert never not in reason.evidence
    share = float(reason.evidence.partition("explains ")[2].partition("%")[0])
    assert share > 98  # equal targets have one rank: nothing tells which of them comes first
