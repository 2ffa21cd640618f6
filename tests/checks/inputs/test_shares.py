"""Labels that drift are told in batches of any size, and fair draws never are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from runner import train
from runner.checks.config import InputsConfig
from runner.checks.inputs.look import InputChecks
from runner.checks.inputs.shares import POOLED, Shares, joined
from runner.security.trust import Reason
from tests.checks.inputs.spoiled import Spoiled
from tests.checks.inputs.test_admission import far, trained

FIRST = 60  # batches, of which 50 are the baseline


def labelled(size: int, classes: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled batches for a start, then only the last class."""
    own = torch.Generator().manual_seed(seed)
    for step in range(FIRST + 2 * POOLED // size + 1):
        y = torch.randint(0, classes, (size,), generator=own)
        y = y if step < FIRST else torch.full_like(y, classes - 1)
        yield torch.randn(size, 4, generator=own), y


@pytest.mark.parametrize("classes", [2, 10])
@pytest.mark.parametrize("size", [1, 2, 8, 16, 32, 64])
def test_one_class_alone_is_found_in_batches_of_any_size(size: int, classes: int) -> None:
    checks = InputChecks(classes=classes)
    found: list[tuple[int, Reason]] = []
    for step, batch in enumerate(labelled(size, classes)):
        found += [(step, r) for r in checks.look(batch, 0) if r.code == "input.drift"]
    labels = [(step, reason) for step, reason in found if reason.where == "target"]
    assert labels and labels[0][0] >= FIRST
    assert f"labels are {classes - 1}, and" in labels[0][1].evidence
    if size >= 32:  # 2^-31: a single batch tells
        assert [step for step, _ in labels] == list(range(FIRST, labels[-1][0] + 1))


BALANCES: dict[str, list[float]] = {
    "even": [0.5, 0.5],
    "one of a hundred": [0.99, 0.01],
    "three": [0.9, 0.09, 0.01],
    "a hundred": [0.01] * 100,
    "as words": list(1 / np.arange(1, 201) / np.sum(1 / np.arange(1, 201))),
}


def told(batches: Sequence[list[float]], first: int = 50) -> int:
    """Findings in the counts of batches, of which the first make the limits."""
    shares, pool, found = Shares(8.0), list[float](), 0
    shares.settle(list(batches[:first]))
    for counts in batches[first:]:
        pool = joined(pool, counts)
        found += shares.odd(counts) is not None
        if sum(pool) >= POOLED:
            found += shares.odd(pool) is not None
            pool = []
    return found


@pytest.mark.parametrize("size", [8, 32, 256])
@pytest.mark.parametrize("balance", BALANCES)
def test_ten_thousand_batches_of_fair_draws_raise_nothing(balance: str, size: int) -> None:
    own = np.random.default_rng(size)
    assert told(own.multinomial(size, BALANCES[balance], 10_000).astype(float).tolist()) == 0


@pytest.mark.parametrize("block", [20, 100, 300])
def test_rows_that_come_in_blocks_of_a_class_from_the_start_on_are_usual(block: int) -> None:
    own = np.random.default_rng(block)
    labels = np.repeat(own.integers(0, 3, 20_000 // block), block).reshape(-1, 20)
    assert told(np.stack([(labels == c).sum(1) for c in range(3)], 1).astype(float).tolist()) == 0


def test_a_slight_shift_is_found_in_large_batches() -> None:
    own = np.random.default_rng(0)
    draws = [own.multinomial(1024, [p, 1 - p], 100) for p in (0.5, 0.65)]
    assert told(np.concatenate(draws).astype(float).tolist()) >= 100


def test_labels_that_are_yet_too_few_to_tell_go_on_from_a_checkpoint() -> None:
    batches = list(labelled(8, 2))
    whole, cut = InputChecks(classes=2), InputChecks(classes=2)
    said = [whole.look(batch, None) for batch in batches]
    again = [cut.look(batch, None) for batch in batches[: FIRST + 7]]
    assert cut.pool
    resumed, state = InputChecks(classes=2), cut.state()
    state["repeats"].pop("marks")
    state = json.loads(json.dumps(state))
    resumed.load({**state, "repeats": cut.repeats.state()})
    again += [resumed.look(batch, None) for batch in batches[FIRST + 7 :]]
    assert said == again and any(said)


def test_batches_on_an_accelerator_are_told_by_the_same_labels() -> None:
    data = Spoiled()
    data.y[192:] = 0
    own = ["checks.inputs.threshold=4", "training.steps=20"]
    near, _ = trained(data, None, *own)
    with far(data, None, *own) as run:
        train(run)
    told_near, told_far = (
        [f.message for f in r.history.faults.values() if "labels are 0" in f.message]
        for r in (near, run)
    )
    assert told_near and told_near == told_far
    assert near.history.counts == run.history.counts


def test_a_higher_threshold_asks_for_more() -> None:
    batches = list(labelled(32, 2))
    for threshold, found in ((8.0, True), (12.0, False)):
        checks = InputChecks(InputsConfig(threshold=threshold), classes=2)
        assert bool([r for b in batches[: FIRST + 1] for r in checks.look(b, None)]) is found
