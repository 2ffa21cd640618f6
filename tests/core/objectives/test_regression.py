"""Regression: shapes that never broadcast, and metrics against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runner.core.errors import DataError, UsageError
from runner.core.objectives.regression import RegressionObjective
from tests.core.objectives.sums import CUTS, totals, weighted_loss


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("targets", [None, 3])
@pytest.mark.parametrize("offset", [0.0, 20_000.0])
def test_metrics_over_uneven_batches_are_those_of_numpy(
    cuts: list[int], targets: int | None, offset: float
) -> None:
    shape = (37,) if targets is None else (37, targets)
    y = torch.randn(shape) * torch.arange(1, 1 + shape[-1]) + offset
    x = y + 0.5 * torch.randn(shape)
    truth, guess = (t.numpy().astype(np.float64).reshape(37, -1) for t in (y, x))
    error = guess - truth
    spread = ((truth - truth.mean(0)) ** 2).sum(0)
    expected = {
        "loss": (error**2).mean(),
        "mse": (error**2).mean(),
        "mae": np.abs(error).mean(),
        "rmse": np.sqrt((error**2).mean()),
        "r2": (1 - (error**2).sum(0) / spread).mean(),
    }
    objective = RegressionObjective()
    assert objective.metrics(totals(objective, x, y, cuts)) == pytest.approx(expected, rel=1e-6)
    assert objective.weight(y) == 37
    assert weighted_loss(objective, x, y, cuts) == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.parametrize("value", [0.0, 3.7, 1e6])
def test_r2_of_a_target_that_does_not_vary_is_left_out(value: float) -> None:
    objective, y = RegressionObjective(), torch.full((50,), value)
    sums = totals(objective, torch.randn(50), y, [20, 30])
    assert "r2" not in objective.metrics(sums)


@pytest.mark.parametrize(("output", "target"), [((8, 1), (8,)), ((8,), (8, 1)), ((8, 1), (8, 1))])
def test_one_number_a_sample_is_compared_sample_by_sample(
    output: tuple[int, ...], target: tuple[int, ...]
) -> None:
    x, y = torch.randn(8), torch.randn(8)
    expected = float((x - y).square().mean())
    objective, batch = RegressionObjective(), (x.view(output), y.view(target))
    assert objective(*batch).shape == () and float(objective(*batch)) == pytest.approx(expected)
    assert objective.metrics(objective.batch_sums(*batch))["mse"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("output", "target"),
    [((8, 2), (8,)), ((8,), (8, 2)), ((8, 3, 2), (8, 2, 3)), ((), (8,))],
)
def test_shapes_that_differ_are_an_error(output: tuple[int, ...], target: tuple[int, ...]) -> None:
    for measure in (RegressionObjective(), RegressionObjective().batch_sums):
        with pytest.raises(UsageError, match=r"model:? returns .* for targets of"):
            measure(torch.randn(output), torch.randn(target))


def test_a_row_of_outputs_for_one_float_a_sample_names_both_ways_out() -> None:
    with pytest.raises(DataError, match="targets are floats, .* data.task=cl.* as many num"):
        RegressionObjective()(torch.randn(8, 2), torch.zeros(8))
