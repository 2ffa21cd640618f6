"""What is held against what: the parts of the verdict, with traces made by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from runner.measure.chance import mean_differs, spread_differs
from runner.measure.distance import distances, held, same
from runner.measure.trace import Kind, Spot, Trace

START = Spot(0, Kind.parameter, "w")
END = Spot(1, Kind.parameter, "w")
GRADIENT = Spot(1, Kind.gradient, "w")


def beyond(trace: Trace, reference: Trace, allowed: dict[Spot, float]) -> list[Spot]:
    return [spot for spot, error, bound, _ in held(trace, reference, allowed) if error > bound]


def updated(change: Tensor) -> Trace:
    return {START: torch.ones(100), END: torch.ones(100) + change}


def test_one_weight_may_go_the_other_way_but_not_ten_and_not_further_than_its_update() -> None:
    step = torch.full((100,), 0.01)
    reference = {spot: tensor.double() for spot, tensor in updated(step).items()}
    allowed = {START: 0.0, END: 1e-5}
    for turned, factor, found in ((1, -1, []), (10, -1, [END]), (1, -4, [END]), (0, 1, [])):
        change = step.clone()
        change[:turned] *= factor
        assert beyond(updated(change), reference, allowed) == found


def test_an_update_left_out_is_beyond() -> None:
    reference = updated(torch.full((100,), 0.01).double())
    assert beyond(updated(torch.zeros(100)), reference, {START: 0.0, END: 1e-5}) == [END]


def test_a_gradient_that_is_not_there_counts_as_zero() -> None:
    other = Spot(1, Kind.gradient, "v")
    reference = {GRADIENT: torch.ones(4), other: torch.ones(4)}
    allowed = dict.fromkeys(reference, 1e-6)
    assert beyond({other: torch.ones(4)}, reference, allowed) == [GRADIENT]
    assert beyond({}, reference, allowed) == []  # a whole step: nobody sees any


def test_a_count_has_to_be_the_same() -> None:
    spot = Spot(1, Kind.buffer, "num_batches_tracked")
    reference, allowed = {spot: torch.tensor(1)}, {spot: 5.0}
    assert beyond({spot: torch.tensor(2)}, reference, allowed) == [spot]
    assert beyond({spot: torch.tensor(1)}, reference, allowed) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_beyond_unless_the_reference_is_so_too(bad: float) -> None:
    good, broken = torch.ones(3), torch.tensor([1.0, bad, 1.0])
    assert beyond({GRADIENT: broken}, {GRADIENT: good}, {GRADIENT: 1.0}) == [GRADIENT]
    assert beyond({GRADIENT: broken}, {GRADIENT: broken.double()}, {GRADIENT: 0.0}) == []
    assert distances({GRADIENT: broken}, {GRADIENT: good}) == {GRADIENT: math.inf}
    assert same(broken, broken.clone())


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
