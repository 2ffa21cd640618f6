"""How a model behaves on samples: faults are named, honest models pass, nothing is left behind."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.checks.model.behaviour import Expected
from runner.checks.model.check import MAX_INPUTS, MAX_WORK, MIN_SAMPLES, check_model
from runner.security.trust import Severity

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


def linear(m: Answering, x: Tensor) -> Tensor:
    return x @ m.weight


def counting(m: Answering, x: Tensor) -> Tensor:
    m.seen += 1
    return x @ m.weight


def ids(m: Answering, x: Tensor, most: int = 2) -> Tensor:
    return (x @ m.weight).argmax(1).clamp(max=most)


def raises(m: Answering, x: Tensor) -> Tensor:
    raise ValueError("no such shape")


def nothing_for_the_third(m: Answering, x: Tensor) -> Tensor:
    return (x @ m.weight).index_fill(0, torch.tensor([2]), math.nan)


def dropping(m: Answering, x: Tensor) -> Tensor:
    return F.dropout(x @ m.weight, 0.5)  # also in evaluation mode


PLANTED: list[tuple[str, Callable[..., Any], Expected, str, Severity, str]] = [
    ("a NaN for one sample", nothing_for_the_third, LOGITS, "behaviour.not_finite",
     Severity.REFUSAL, "output"),
    ("an Inf in a named part", lambda m, x: {"logits": x @ m.weight, "scale": x.sum(1) / 0},
     LOGITS, "behaviour.not_finite", Severity.REFUSAL, "output.scale"),
    ("the same for all", lambda m, x: 0 * x @ m.weight + m.weight[0], LOGITS,
     "behaviour.constant", Severity.WARNING, ""),
    ("the same quantity for all", lambda m, x: 0 * x.sum(1, keepdim=True) + 7.0,
     Expected("values"), "behaviour.constant", Severity.WARNING, ""),
    ("one class for all", lambda m, x: x @ m.weight + torch.tensor([0.0, 50.0, 0.0]), LOGITS,
     "behaviour.constant", Severity.WARNING, ""),
    ("nothing preferred", lambda m, x: 1e-3 * x @ m.weight, LOGITS, "behaviour.uniform",
     Severity.WARNING, ""),
    ("probabilities that are logits", linear, Expected("probabilities"), "behaviour.out_of_range",
     Severity.WARNING, "output"),
    ("named probabilities that are none", lambda m, x: {"logits": x @ m.weight, "probs": x + 9},
     LOGITS, "behaviour.out_of_range", Severity.WARNING, "output.probs"),
    ("a class that there is not", ids, Expected("ids", 2), "behaviour.out_of_range",
     Severity.WARNING, "output"),
    ("an id below 0", lambda m, x: {"logits": x @ m.weight, "ids": ids(m, x) - 1}, LOGITS,
     "behaviour.out_of_range", Severity.WARNING, "output.ids"),
    ("absurd logits", lambda m, x: 1e8 * x @ m.weight, LOGITS, "behaviour.out_of_range",
     Severity.WARNING, "output"),
    ("chaos", lambda m, x: torch.sin(1e6 * x) @ m.weight, LOGITS, "behaviour.sensitive",
     Severity.WARNING, ""),
    ("dropout in evaluation mode", dropping, LOGITS, "behaviour.random", Severity.WARNING, ""),
    ("statistics that go on", counting, LOGITS, "behaviour.writes", Severity.WARNING, "seen"),
    ("a model that raises", raises, LOGITS, "behaviour.raises", Severity.WARNING, ""),
]  # fmt: skip


def probes(n: int = N) -> Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(3))


def found(answer: Callable[..., Any], inputs: Any, expected: Expected) -> list[Any]:
    report = check_model(Answering(answer), inputs, trusted=[__name__], expected=expected)
    return [(r.code, r.severity, r.where) for r in report.reasons]


@pytest.mark.parametrize(
    ("answer", "expected", "code", "severity", "where"), [row[1:] for row in PLANTED],
    ids=[row[0] for row in PLANTED],
)  # fmt: skip
def test_a_fault_of_behaviour_is_named_with_its_place_and_nothing_else_is(
    answer: Callable[..., Any], expected: Expected, code: str, severity: Severity, where: str
) -> None:
    assert found(answer, probes(), expected) == [(code, severity, where)]
    assert found(linear, probes(), LOGITS) == []


def forbidden(m: Answering, x: Tensor) -> Tensor:
    return (x @ m.weight).index_fill(1, torch.tensor([1]), -math.inf)


def rounding(m: Answering, x: Tensor) -> Tensor:
    return F.one_hot(x.long() % 4, 4).float().sum(1) @ m.weight


def masked(m: Answering, x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask.bool()) @ m.weight


HONEST: list[tuple[str, Callable[..., Any], Any, Expected]] = [
    ("logits of what may not be chosen", forbidden, probes(), LOGITS),
    ("probabilities", lambda m, x: (x @ m.weight).softmax(1), probes(), Expected("probabilities")),
    ("ids", ids, probes(), Expected("ids", 3)),
    ("large quantities", lambda m, x: 1e9 * x.sum(1), probes(), Expected("values")),
    ("whole numbers as floats", rounding, (5 * probes()).round(), Expected("values")),
    ("a mask of floats", masked, (probes(), (probes() > 0).float()), LOGITS),
    ("probes that are all the same", linear, torch.ones(N, 4), LOGITS),
    ("few probes of one class", lambda m, x: x @ m.weight + m.weight[3], probes(3).abs(), LOGITS),
    ("probes of one class", lambda m, x: x @ m.weight + torch.tensor([0.0, 50.0, 0.0]), probes(),
     Expected("logits", 3, torch.ones(N, dtype=torch.int64))),
    ("one probe", linear, probes(1), LOGITS),
    ("by name", lambda m, x: {"logits": x @ m.weight, "mask": x > 0}, {"x": probes()}, LOGITS),
    ("16 bits", lambda m, x: (x @ m.weight).bfloat16(), probes(), LOGITS),
    ("an answer that is no tensor", lambda m, x: "text", probes(), Expected()),
    ("classes second", lambda m, x: (x.reshape(N, 1, 4) * m.weight.T).movedim(1, 1), probes(),
     LOGITS),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "inputs", "expected"), [row[1:] for row in HONEST],
                         ids=[row[0] for row in HONEST])  # fmt: skip
def test_honest_answers_pass(answer: Callable[..., Any], inputs: Any, expected: Expected) -> None:
    assert found(answer, inputs, expected) == []


def test_one_class_for_all_is_odd_only_where_samples_of_others_were_missed() -> None:
    targets = torch.ones(N, dtype=torch.int64)
    answer = dict((row[0], row[1]) for row in PLANTED)["one class for all"]
    for others, codes in ((2, []), (3, ["behaviour.constant"])):
        targets[:others] = 0
        assert [f[0] for f in found(answer, probes(), Expected("logits", 3, targets))] == codes


def test_a_model_yet_to_be_trained_may_say_the_same_to_all() -> None:
    for name in ("the same for all", "one class for all", "nothing preferred"):
        answer = dict((row[0], row[1]) for row in PLANTED)[name]
        found_ = found(answer, probes(), Expected("logits", 3, trained=False))
        assert [severity for _, severity, _ in found_] == [Severity.NOTE]


def test_the_gain_of_a_linear_model_is_about_one_and_is_a_fact() -> None:
    report = check_model(Answering(linear), probes(), expected=LOGITS)
    assert 0.3 < report.facts["gain"] < 3
    assert report.facts["repeated"] == 0 and report.facts["probes"] == N
    tokens = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 3))
    assert check_model(tokens, torch.arange(18).reshape(9, 2) % 9).facts["gain"] is None


def test_a_large_model_or_large_samples_are_looked_at_with_few_of_many_probes() -> None:
    def count(answer: Callable[..., Any], inputs: Tensor) -> Any:
        model = Answering(answer)
        model.more = nn.Parameter(torch.randn(2**20 - 12))
        return check_model(model, inputs).facts["probes"]

    assert count(linear, torch.randn(1024, 4)) == MAX_WORK // 2**20 < 1024
    assert count(lambda m, x: x.mean(2) @ m.weight, torch.randn(20, 4, 2**13)) == MIN_SAMPLES
    assert count(lambda m, x: x[:, :4] @ m.weight, torch.zeros(3, MAX_INPUTS)) == 2


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
    handle = model.register_forward_hook(lambda *_: None)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    held, hooks = set(vars(model)), list(model._forward_hooks)
    noise = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    report = check_model(model, probes())
    assert "behaviour.writes" in {r.code for r in report.reasons}
    assert all(torch.equal(values[name], value) for name, value in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes
    assert model.calls == [] and set(vars(model)) == held
    assert model.layer.weight.grad is gradient and list(model._forward_hooks) == hooks
    assert (random.getstate(), np.random.get_state()[1].tolist()) == noise[:2]
    assert torch.equal(torch.get_rng_state(), noise[2])
    assert torch.is_grad_enabled()
    handle.remove()


def test_a_compiled_model_is_looked_at_without_compiling() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = nn.Sequential(nn.Linear(4, 3))
    for compiled in (torch.compile(model), model):
        model.compile()
        assert check_model(compiled, probes(), expected=LOGITS).findings == []
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0


@pytest.mark.gpu
def test_a_model_on_an_accelerator_is_as_it_was_and_its_noise_too() -> None:
    model = Changing().cuda()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    noise = torch.cuda.get_rng_state()
    report = check_model(model, probes().cuda())
    assert "behaviour.writes" in {r.code for r in report.reasons}
    assert all(torch.equal(values[name], value) for name, value in model.state_dict().items())
    assert torch.equal(torch.cuda.get_rng_state(), noise)


@pytest.mark.parametrize("trained", [None, False])
def test_a_deep_model_that_is_yet_to_be_trained_may_answer_the_same(trained: bool | None) -> None:
    torch.manual_seed(0)
    deep = nn.Sequential(*(nn.Linear(16, 16) for _ in range(40)))
    x = torch.randn(N, 16, generator=torch.Generator().manual_seed(1))
    reasons = check_model(deep, x, expected=Expected("values", trained=trained)).reasons
    assert ("behaviour.constant", Severity.NOTE) in [(r.code, r.severity) for r in reasons]
    assert not [r for r in reasons if r.severity > Severity.NOTE]
