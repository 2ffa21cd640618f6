"""`check_model`: a planted fault is named with its place; honest models pass, unchanged."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from runner.checks.model.behaviour import Expected
from runner.checks.model.check import MAX_SAMPLES, check_model
from runner.security.trust import Severity

FAULT, WARNING, NOTE = Severity.REFUSAL, Severity.WARNING, Severity.NOTE
Change = Callable[[nn.Module], Any]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.BatchNorm1d(8),
        nn.Sequential(nn.Linear(8, 8)),
        nn.Linear(8, 8),
        nn.Embedding(5, 8, padding_idx=0),
    )


def fill(path: str, value: float, *at: Any) -> Change:
    def plant(model: nn.Module) -> str:
        model.state_dict()[path][at if at else ...] = value
        return path

    return plant


PLANTED: dict[str, tuple[Change, str, Severity]] = {
    "NaN": (fill("3.weight", math.nan, 2, 7), "not_finite", FAULT),
    "Inf in a bias": (fill("0.bias", math.inf, 1), "not_finite", FAULT),
    "-Inf in statistics": (fill("1.running_var", -math.inf, 0), "not_finite", FAULT),
    "a flipped exponent": (fill("3.weight", 3e29, 0, 0), "huge", WARNING),
    "a bias beyond all": (fill("3.bias", -1e13, 0), "huge", WARNING),
    "a negative variance": (fill("1.running_var", -0.1, 3), "negative_variance", FAULT),
    "a dead layer": (fill("3.weight", 1e-38), "dead", WARNING),
    "a dead norm": (fill("1.weight", 0.0), "dead", WARNING),
    "dead units": (fill("3.weight", 0.0, slice(1, 4)), "dead_units", WARNING),
    "zero words": (fill("4.weight", 0.0, slice(0, 3)), "dead_units", NOTE),
    "a constant layer": (fill("3.weight", 0.5), "constant", WARNING),
}


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


def raw_statistics(model: nn.Module) -> None:
    model[1].running_var.fill_(1e18)
    model[3].bias.data.fill_(2.5e5)  # the mean price of a house


def buffers(model: nn.Module) -> None:
    model.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
    model.register_buffer("ids", torch.full((3, 3), -(2**40)))
    model.register_buffer("none", torch.zeros(0, 4))
    model.register_buffer("waves", torch.randn(3, 3, dtype=torch.complex64))
    model.register_buffer("bytes", torch.randn(4, 4).to(torch.float8_e4m3fn))


def recomputed(model: nn.Module) -> None:
    from contextlib import ExitStack

    from runner.techniques.recompute import Recomputed, RecomputePolicy

    Recomputed(RecomputePolicy.full, [model[2]]).wrap(ExitStack())


HONEST: dict[str, Change] = {
    "tied layers": tie,
    "statistics of raw inputs": raw_statistics,
    "buffers of any kind": buffers,
    "16 bits": lambda m: m.to(torch.bfloat16),
    "weight norm of torch": lambda m: parametrizations.weight_norm(m[0]),
    "attention and recurrent layers": lambda m: m.extend(
        [nn.TransformerEncoderLayer(6, 2, 8), nn.LSTM(6, 4, 2)]
    ),
    "blocks that the runner recomputes": recomputed,
    "a script": lambda m: m.append(torch.jit.script(nn.Linear(2, 2))),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("what", HONEST)
def test_an_honest_model_is_passed(what: str) -> None:
    model = net()
    HONEST[what](model)
    assert check_model(model).findings == []


def test_units_of_a_transposed_convolution_lie_along_its_second_dimension() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(4, 3, 2))
    model[0].weight.data[:, 1] = 0
    (reason,) = check_model(model).reasons
    assert (reason.code, reason.evidence) == ("weights.dead_units", "1 of 3 units are all zero")


def test_a_model_yet_to_be_trained_may_have_zero_layers() -> None:
    model = net()
    nn.init.zeros_(model[3].weight)
    for trained, ok in ((False, True), (None, True), (True, False)):
        report = check_model(model, expected=Expected(trained=trained))
        assert report.ok is ok and [r.code for r in report.reasons] == ["weights.dead"]


def test_what_has_no_plain_memory_is_passed_over_and_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4, device="meta"), nn.LazyLinear(3), nn.Linear(3, 3))
    report = check_model(model)
    assert report.ok
    assert report.facts["not_checked"] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_weights_are_read_from_the_device_in_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    own = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda self: reads.append(self.shape) or own(self))
    monkeypatch.setattr(Tensor, "item", lambda self: pytest.fail("a read of its own"))
    check_model(net())
    assert len(reads) == 1


@pytest.mark.gpu
def test_a_model_on_an_accelerator_is_checked_there() -> None:
    model = copy.deepcopy(net()).cuda()
    assert check_model(model).reasons == []
    model[3].weight.data[2, 7] = math.nan
    assert [r.code for r in check_model(model).reasons] == ["weights.not_finite"]


# -- behaviour -------------------------------------------------------------------------------------

LOGITS = Expected("logits", 3)
N = 24


class Answering(nn.Module):
    """Whatever a function makes of its inputs; one weight, so that it has a device."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 12).reshape(4, 3))
        self.register_buffer("seen", torch.zeros(()))
        self.answer = answer

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.answer(self, *inputs, **named)


def probes(n: int = N) -> Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(3))


