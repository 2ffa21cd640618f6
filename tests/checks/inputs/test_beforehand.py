"""Where data in memory were looked through beforehand, nothing is missed in their batches."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from runner import build, compose, train
from runner.build import Given
from runner.checks.inputs.beforehand import Beforehand, drawn
from runner.checks.inputs.here import numbers
from runner.checks.inputs.measure import Labels, Measure, key_of, leaves, plan_of
from runner.data.tensors import Tensors
from runner.run import Run
from tests.checks.inputs.spoiled import BATCH, QUIET, TRAIN, Spoiled, same, weights


def held(change: Callable[[Tensor, Tensor], None], *overrides: str) -> Run:
    """A run on tensors in memory, which `change` has spoiled."""
    data = Spoiled()
    change(data.x, data.y)
    parts = (data.train, data.validation)
    whole = Tensors(data.x, data.y, data.sizes, parts)
    return build(
        compose([*QUIET, "checks.table.enabled=false", *overrides]), None, Given(data=whole)
    )


def sound(x: Tensor, y: Tensor) -> None:
    pass


def nan(x: Tensor, y: Tensor) -> None:
    x[193, 3] = math.nan


def label(x: Tensor, y: Tensor) -> None:
    y[195] = 99


def far(x: Tensor, y: Tensor) -> None:
    x[199, 3] = 1e5


def twice(x: Tensor, y: Tensor) -> None:
    x[192:208] = x[32:48]


def constant(x: Tensor, y: Tensor) -> None:
    x[192:208] = 1.0


SPOILED = {"not_finite": nan, "labels": label, "range": far, "duplicates": twice,
           "constant": constant}  # fmt: skip


@pytest.mark.parametrize("kind", SPOILED)
def test_what_is_wrong_with_data_in_memory_is_found_in_every_batch_that_has_it(kind: str) -> None:
    with held(SPOILED[kind], "checks.inputs.labels=skip") as run:
        train(run)
        assert run.inputs is not None and run.inputs.beforehand is not None
        assert run.history.counts[f"input_{kind}"] == 2  # steps 13 and 33


def test_sound_data_in_memory_need_no_look_but_at_batches_that_are_drawn() -> None:
    with held(sound, "training.steps=100") as run, held(sound, "checks=off") as other:
        batches = []
        for step, batch in zip(range(100), run.train.batches(0), strict=False):
            assert run.inputs is not None
            batches.append(run.inputs.cleared == step + 1)
            run.inputs.admit(step + 1, batch)
        assert batches == [step >= 8 and not drawn(step) for step in range(100)]
        assert other.inputs is None
    with held(sound) as run, held(sound, "checks=off") as other:
        train(run)
        train(other)
        assert same(weights(run), weights(other)) and dict(run.history.counts) == {}


def test_a_value_written_into_the_data_later_is_found_at_once() -> None:
    with held(sound) as run:
        found = []
        assert run.inputs is not None and run.inputs.beforehand is not None
        for step, batch in zip(range(15), run.train.batches(0), strict=False):
            run.inputs.admit(step + 1, batch)
            found.append(run.history.counts.get("input_not_finite", 0))
            if step == 10:
                assert run.inputs.beforehand.settled
                run.inputs.beforehand.inputs[193, 0] = math.inf
        assert found == [0] * 12 + [1, 1, 1]


@pytest.mark.parametrize("check", ["drift", "duplicates"])
def test_where_a_finding_keeps_a_step_from_being_made_every_batch_is_looked_at(check: str) -> None:
    with held(sound, f"checks.inputs.{check}=skip") as run:
        for step, batch in zip(range(30), run.train.batches(0), strict=False):
            assert run.inputs is not None
            run.inputs.admit(step + 1, batch)
            assert run.inputs.cleared == 0


def looked(run: Run, first: int, last: int) -> list[int]:
    assert run.inputs is not None
    found = []
    for step, batch in zip(range(first, last), run.train.batches(first), strict=False):
        if run.inputs.cleared != step + 1:
            found.append(step)
        run.inputs.admit(step + 1, batch)
    return found


def test_a_run_that_goes_back_to_before_there_were_limits_looks_at_every_batch_again() -> None:
    with held(sound) as run, held(sound) as resumed:
        assert run.inputs is not None and resumed.inputs is not None
        looked(run, 0, 4)
        state = run.inputs.state()
        looked(run, 4, 40)
        run.inputs.load(state)
        resumed.inputs.load(state)
        assert looked(run, 4, 40) == looked(resumed, 4, 40)
        assert run.inputs.checks.baseline.state() == resumed.inputs.checks.baseline.state()


def test_a_resumed_run_looks_at_the_same_batches() -> None:
    with held(sound) as run, held(sound) as cut, held(sound) as resumed:
        whole = looked(run, 0, 120)
        before = looked(cut, 0, 60)
        assert cut.inputs is not None and resumed.inputs is not None and run.inputs is not None
        resumed.inputs.load(cut.inputs.state())
        assert before + looked(resumed, 60, 120) == whole
        a, b = run.inputs.checks.repeats.state(), resumed.inputs.checks.repeats.state()
        assert torch.equal(a.pop("marks"), b.pop("marks")) and a == b


@pytest.mark.parametrize("shape", [(8,), (3, 5, 5)])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.uint8, torch.int64])
def test_numbers_taken_by_numpy_are_those_taken_by_torch(
    shape: tuple[int, ...], kind: torch.dtype
) -> None:
    own = torch.Generator().manual_seed(3)
    x = (40 * torch.rand(BATCH, *shape, generator=own) + 3).to(kind)
    y = torch.randint(0, 4, (BATCH,), generator=own)
    y[2] = -100
    known = Labels(4, -100)
    found = leaves((x, y))
    plan, measure = plan_of(key_of(found), known), Measure(known)
    mine, theirs = numbers(measure, found, plan), measure.row(found, plan).tolist()
    np.testing.assert_allclose(mine, theirs, rtol=1e-4)


def test_copies_are_few_or_many() -> None:
    x = torch.randn(TRAIN, 6, generator=torch.Generator().manual_seed(1))
    y, rows = torch.zeros(TRAIN), np.arange(TRAIN)
    assert Beforehand(x, y, rows, BATCH)._differ()
    nearly = torch.cat([x, x + 1e-6])
    assert not Beforehand(nearly, y, np.arange(2 * TRAIN), BATCH)._differ()
