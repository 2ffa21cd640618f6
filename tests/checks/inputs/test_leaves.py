"""Every dense tensor of a batch is looked at: complex ones, and the ninth; others are named."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from runner.checks.config import InputsConfig, Policy, SchemaConfig
from runner.checks.inputs.here import numbers
from runner.checks.inputs.look import InputChecks
from runner.checks.inputs.measure import Labels, Measure, key_of, leaves, plan_of
from runner.checks.inputs.samples import culprits

N = 16


def complex_batch(seed: int, spoil: complex | None = None) -> Any:
    own = torch.Generator().manual_seed(seed)
    x = torch.randn(N, 4, dtype=torch.complex64, generator=own)
    if spoil is not None:
        x[3, 2] = spoil
    return x.conj(), torch.zeros(N)


@pytest.mark.parametrize("spoil", [complex(math.nan, 0), complex(0, math.inf), complex(0, -1e4)])
def test_complex_numbers_are_looked_at_as_pairs(spoil: complex) -> None:
    checks = InputChecks(InputsConfig(baseline=8))
    for seed in range(40):
        assert checks.look(complex_batch(seed), 0) == []
    batch = complex_batch(99, spoil)
    code = "range" if math.isfinite(spoil.imag) and math.isfinite(spoil.real) else "not_finite"
    assert [reason.code for reason in checks.look(batch, 0)] == [f"input.{code}"]
    seen = checks.see(batch)
    checks.judge(seen, numbers(checks.measure, seen.found, seen.plan), 99, None)
    bad = culprits(seen, seen.findings[0], checks.known)
    assert bad is not None and bad.nonzero().flatten().tolist() == [3]


def many(seed: int, spoilt: int | None = None, label: int = 1) -> Any:
    own = torch.Generator().manual_seed(seed)
    x = {f"k{i}": torch.randn(N, 3, generator=own) for i in range(20)}
    if spoilt is not None:
        x[f"k{spoilt}"][5, 1] = math.nan
    return x, torch.full((N,), label)


def test_values_and_labels_of_any_number_of_tensors_are_looked_at() -> None:
    checks = InputChecks(InputsConfig(baseline=8, duplicates=Policy.off), classes=2)
    for seed in range(20):
        assert checks.look(many(seed), 0) == []
    for spoilt in (0, 7, 8, 19):
        (reason,) = checks.look(many(50, spoilt), 0)
        assert (reason.code, reason.where) == ("input.not_finite", f"inputs.k{spoilt}")
    assert [r.code for r in checks.look(many(51, label=2), 0)] == ["input.labels"]
    bounded = InputChecks(InputsConfig(schema=SchemaConfig(high=1.0)))
    assert len(bounded.look(many(52), 0)) == 20


def test_both_ways_to_take_numbers_agree_on_many_tensors() -> None:
    found = leaves(many(1))
    plan, measure = plan_of(key_of(found), Labels(classes=2)), Measure(Labels(classes=2))
    mine, theirs = numbers(measure, found, plan), measure.row(found, plan)
    torch.testing.assert_close(torch.tensor(mine), theirs, rtol=1e-4, atol=1e-4)


def test_what_is_not_looked_at_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    checks = InputChecks()
    for seed in range(3):
        x = torch.randn(N, 3, generator=torch.Generator().manual_seed(seed))
        assert checks.look(({"sparse": x.to_sparse(), "x": x}, torch.zeros(N)), 0) == []
    assert [record.getMessage() for record in caplog.records] == [
        "checks.inputs looks at dense tensors only, not at inputs.sparse"
    ]