def linear(m: Answering, x: Tensor) -> Tensor:
    return x @ m.weight


def ids(m: Answering, x: Tensor) -> Tensor:
    return (x @ m.weight).argmax(1)


def counting(m: Answering, x: Tensor) -> Tensor:
    m.seen += 1
    return x @ m.weight


def raises(m: Answering, x: Tensor) -> Tensor:
    raise ValueError("no such shape")


def one_class(m: Answering, x: Tensor) -> Tensor:
    return x @ m.weight + torch.tensor([0.0, 50.0, 0.0])


FAULTS: dict[str, tuple[Callable[..., Any], Expected, str]] = {
    "a NaN for one sample": (
        lambda m, x: (x @ m.weight).index_fill(0, torch.tensor([2]), math.nan),
        *(LOGITS, "not_finite"),
    ),
    "an Inf in a named part": (
        lambda m, x: {"logits": x @ m.weight, "scale": x.sum(1) / 0},
        *(LOGITS, "not_finite"),
    ),
    "the same for all": (lambda m, x: 0 * x @ m.weight + m.weight[0], LOGITS, "constant"),
    "one class for all": (one_class, LOGITS, "constant"),
    "probabilities that are logits": (linear, Expected("probabilities"), "out_of_range"),
    "a class that there is not": (ids, Expected("ids", 2), "out_of_range"),
    "absurd logits": (lambda m, x: 1e8 * x @ m.weight, LOGITS, "out_of_range"),
    "dropout in evaluation mode": (lambda m, x: F.dropout(x @ m.weight, 0.5), LOGITS, "random"),
    "statistics that go on": (counting, LOGITS, "writes"),
    "a model that raises": (raises, LOGITS, "raises"),
}
WHERE = {"not_finite": "output", "writes": "seen"}


def found(answer: Callable[..., Any], inputs: Any, expected: Expected) -> list[Any]:
    report = check_model(Answering(answer), inputs, expected=expected)
    return [(r.code, r.severity, r.where) for r in report.reasons]


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_of_behaviour_is_named_and_nothing_else_is(what: str) -> None:
    answer, expected, code = FAULTS[what]
    severity = FAULT if code == "not_finite" else WARNING
    where = "output.scale" if "named" in what else WHERE.get(code, "")
    finding = (f"behaviour.{code}", severity, where)
    assert found(answer, probes(), expected) == [finding]


WELL_BEHAVED: dict[str, tuple[Callable[..., Any], Any, Expected]] = {
    "linear": (linear, probes(), LOGITS),
    "logits of what may not be chosen": (
        lambda m, x: (x @ m.weight).index_fill(1, torch.tensor([1]), -math.inf),
        *(probes(), LOGITS),
    ),
    "probabilities": (lambda m, x: (x @ m.weight).softmax(1), probes(), Expected("probabilities")),
    "ids": (ids, probes(), Expected("ids", 3)),
    "large quantities": (lambda m, x: 1e9 * x.sum(1), probes(), Expected("values")),
    "probes that are all the same": (linear, torch.ones(N, 4), LOGITS),
    "probes of one class": (
        *(one_class, probes(), Expected("logits", 3, torch.ones(N, dtype=torch.int64))),
    ),
    "one probe": (linear, probes(1), LOGITS),
    "by name": (lambda m, x: {"logits": x @ m.weight, "mask": x > 0}, {"x": probes()}, LOGITS),
    "16 bits": (lambda m, x: (x @ m.weight).bfloat16(), probes(), LOGITS),
    "an answer that is no tensor": (lambda m, x: "text", probes(), Expected()),
}


@pytest.mark.parametrize("what", WELL_BEHAVED)
def test_honest_answers_pass(what: str) -> None:
    assert found(*WELL_BEHAVED[what]) == []


def test_a_model_yet_to_be_trained_may_say_the_same_to_all() -> None:
    for name in ("the same for all", "one class for all"):
        (finding,) = found(FAULTS[name][0], probes(), Expected("logits", 3, trained=False))
        assert finding[1] is NOTE


class Changing(nn.Module):
    """Writes to all it has, in training and in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)
        self.register_buffer("count", torch.zeros(()))
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.calls.append(len(x))
        self.last = x.mean()
        random.random(), np.random.rand(), torch.rand(1)
        self.layer.weight.data.mul_(0.9)
        self.norm.train()
        return self.norm(self.layer(x))  # type: ignore[no-any-return]


def test_nothing_is_left_behind() -> None:
    model = Changing()
    model.layer.eval()
    model.layer.weight.grad = gradient = torch.ones(3, 4)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    modes, attributes = [m.training for m in model.modules()], set(vars(model))
    noise = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    report = check_model(model, probes(1024))
    assert report.facts["probes"] == MAX_SAMPLES
    assert "behaviour.writes" in {r.code for r in report.reasons}
    assert all(torch.equal(values[name], value) for name, value in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes
    assert model.calls == [] and set(vars(model)) == attributes
    assert model.layer.weight.grad is gradient
    assert (random.getstate(), np.random.get_state()[1].tolist()) == noise[:2]
    assert torch.equal(torch.get_rng_state(), noise[2])


def test_a_compiled_model_is_checked_without_compiling() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = nn.Sequential(nn.Linear(4, 3))
    assert check_model(torch.compile(model), probes(), expected=LOGITS).findings == []
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0
