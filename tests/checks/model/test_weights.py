"""What the numbers say: a fault planted in a model is named, with its place; honest models pass."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner.checks.model.behaviour import Expected
from runner.checks.model.check import check_model
from runner.security.trust import Severity

FAULT, WARNING, NOTE = Severity.REFUSAL, Severity.WARNING, Severity.NOTE


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 8),
        nn.Embedding(5, 8, padding_idx=0),
    )  # fmt: skip


def fill(path: str, value: float, *at: Any) -> Callable[[nn.Module], None]:
    def plant(model: nn.Module) -> None:
        tensor = model.state_dict()[path]
        tensor[at if at else ...] = value

    return plant


def copied(model: nn.Module) -> None:
    model[4].weight.data.copy_(model[3].weight.data)


def frozen_copy(model: nn.Module) -> None:
    copied(model)
    model[4].requires_grad_(False)


def named(name: str, values: list[float], parameter: bool = False) -> Callable[[nn.Module], None]:
    def plant(model: nn.Module) -> None:
        tensor = torch.tensor(values)
        if parameter:
            model.register_parameter(name, nn.Parameter(tensor))
        else:
            model.register_buffer(name, tensor)

    return plant


PLANTED: list[tuple[str, Callable[[nn.Module], None], str, Severity, str]] = [
    ("NaN", fill("3.weight", math.nan, 2, 7), "weights.not_finite", FAULT, "3.weight"),
    ("Inf in a bias", fill("0.bias", math.inf, 1), "weights.not_finite", FAULT, "0.bias"),
    ("NaN in statistics", fill("1.running_mean", math.nan), "weights.not_finite", FAULT,
     "1.running_mean"),
    ("-Inf in statistics", fill("1.running_var", -math.inf, 0), "weights.not_finite", FAULT,
     "1.running_var"),
    ("a flipped exponent", fill("4.weight", 3e29, 0, 0), "weights.huge", WARNING, "4.weight"),
    ("a bias beyond all", fill("4.bias", -1e13, 0), "weights.huge", WARNING, "4.bias"),
    ("huge statistics", fill("1.running_mean", 1e31), "weights.huge", WARNING, "1.running_mean"),
    ("negative variance", fill("1.running_var", -0.1, 3), "weights.negative_variance", FAULT,
     "1.running_var"),
    ("a dead layer", fill("3.weight", 0.0), "weights.dead", WARNING, "3.weight"),
    ("a layer of next to nothing", fill("3.weight", 1e-38), "weights.dead", WARNING, "3.weight"),
    ("a dead norm", fill("1.weight", 0.0), "weights.dead", WARNING, "1.weight"),
    ("dead units", fill("3.weight", 0.0, slice(1, 4)), "weights.dead_units", WARNING, "3.weight"),
    ("words that are zero", fill("5.weight", 0.0, slice(0, 3)), "weights.dead_units", NOTE,
     "5.weight"),
    ("a constant layer", fill("3.weight", 0.5), "weights.constant", WARNING, "3.weight"),
    ("a copied layer", copied, "weights.duplicated", WARNING, "3.weight"),
    ("a frozen copy", frozen_copy, "weights.duplicated", NOTE, "3.weight"),
]  # fmt: skip


@pytest.mark.parametrize(("plant", "code", "severity", "where"), [row[1:] for row in PLANTED],
                         ids=[row[0] for row in PLANTED])  # fmt: skip
def test_a_planted_fault_is_named_with_its_place_and_nothing_else_is(
    plant: Callable[[nn.Module], None], code: str, severity: Severity, where: str
) -> None:
    model = net()
    assert check_model(model).reasons == []
    plant(model)
    report = check_model(model)
    assert [(r.code, r.severity, r.where) for r in report.reasons] == [(code, severity, where)]
    assert report.ok is (severity is NOTE)


def tie(model: nn.Module) -> None:
    model[4].weight = model[3].weight


def share(model: nn.Module) -> None:
    model[4].weight = nn.Parameter(model[3].weight.data)


def mask(model: nn.Module) -> None:
    model.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
    model.register_buffer("least", torch.full((4, 4), torch.finfo(torch.float32).min).triu(1))


def large_tables(model: nn.Module) -> None:
    model[1].running_var.fill_(1e18)  # raw numbers of bytes
    model[1].running_mean.fill_(1e9)
    model[4].bias.data.fill_(2.5e5)  # the mean price of a house


def integers(model: nn.Module) -> None:
    model.register_buffer("ids", torch.full((3, 3), -(2**40)))
    model.register_buffer("on", torch.zeros(3, 3, dtype=torch.bool))


HONEST: list[tuple[str, Callable[[nn.Module], None]]] = [
    ("tied layers", tie),
    ("two parameters of the same memory", share),
    ("masks of -Inf and of the least number", mask),
    ("statistics of raw inputs", large_tables),
    ("a log-variance below 0", named("log_var", [-4.0, -3.0], True)),
    ("a noise that a noisy layer lets go below 0", named("weight_sigma", [0.1, -0.1], True)),
    ("a bias of zeros", fill("3.bias", 0.0)),
    ("a norm of ones", fill("1.weight", 1.0)),
    ("a buffer of zeros", named("cache", [0.0, 0.0])),
    ("integers", integers),
    ("an empty tensor", lambda m: m.register_buffer("none", torch.zeros(0, 4))),
    ("complex", lambda m: m.register_buffer("waves", torch.randn(3, 3, dtype=torch.complex64))),
    ("16 bits", lambda m: m.to(torch.bfloat16)),
    ("8 bits", lambda m: m.register_buffer("b", torch.randn(4, 4).to(torch.float8_e4m3fn))),
    ("a layer of other memory format", lambda m: m.append(
        nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last))),
]  # fmt: skip


@pytest.mark.parametrize("change", [row[1] for row in HONEST], ids=[row[0] for row in HONEST])
def test_an_honest_model_is_passed(change: Callable[[nn.Module], None]) -> None:
    model = net()
    change(model)
    assert check_model(model).reasons == []


def test_not_finite_values_are_counted_and_the_first_is_placed() -> None:
    model = net()
    model[3].weight.data[2, 7] = math.nan
    model[3].weight.data[5, 0] = -math.inf
    (reason,) = check_model(model).reasons
    assert reason.evidence == "1 NaN and 1 Inf of 64 values, the first at [2, 7]"


def test_tied_layers_are_told_apart_from_copies() -> None:
    model = net()
    tie(model)
    assert check_model(model).facts["tied"] == [["3.weight", "4.weight"]]
    share(model)
    assert check_model(model).facts["tied"] == [["3.weight", "4.weight"]]
    copied(net_ := net())
    assert check_model(net_).facts["tied"] == []
    assert "4.weight" in check_model(net_).reasons[0].evidence


def test_units_of_a_transposed_convolution_lie_along_its_second_dimension() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(4, 3, 2))
    model[0].weight.data[:, 1] = 0
    (reason,) = check_model(model).reasons
    assert (reason.code, reason.evidence) == ("weights.dead_units", "1 of 3 units are all zero")
    model = nn.Sequential(nn.ConvTranspose2d(4, 3, 2))
    model[0].weight.data[1] = 0  # an input that is not used is no dead unit
    assert check_model(model).reasons == []


def test_a_model_yet_to_be_trained_may_begin_with_copies_and_zeros() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)  # deep copies of it
    model.head = nn.Linear(8, 3)
    nn.init.zeros_(model.head.weight)
    fresh = check_model(model, expected=Expected(trained=False))
    assert fresh.ok and {r.code for r in fresh.reasons} == {"weights.duplicated", "weights.dead"}
    assert not check_model(model).ok


def test_what_has_no_plain_memory_is_passed_over_and_said() -> None:
    model = nn.Sequential(nn.Linear(4, 4, device="meta"), nn.LazyLinear(3), nn.Linear(3, 3))
    report = check_model(model)
    assert report.ok
    assert report.facts["not_checked"] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_what_tensors_say_of_themselves_is_not_asked() -> None:
    """Attributes, which a loaded file may bring, cover methods; NaN is found all the same."""
    model = net()
    for parameter in model.parameters():
        parameter.isnan = parameter.numel = parameter.flatten = set
    model[0].weight.data[0, 0] = math.nan
    codes = {r.code: r.where for r in check_model(model).reasons}
    assert codes["weights.not_finite"] == "0.weight"


def test_weights_are_read_from_the_device_in_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    own = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda self: reads.append(self.shape) or own(self))
    monkeypatch.setattr(Tensor, "item", lambda self: pytest.fail("a read of its own"))
    check_model(net())
    assert reads == [(11, 5)]


@pytest.mark.gpu
def test_a_model_on_an_accelerator_is_looked_at_there() -> None:
    model = copy.deepcopy(net()).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchron"):
            check_model(model)  # the one read
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert check_model(model).reasons == []
    model[3].weight.data[2, 7] = math.nan
    assert [r.code for r in check_model(model).reasons] == ["weights.not_finite"]
