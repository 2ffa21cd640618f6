"""Implementations of an update are compared with torch's default, on copies of the weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner import Stability, build, train, train_step
from runner.core.build.setup import Components
from runner.core.optim import whole_step
from runner.core.optim.equivalence import KEY, Implementation, UpdateComparison
from runner.core.optim.fused_kernel import FusedKernel
from runner.loops.optimize import optimize_training_loop
from tests import runs

FUSED: dict[str, Any] = {"fused": True}


class HalfNet(nn.Module):
    """A model of 16-bit weights for images of digits."""

    def __init__(self) -> None:
        super().__init__()
        self.net = half_net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.flatten(1).bfloat16()).float()  # type: ignore[no-any-return]


def half_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).bfloat16()


def batches(count: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 16, 64, generator=generator).bfloat16()
    return list(zip(x, torch.randint(0, 10, (count, 16), generator=generator), strict=True))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.float(), target)


def plain_loop(momentum: float) -> nn.Module:
    model = half_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    for x, y in batches():
        optimizer.zero_grad()
        loss_of(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("how", ["train_step", "Stability", "optimize_training_loop"])
def test_sgd_on_16_bit_weights_updates_as_torch_does_by_default(how: str, momentum: float) -> None:
    model = half_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    if how == "train_step":
        for batch in batches():
            train_step(model, optimizer, batch, loss_of, clip_norm=None)
    elif how == "Stability":
        stability = Stability(["stability.clip_norm=null"])
        for x, y in batches():
            stability.step(model, loss_of(model(x), y), optimizer)
        assert "fused: " in str(stability.summary())
    else:
        with optimize_training_loop(
            model, optimizer, loss_of, level="basic", clip_norm=None
        ) as loop:
            for batch in batches():
                loop(batch)
            (choice,) = [c for c in loop.summary().choices if c.key == KEY]
            assert choice.value == "foreach"
    for weight, expected in zip(model.parameters(), plain_loop(momentum).parameters(), strict=True):
        assert (weight - expected).norm() < 0.01 * expected.norm()  # torch's fused kernel: 0.3


def test_a_kernel_that_differs_is_not_used_and_the_summary_says_why() -> None:
    config = runs.config("data=digits", "optimizer=sgd", "optimization=basic", "training.steps=3")
    with build(config, given=Components(model=HalfNet())) as run:
        summary = train(run)
    row = runs.status(summary, "fused_optimizer")
    assert (row.status, row.engaged) == ("skipped", False)
    assert "value of bfloat16 weight" in row.reason
    assert "differs from torch's default" in row.reason
    (choice,) = [c for c in summary.choices if c.key == KEY]
    assert (choice.value, choice.reason) == ("foreach", row.reason)


def comparison(
    optimizer: torch.optim.Optimizer, options: dict[str, Any] = FUSED, **more: Any
) -> UpdateComparison:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return UpdateComparison(optimizer, options, nn.ParameterList(parameters), **more)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_exact_kernels_are_used(cls: Any, scheduled: bool, dtype: torch.dtype) -> None:
    optimizer = cls(net().to(dtype).parameters(), lr=0.01, weight_decay=0.1)
    for sets_rate in (True, False):
        compared = comparison(optimizer, sets_rate=sets_rate, scheduled=scheduled and sets_rate)
        assert compared.select() == ("fused", "")
        assert compared.difference(Implementation(FUSED), whole_step=True) == ""


@pytest.mark.parametrize("own", ["lr_share", "lr"])  # typed, and by an optimizer's constructor
@pytest.mark.parametrize("shares", [(1.0, 0.05), (0.05, 1.0), (0.0, 1.0)])
def test_groups_with_rates_of_their_own_are_compared_at_these(
    own: str, shares: tuple[float, float]
) -> None:
    rates = shares if own == "lr_share" else [0.01 * share for share in shares]
    layers = nn.Linear(8, 8), nn.Linear(8, 4)
    groups = [
        {"params": [*layer.parameters()], own: rate}
        for layer, rate in zip(layers, rates, strict=True)
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    for scheduled in (False, True):
        compared = comparison(optimizer, sets_rate=True, scheduled=scheduled)
        assert compared.select() == ("fused", "")
        assert compared.difference(Implementation(FUSED), whole_step=True) == ""


def test_a_norm_that_is_rounded_by_two_bits_does_not_refuse_an_exact_kernel() -> None:
    torch.manual_seed(35)  # float32 rounds the norm of these gradients by 2 eps, their square by 4
    model = nn.Linear(99, 64)
    compared = comparison(torch.optim.AdamW(model.parameters()), sets_rate=True, seed=35)
    assert compared.select() == ("fused", "")


def test_a_wrong_kernel_driver_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch._fused_adamw_

    def wrong(*args: Any, **options: Any) -> None:
        original(*args, **{**options, "eps": 0.01})

    monkeypatch.setattr(torch, "_fused_adamw_", wrong)
    name, reason = comparison(torch.optim.AdamW(net().parameters())).select()
    assert name == "foreach"
    assert reason.startswith("fused: ")


def test_a_driver_that_is_wrong_only_with_clipping_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = FusedKernel.step

    def unclipped(self: FusedKernel, divisors: list[Tensor | None], skipped: Tensor) -> None:
        original(self, [None] * len(divisors), skipped)

    monkeypatch.setattr(FusedKernel, "step", unclipped)
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1, momentum=0.9)
    name, reason = comparison(optimizer).select()
    assert name == "foreach"
    assert reason.endswith("with clipping")


def test_wrong_arithmetic_of_the_whole_step_is_found_and_no_graph_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = whole_step._adam_update

    def wrong(group: Any, gradients: Any, lr: Tensor, count: Tensor, applied: Tensor) -> None:
        original(group, gradients, lr * 1.00001, count, applied)

    monkeypatch.setattr(whole_step, "_adam_update", wrong)
    steps = ("optimization.whole_step.enabled=true", "training.steps=1")
    with runs.opened("data=digits", "optimization=none", *steps) as run:
        assert run.step_graph is None
        assert "differs from torch's default" in run.fallback_reasons["whole_step"]


def test_where_torchs_default_is_not_finite_it_stays() -> None:
    optimizer = torch.optim.Adam(net().half().parameters())  # eps is 0 in float16
    name, reason = comparison(optimizer).select()
    assert name == "default"
    assert "is not finite with torch's default" in reason


def test_foreach_asgd_of_float64_weights_is_not_used() -> None:
    optimizer = torch.optim.ASGD(net().double().parameters())
    assert comparison(optimizer, {"foreach": True}).select()[0] == "default"
    single = torch.optim.ASGD(net().parameters())
    assert comparison(single, {"foreach": True}).select() == ("foreach", "")


def test_at_most_64_small_parts_of_each_kind_of_weight_are_compared() -> None:
    weights = [nn.Parameter(torch.randn(900, 800)), nn.Parameter(torch.randn(64, 128, 9, 9))]
    weights[1].data = weights[1].data.contiguous(memory_format=torch.channels_last)
    weights += [nn.Parameter(torch.randn(40, 30).t()), nn.Parameter(torch.zeros(()))]
    groups = [{"params": [w], "weight_decay": 0.1} for w in weights]
    few = comparison(torch.optim.AdamW(groups)).samples
    assert [copy.ndim for _, copy in few] == [2, 4, 2, 0]
    assert few[1][1].is_contiguous(memory_format=torch.channels_last)
    assert few[2][1].stride() == (1, 30)
    groups = [
        {"params": [nn.Parameter(torch.randn(400, 400)) for _ in range(9)], "weight_decay": n / 99}
        for n in range(99)
    ]
    many = comparison(torch.optim.AdamW(groups)).samples
    assert len(many) == 64
    assert {number for number, _ in many} == set(range(64))
    assert max(copy.numel() for _, copy in [*few, *many]) <= 65_536


def test_gradients_are_as_large_as_the_weights_and_of_zeros_as_the_median() -> None:
    weights = [nn.Parameter(torch.full((4096,), size)) for size in (0.01, 1.0, 100.0, 0.0)]
    groups = [{"params": [weight], "momentum": n / 9} for n, weight in enumerate(weights)]
    compared = comparison(torch.optim.SGD(groups, lr=0.1), seed=3)
    for gradients in compared.gradients:
        sizes = [float(gradient.square().mean().sqrt()) for gradient in gradients]
        assert sizes == pytest.approx([0.01, 1.0, 100.0, 1.0], rel=0.05)
    again = comparison(torch.optim.SGD(groups, lr=0.1), seed=3)
    assert all(map(torch.equal, compared.gradients[0], again.gradients[0]))


def test_a_comparison_changes_neither_the_run_nor_its_random_numbers() -> None:
    model = net()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    optimizer = torch.optim.AdamW(model.parameters())
    comparison(optimizer).select()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())
