"""Honest batches that look odd: large numbers, small deviations, texts padded as they come."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from runner.checks.config import InputsConfig, Policy, SchemaConfig
from runner.checks.inputs.here import numbers
from runner.checks.inputs.look import InputChecks
from runner.checks.inputs.measure import Labels, Measure, key_of, leaves, plan_of

N = 32
LARGE = {
    "nanoseconds": lambda draw: (1.7e18 + 1e15 * draw).float(),
    "whole nanoseconds": lambda draw: (1.7e18 + 1e15 * draw).long(),
    "pascal": lambda draw: (101325 + 60 * draw).float(),
    "next to the largest float32": lambda draw: (1e38 * draw.clamp(-3, 3)).float(),
    "beyond float32": lambda draw: 1e200 * draw,
    "next to nothing": lambda draw: (1e-30 * draw).float(),
}


@pytest.mark.parametrize("what", LARGE)
@pytest.mark.parametrize("width", [8, 2500])  # by numpy, and by torch
def test_numbers_of_any_size_are_no_drift_and_no_inf(what: str, width: int) -> None:
    own = torch.Generator().manual_seed(0)
    checks = InputChecks(InputsConfig(baseline=10, not_finite=Policy.skip))
    y = torch.zeros(N)
    for _ in range(60 if width > 8 else 200):
        draw = torch.randn(N, width, generator=own, dtype=torch.float64)
        assert checks.look((LARGE[what](draw), y), 0) == []
    x = LARGE[what](draw)
    if x.is_floating_point():
        x[3, 2] = math.inf
        assert [r.code for r in checks.look((x, y), 0)] == ["input.not_finite"]


@pytest.mark.parametrize("what", LARGE)
def test_both_ways_to_take_numbers_agree_on_any_size(what: str) -> None:
    draw = torch.randn(N, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = leaves((LARGE[what](draw), torch.zeros(N)))
    plan, measure = plan_of(key_of(found), Labels()), Measure(Labels())
    mine, theirs = numbers(measure, found, plan), measure.row(found, plan).tolist()
    assert np.isfinite(mine).all() and np.isfinite(theirs).all()
    np.testing.assert_allclose(mine[:4], theirs[:4], rtol=2e-2)


def texts(length: int, named: bool, features: int = 7) -> tuple[object, Tensor]:
    own = torch.Generator().manual_seed(length)
    ids = torch.randint(0, 50, (N, length), generator=own)
    if not named:
        return ids, ids.clone()
    mask = torch.ones(N, 1, length, length, dtype=torch.bool)
    rest = {"attention_mask": mask, "extra": torch.randn(N, features, generator=own)}
    return {"input_ids": ids, **rest}, ids.clone()


@pytest.mark.parametrize("named", [False, True])
def test_texts_may_be_padded_to_another_length_than_all_the_first_ones(named: bool) -> None:
    config = InputsConfig(baseline=8, drift=Policy.off)
    checks = InputChecks(config, vocab=None if named else 50, longest=128)
    for _ in range(10):
        assert checks.look(texts(128, named)) == []
    assert checks.look(texts(120, named)) == []
    (reason,) = checks.look(texts(140, named))
    assert reason.code == "input.form" and "[140] a sample, and should be" in reason.evidence
    if named:
        (reason,) = checks.look(texts(120, named, features=6))
        assert "inputs.extra is float32 of shape [6]" in reason.evidence
    unbounded = InputChecks(config, vocab=None if named else 50)
    for _ in range(10):
        unbounded.look(texts(128, named))
    assert unbounded.look(texts(140, named)) == []


def test_a_length_that_the_config_gives_holds_for_texts_too() -> None:
    config = InputsConfig(baseline=8, drift=Policy.off, schema=SchemaConfig(shape=[128]))
    checks = InputChecks(config, vocab=50)
    for _ in range(10):
        assert checks.look(texts(128, False)) == []
    assert [r.code for r in checks.look(texts(120, False))] == ["input.form"]


def test_columns_of_whole_numbers_are_no_text() -> None:
    checks = InputChecks(InputsConfig(baseline=8, drift=Policy.off))
    for _ in range(10):
        assert checks.look(texts(128, False)) == []
    assert [r.code for r in checks.look(texts(120, False))] == ["input.form"]
