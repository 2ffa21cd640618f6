"""`check_model`: a planted fault is named with its place; honest models pass, unchanged."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from runner.checks.model.behaviour import Expected
from runner.checks.model.check import MAX_SAMPLES, check_model
from runner.objectives.deferred_logits import defer
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
    def plant(model: nn.Module) -> None:
        model.state_dict()[path][at if at else ...] = value

    return plant


def copied(model: nn.Module) -> None:
    model[3].weight.data.copy_(model[2][0].weight.data)


def listening(*args: Any, **kwargs: Any) -> None:
    """A hook of unknown code."""


def loud(self: nn.Module, x: Tensor) -> Tensor:
    return x


class Foreign(nn.Linear):
    """A layer of an unknown package."""


def hold(name: str, value: Any) -> Change:
    return lambda model: setattr(model[2], name, value)


def on(register: str, hook: Any = listening) -> Change:
    return lambda model: getattr(model[2], register)(hook)


PLANTED: dict[str, tuple[Change, str, Severity, str]] = {
    "NaN": (fill("3.weight", math.nan, 2, 7), "weights.not_finite", FAULT, "3.weight"),
    "Inf in a bias": (fill("0.bias", math.inf, 1), "weights.not_finite", FAULT, "0.bias"),
    "-Inf in statistics": (
        *(fill("1.running_var", -math.inf, 0), "weights.not_finite", FAULT, "1.running_var"),
    ),
    "a flipped exponent": (fill("3.weight", 3e29, 0, 0), "weights.huge", WARNING, "3.weight"),
    "a bias beyond all": (fill("3.bias", -1e13, 0), "weights.huge", WARNING, "3.bias"),
    "a negative variance": (
        *(fill("1.running_var", -0.1, 3), "weights.negative_variance", FAULT, "1.running_var"),
    ),
    "a dead layer": (fill("3.weight", 1e-38), "weights.dead", WARNING, "3.weight"),
    "a dead norm": (fill("1.weight", 0.0), "weights.dead", WARNING, "1.weight"),
    "dead units": (fill("3.weight", 0.0, slice(1, 4)), "weights.dead_units", WARNING, "3.weight"),
    "zero words": (fill("4.weight", 0.0, slice(0, 3)), "weights.dead_units", NOTE, "4.weight"),
    "a constant layer": (fill("3.weight", 0.5), "weights.constant", WARNING, "3.weight"),
    "a copied layer": (copied, "weights.duplicated", WARNING, "2.0.weight"),
    "a hook": (on("register_forward_hook"), "hooks.unexpected", WARNING, "2"),
    "a hook on gradients": (on("register_full_backward_hook"), "hooks.unexpected", WARNING, "2"),
    "a hook in a partial": (
        *(on("register_forward_hook", partial(listening, 1)), "hooks.unexpected", WARNING, "2"),
    ),
    "a hook behind torch's wrapper": (
        on("register_forward_hook", torch.no_grad()(listening)),
        *("hooks.unexpected", WARNING, "2"),
    ),
    "a built-in as a hook": (
        *(on("register_forward_hook", exec), "hooks.unexpected", WARNING, "2"),
    ),
    "a hook on a weight": (
        lambda m: m[0].weight.register_hook(listening),
        *("hooks.unexpected", WARNING, "0.weight"),
    ),
    "a foreign class": (hold("1", Foreign(8, 3)), "structure.foreign_class", NOTE, "2.1"),
    "a forward of its own": (
        lambda m: setattr(m[2], "forward", MethodType(loud, m[2])),
        *("structure.patched_method", WARNING, "2.forward"),
    ),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_fault_is_named_with_its_place_and_nothing_else_is(what: str) -> None:
    plant, code, severity, where = PLANTED[what]
    model = net()
    plant(model)
    report = check_model(model)
    assert [(r.code, r.severity, r.where) for r in report.reasons] == [(code, severity, where)]
    assert report.ok is (severity is NOTE)


def tie(model: nn.Module) -> None:
    model[3].weight = model[2][0].weight


def share(model: nn.Module) -> None:
    model[3].weight = nn.Parameter(model[2][0].weight.data)


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

    Recomputed(RecomputePolicy.full, [model[2]], 1).wrap(ExitStack())


HONEST: dict[str, Change] = {
    "nothing": lambda m: m,
    "tied layers": tie,
    "two parameters of the same memory": share,
    "statistics of raw inputs": raw_statistics,
    "buffers of any kind": buffers,
    "16 bits": lambda m: m.to(torch.bfloat16),
    "another memory format": lambda m: m.append(
        nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
    ),
    "weight norm of torch": lambda m: parametrizations.weight_norm(m[0]),
    "spectral norm of torch": lambda m: parametrizations.spectral_norm(m[0]),
    "attention and recurrent layers": lambda m: m.extend(
        [nn.TransformerEncoderLayer(6, 2, 8), nn.LSTM(6, 4, 2)]
    ),
    "a forward of the runner's": lambda m: defer(m[2][0], 8),
    "blocks that the runner recomputes": recomputed,
    "compiled": lambda m: m.compile(),
    "a script": lambda m: m.append(torch.jit.script(nn.Linear(2, 2))),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("what", HONEST)
def test_an_honest_model_is_passed(what: str) -> None:
    model = net()
    HONEST[what](model)
    assert check_model(model).findings == []


def test_a_class_of_torch_whose_forward_was_replaced_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nn.Linear, "forward", loud)
    assert {r.code for r in check_model(net()).reasons} == {"structure.patched_method"}


def test_a_hook_on_every_module_of_the_process_is_named() -> None:
    handle = nn.modules.module.register_module_forward_hook(listening)
    try:
        (reason,) = check_model(net()).reasons
    finally:
        handle.remove()
    assert (reason.code, reason.where) == ("hooks.unexpected", "(every module)")


def test_units_of_a_transposed_convolution_lie_along_its_second_dimension() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(4, 3, 2))
    model[0].weight.data[:, 1] = 0
    (reason,) = check_model(model).reasons
    assert (reason.code, reason.evidence) == ("weights.dead_units", "1 of 3 units are all zero")


def test_a_model_yet_to_be_trained_may_begin_with_copies_and_zeros() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)  # deep copies of it
    model.head = nn.Linear(8, 3)
    nn.init.zeros_(model.head.weight)
    fresh = check_model(model, expected=Expected(trained=False))
    assert fresh.ok and {r.code for r in fresh.reasons} == {"weights.duplicated", "weights.dead"}
    assert not check_model(model).ok


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


FAULTS: dict[str, tuple[Callable[..., Any], Expected, str, str]] = {
    "a NaN for one sample": (
        lambda m, x: (x @ m.weight).index_fill(0, torch.tensor([2]), math.nan),
        *(LOGITS, "not_finite", "output"),
    ),
    "an Inf in a named part": (
        lambda m, x: {"logits": x @ m.weight, "scale": x.sum(1) / 0},
        *(LOGITS, "not_finite", "output.scale"),
    ),
    "the same for all": (lambda m, x: 0 * x @ m.weight + m.weight[0], LOGITS, "constant", ""),
    "one class for all": (one_class, LOGITS, "constant", ""),
    "probabilities that are logits": (linear, Expected("probabilities"), "out_of_range", ""),
    "a class that there is not": (ids, Expected("ids", 2), "out_of_range", ""),
    "absurd logits": (lambda m, x: 1e8 * x @ m.weight, LOGITS, "out_of_range", ""),
    "chaos": (lambda m, x: torch.sin(1e6 * x) @ m.weight, LOGITS, "sensitive", ""),
    "dropout in evaluation mode": (
        *(lambda m, x: F.dropout(x @ m.weight, 0.5), LOGITS, "random", ""),
    ),
    "statistics that go on": (counting, LOGITS, "writes", "seen"),
    "a model that raises": (raises, LOGITS, "raises", ""),
}


def found(answer: Callable[..., Any], inputs: Any, expected: Expected) -> list[Any]:
    report = check_model(Answering(answer), inputs, trusted=[__name__], expected=expected)
    return [(r.code, r.severity, r.where) for r in report.reasons]


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_of_behaviour_is_named_and_nothing_else_is(what: str) -> None:
    answer, expected, code, where = FAULTS[what]
    severity = FAULT if code == "not_finite" else WARNING
    assert found(answer, probes(), expected) == [(f"behaviour.{code}", severity, where)]


WELL_BEHAVED: dict[str, tuple[Callable[..., Any], Any, Expected]] = {
    "linear": (linear, probes(), LOGITS),
    "logits of what may not be chosen": (
        lambda m, x: (x @ m.weight).index_fill(1, torch.tensor([1]), -math.inf),
        *(probes(), LOGITS),
    ),
    "probabilities": (
        *(lambda m, x: (x @ m.weight).softmax(1), probes(), Expected("probabilities")),
    ),
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


def test_the_gain_of_a_linear_model_is_about_one_and_probes_are_bounded() -> None:
    facts = check_model(Answering(linear), probes(1024), expected=LOGITS).facts
    assert 0.3 < facts["gain"] < 3 and facts["probes"] == MAX_SAMPLES


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
    report = check_model(model, probes())
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
