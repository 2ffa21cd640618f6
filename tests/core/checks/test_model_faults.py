"""`check_model`: a planted fault is named with its place; sound models pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from runner.core.checks.model import check_model
from runner.core.findings import Severity
from runner.core.techniques.recompute import RecomputedBlocks, RecomputePolicy

FAULT, WARNING, NOTE = Severity.REFUSAL, Severity.WARNING, Severity.NOTE
Change = Callable[[nn.Module], Any]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 8)
    )


def fill(path: str, value: float, *at: Any) -> Change:
    def plant(model: nn.Module) -> str:
        model.state_dict()[path][at] = value
        return path

    return plant


def no_units(model: nn.Module) -> str:
    model[3] = nn.Linear(8, 0, bias=False)
    return "3.weight"


def two_types(model: nn.Module) -> str:
    model[3].double()
    return ""


PLANTED: dict[str, tuple[Change, str, Severity]] = {
    "NaN": (fill("3.weight", math.nan, 2, 7), "not_finite", FAULT),
    "Inf in a bias": (fill("0.bias", math.inf, 1), "not_finite", FAULT),
    "-Inf in statistics": (fill("1.running_var", -math.inf, 0), "not_finite", FAULT),
    "a size of 0": (no_units, "empty", WARNING),
    "float64 in one layer": (two_types, "dtypes", NOTE),
}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_fault_is_named_with_its_place_and_nothing_else_is(what: str) -> None:
    plant, code, severity = PLANTED[what]
    model = net()
    where = plant(model)
    report = check_model(model)
    expected = [(f"weights.{code}", severity, where)]
    assert [(r.code, r.severity, r.where) for r in report.reasons] == expected
    assert report.ok is (severity is NOTE)


def tie(model: nn.Module) -> None:
    model[3].weight = model[2][0].weight


def buffers(model: nn.Module) -> None:
    model.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
    model.register_buffer("min_val", torch.tensor(math.inf))  # of a quantisation observer
    model.register_buffer("ids", torch.full((3, 3), -(2**40)))
    model.register_buffer("none", torch.zeros(0, 4))
    model.register_buffer("wide", torch.full((2,), 1e300, dtype=torch.float64))
    model.register_buffer("waves", torch.randn(3, 3, dtype=torch.complex64))
    model.register_buffer("bytes", torch.randn(4, 4).to(torch.float8_e4m3fn))


SOUND: dict[str, Change] = {
    "tied layers": tie,
    "buffers of any kind": buffers,
    "16 bits": lambda m: m.to(torch.bfloat16),
    "weight norm of torch": lambda m: parametrizations.weight_norm(m[0]),
    "blocks that the runner recomputes": lambda m: RecomputedBlocks(
        RecomputePolicy.full, [m[2]]
    ).wrap(ExitStack()),
    "a script": lambda m: m.append(torch.jit.script(nn.Linear(2, 2))),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("what", SOUND)
def test_a_sound_model_is_passed(what: str) -> None:
    model = net()
    SOUND[what](model)
    assert check_model(model).reasons == []


def test_what_has_no_plain_memory_is_passed_over_and_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4, device="meta"), nn.LazyLinear(3), nn.Linear(3, 3))
    report = check_model(model)
    assert report.ok
    assert report.facts["not_checked"] == ["0.weight", "0.bias", "1.weight", "1.bias"]


@pytest.mark.gpu
def test_a_model_on_an_accelerator_is_checked_there() -> None:
    model = net().to("cuda")
    where = fill("3.weight", math.nan, 2, 7)(model)
    assert [reason.where for reason in check_model(model).reasons] == [where]
