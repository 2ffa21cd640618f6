"""What is held against what: the parts of the verdict, with numbers made by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from runner.optim.config import ScheduleConfig, ScheduleKind
from runner.optim.schedule import factors
from runner.parity.distance import (
    KINK,
    Distances,
    Key,
    Kind,
    Tolerance,
    compare_steps,
    judge,
    same,
)
from runner.parity.dropout import mean_differs, spread_differs
from runner.parity.trajectory import State, StepRecord, first_update

STEPS = 40
GRADIENT, LOSS = Key(Kind.gradient, "w"), Key(Kind.loss, "loss")


def series(key: Key, errors: list[float]) -> Distances:
    """A tensor of norm 1 that is off by so much at each step."""
    found = Distances()
    for error in errors:
        found.add(key, torch.tensor([1.0, error]), torch.tensor([1.0, 0.0]), floor=0.0)
    return found


def beyond(key: Key, errors: list[float], plain: float = 1e-7) -> list[int]:
    """The step that is called wrong, where one is."""
    tolerance = Tolerance(series(key, [plain] * len(errors)), 64.0)
    return [one.step for one in judge(series(key, errors), tolerance) if one.error > one.bound]


def test_the_kink_of_an_activation_is_forgiven_at_some_steps_and_a_small_fault_is_not() -> None:
    few, many = STEPS // 5, STEPS // 5 + 1
    small, large = KINK / 2, KINK * 2
    assert beyond(GRADIENT, [small] * few + [1e-7] * (STEPS - few)) == []
    assert beyond(GRADIENT, [1e-7] * (STEPS - many) + [small] * many) == [STEPS - many + 1]
    assert beyond(GRADIENT, [1e-7] * (STEPS - 1) + [large]) == [STEPS]
    assert beyond(LOSS, [1e-7] * (STEPS - 1) + [1e-4]) == [STEPS]  # which has no kink


def test_what_the_plain_run_is_off_by_at_a_step_explains_the_same_there_alone() -> None:
    plain = [1e-7] * STEPS
    plain[4] = 0.5
    tolerance = Tolerance(series(LOSS, plain), 64.0)
    for at, wrong in ((4, False), (5, True)):
        errors = [1e-7] * STEPS
        errors[at] = 0.5
        (found,) = judge(series(LOSS, errors), tolerance)
        assert (found.error > found.bound) is wrong


def record(gradients: dict[str, Tensor], **buffers: Tensor) -> StepRecord:
    return StepRecord(torch.ones(()), torch.ones(()), gradients, State({}, buffers, {}))


def test_a_count_has_to_be_the_same() -> None:
    one, two = (record({}, seen=torch.tensor(n)) for n in (1, 2))
    key = Key(Kind.buffer, "seen")
    assert compare_steps([two], [one], [{}]).error[key] == [math.inf]
    assert compare_steps([one], [one], [{}]).error[key] == [0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_beyond_unless_the_reference_is_so_too(bad: float) -> None:
    good, broken = torch.ones(3), torch.tensor([1.0, bad, 1.0])
    tolerance = Tolerance(series(GRADIENT, [1.0]), 1.0)
    for truth, wrong in ((good, True), (broken.double(), False)):
        found = Distances()
        found.add(GRADIENT, broken, truth)
        (judged,) = judge(found, tolerance)
        assert (not judged.error <= judged.bound) is wrong
    assert same(broken, broken.clone())


@pytest.mark.parametrize(
    ("kind", "warmup", "first"),
    [("constant", 0.0, 0), ("constant", 100.0, 100), ("linear", 0.1, 100), ("step", 0.0, 291)],
)
def test_the_steps_are_after_the_warm_up_and_where_the_rate_changes_most(
    kind: str, warmup: float, first: int
) -> None:
    assert first_update(factors(ScheduleConfig(ScheduleKind(kind), warmup), 1000), STEPS) == first


def test_statistics_of_draws_tell_a_mean_and_a_spread_apart_from_chance() -> None:
    noise = torch.Generator().manual_seed(0)
    one, two = (torch.randn(32, generator=noise).tolist() for _ in range(2))
    for differs in (mean_differs, spread_differs):
        apart, by_chance = differs(one, two)
        assert apart < by_chance
    apart, by_chance = mean_differs(one, [x + 2 for x in two])
    assert apart > by_chance
    apart, by_chance = spread_differs(one, [x * 10 for x in two])
    assert apart > by_chance
    assert spread_differs(one, [1.0] * 32)[0] == math.inf
    assert spread_differs([1.0] * 32, [1.0] * 32)[0] == 0.0
