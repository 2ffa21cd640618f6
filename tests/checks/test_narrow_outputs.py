"""Outputs of few bits: nothing is rounded out of its limits, and shares are shares."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from runner import sanitise
from runner.errors import UsageError


def test_many_classes_in_few_bits_are_shares_too() -> None:
    clean, changes = sanitise(torch.full((2, 200), math.nan, dtype=torch.bfloat16), "probabilities")
    assert clean.unique().tolist() == [float(torch.tensor(1 / 200).bfloat16())]
    assert changes.read()["rescaled"] == 2
    halves = torch.full((1, 2000), 1.5 / 2000, dtype=torch.float16)
    assert abs(float(sanitise(halves, "probabilities")[0].double().sum()) - 1) < 1e-3


FLOATS8 = (torch.float8_e4m3fn, torch.float8_e5m2)
CLASSES = [
    (torch.tensor([5000.0, math.inf]).bfloat16(), {"classes": 1000}, [996, 996]),
    (torch.tensor([5.0, math.inf]).half(), {"classes": 100_000}, [5, 65504]),
    (torch.tensor([3, 255], dtype=torch.uint8), {"classes": 1000}, [3, 255]),
    (torch.tensor([-3, 127], dtype=torch.int8), {"classes": 1000}, [0, 127]),
    *((torch.tensor([3, 9]).to(kind), {"classes": 8}, [3, 7])
      for kind in (torch.uint16, torch.uint32, torch.uint64)),
    (torch.tensor([-1]).to(torch.uint64), {"high": 2.0**63, "low": 1}, [2**63]),
    *((torch.tensor([math.nan, 30.0, 3]).to(kind), {"classes": 18}, [0, 16, 3])
      for kind in FLOATS8),
]  # fmt: skip


@pytest.mark.parametrize(("x", "options", "expected"), CLASSES)
def test_classes_are_such_as_their_type_holds(
    x: Tensor, options: dict[str, Any], expected: list[int]
) -> None:
    clean, _ = sanitise(x, "classes", **options)
    assert clean.dtype is x.dtype and [int(value) for value in clean.tolist()] == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, *FLOATS8])
def test_casting_takes_no_quantity_beyond_its_limits(dtype: torch.dtype) -> None:
    x = torch.tensor([-9.0, 0.5, 9.0, math.nan]).to(dtype)
    clean, _ = sanitise(x, "quantities", low=-0.999, high=0.999, nan=5.0)
    assert clean.dtype is dtype
    assert bool((clean.double().abs() <= 0.999).all()) and float(clean[1]) == 0.5
    whole, _ = sanitise(torch.tensor([0, 200], dtype=torch.uint8), "quantities", low=-5, high=1000)
    assert whole.tolist() == [0, 200]
    for spoiled in (x, {"a": x}):
        assert sanitise(spoiled)[1].read()["nan"] == 1


def test_limits_that_a_type_holds_no_number_between_are_refused() -> None:
    with pytest.raises(UsageError, match="holds no number"):
        sanitise(torch.zeros(2).bfloat16(), "quantities", low=0.9991, high=0.9992)
    with pytest.raises(UsageError, match="holds no number"):
        sanitise(torch.zeros(2, dtype=torch.uint8), "quantities", low=300, high=400)
    with pytest.raises(UsageError, match="neither 0 nor Inf"):
        sanitise(torch.ones(2).to(torch.float8_e8m0fnu))
