"""Clipping: what torch's own functions and a plain reading of the paper give, on every path."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner.core.interfaces.hook import Step
from runner.core.interfaces.run import Run
from runner.core.optim.fused_kernel import RevertibleStep
from runner.core.optim.optimizer import build_optimizer
from runner.core.optim.optimizer_step import OptimizerStep
from runner.core.schemas.optimizer import OptimizerConfig
from runner.core.schemas.stability import StabilityConfig
from runner.core.train.loop import train
from tests import runs

from .steps import take_step

KINDS: list[dict[str, Any]] = [
    {"clip_norm": 0.3},
    {"clip_norm": None, "clip_value": 0.02},
    {"clip_norm": 0.2, "clip_value": 0.02},
    {"clip_norm": 0.2, "clip_per_group": True},
    {"clip_norm": None, "clip_adaptive": 0.02},
    {"clip_norm": 0.1, "clip_value": 0.01, "clip_adaptive": 0.05},
    {"clip_norm": 0.1, "clip_value": 0.01, "clip_adaptive": 0.05, "clip_per_group": True},
]
WAYS = ["kernel", "fused", "plain", "undone"]


def model() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3)
    )
    nn.init.zeros_(net[3].weight[0])  # it can still move under an adaptive limit
    return net


def batch() -> tuple[Tensor, Tensor]:
    noise = torch.Generator().manual_seed(1)
    inputs = 3 * torch.randn(16, 1, 6, 6, generator=noise)
    return inputs, torch.randint(0, 3, (16,), generator=noise)


def make(
    net: nn.Module, stability: StabilityConfig, way: str, scale: float | None
) -> OptimizerStep:
    """SGD with rate 1 (Adagrad where the fused kernel is not ours to call), in two groups."""
    name = "Adagrad" if way == "fused" else "SGD"
    config = OptimizerConfig(name=name, lr=1.0, weight_decay=0.001)
    how = {"fused": way in ("kernel", "fused")}
    optimizer = build_optimizer(config, getattr(torch.optim, name), net, how)
    assert len(optimizer.param_groups) == 2
    update = OptimizerStep(net, optimizer, stability, 1.0, [1.0], loss_scale=scale)
    assert (update.kernel is not None) == (way == "kernel")
    if way == "undone":
        update.revertible = RevertibleStep(optimizer)
    return update


def agc(weight: Tensor, gradient: Tensor, factor: float) -> Tensor:
    """Equation 3 of the paper, a unit at a time."""
    units = zip(weight, gradient, strict=True) if weight.ndim > 1 else [(weight, gradient)]
    limited = []
    for w, g in units:
        most = factor * max(float(w.norm()), 1e-3)
        limited.append(g * most / float(g.norm()) if float(g.norm()) > most else g)
    return torch.stack(limited) if weight.ndim > 1 else limited[0]


def expected(net: nn.Module, groups: list[list[nn.Parameter]], stability: StabilityConfig) -> float:
    """Clip the gradients of a plain model, and return their norm before that."""
    parameters = list(net.parameters())
    before = float(nn.utils.get_total_norm([p.grad for p in parameters]))  # type: ignore[misc]
    if stability.clip_adaptive is not None:
        last = list(net.children())[-1]
        for parameter in parameters:
            if not any(parameter is own for own in last.parameters()):
                assert parameter.grad is not None
                parameter.grad = agc(parameter.detach(), parameter.grad, stability.clip_adaptive)
    if stability.clip_value is not None:
        nn.utils.clip_grad_value_(parameters, stability.clip_value)
    if stability.clip_norm is not None:
        for group in groups if stability.clip_per_group else [parameters]:
            nn.utils.clip_grad_norm_(group, stability.clip_norm)
    return before


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "+".join(kind))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scale", [None, 1024.0])
def test_clipping_is_what_torch_and_the_paper_say(
    kind: dict[str, Any], way: str, scale: float | None
) -> None:
    stability = StabilityConfig(**kind)
    ours, theirs = model(), model()
    update = make(ours, stability, way, scale)
    optimizer = make(theirs, StabilityConfig(), way, None).optimizer
    (inputs, target), loss = batch(), nn.functional.cross_entropy
    for _ in range(3):
        norm, skipped = take_step(update, lambda: loss(ours(inputs), target))
        optimizer.zero_grad()
        loss(theirs(inputs), target).backward()
        before = expected(theirs, [g["params"] for g in optimizer.param_groups], stability)
        optimizer.step()
        assert norm == pytest.approx(before, rel=1e-4) and not skipped
    untouched = model()
    for a, b, first in zip(
        ours.parameters(), theirs.parameters(), untouched.parameters(), strict=True
    ):
        # Adagrad's first updates are as large for the rounding of a gradient as for the gradient
        loosely = 30 if way == "fused" else 1
        torch.testing.assert_close(a, b, atol=1e-6 * loosely, rtol=1e-4)
        assert not torch.equal(a, first)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[-1]], ids=lambda kind: "+".join(kind))
def test_a_sparse_gradient_is_clipped_as_the_dense_one(kind: dict[str, Any]) -> None:
    results, x, y = [], torch.tensor([[1, 1, 2], [3, 2, 9]]), torch.tensor([0, 2])
    for sparse in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Embedding(10, 4, sparse=sparse), nn.Flatten(), nn.Linear(12, 5), nn.Linear(5, 3)
        )
        groups = [{"params": net[i].parameters()} for i in (0, 2, 3)]
        optimizer = torch.optim.SGD(groups, lr=1.0)
        update = OptimizerStep(net, optimizer, StabilityConfig(**kind), 1.0, [1.0])
        for _ in range(2):
            norm, _ = take_step(update, lambda net=net: 5 * nn.functional.cross_entropy(net(x), y))
        results.append([torch.tensor(norm), *(p.detach() for p in net.parameters())])
    for dense, sparse_ in zip(*results, strict=True):
        torch.testing.assert_close(dense, sparse_, atol=1e-6, rtol=1e-5)


def test_gradients_reach_hooks_before_they_are_clipped_and_micro_batches_are_clipped_as_one() -> (
    None
):
    overrides = [
        "optimization=none",
        *("data=synthetic", "data.form=tabular", "data.features=16", "data.samples=128"),
        *("training.batch_size=32", "training.steps=6", "model.width=16", "model.depth=1"),
        *("optimizer.name=SGD", "optimizer.lr=1.0", "optimizer.weight_decay=0"),
        *("stability.clip_value=1e-4", "stability.clip_adaptive=0.5", "stability.clip_norm=null"),
    ]

    def keep_largest(run: Run, step: Step) -> None:
        gradients = [p.grad for p in run.update.parameters if p.grad is not None]
        largest.append(max(float(g.abs().max()) for g in gradients))

    ends = []
    for micro_batch in (32, 8):
        largest: list[float] = []
        with runs.opened(*overrides, f"training.micro_batch={micro_batch}") as run:
            run.hooks.append(runs.hook(on_gradients=keep_largest))
            before = runs.weights(run)
            train(run)
            ends.append(runs.weights(run))
        assert max(largest) > 1e-3
        for name, old in before.items():
            assert float((ends[-1][name] - old).abs().max()) <= 6 * 1e-4 * 1.001
    torch.testing.assert_close(*ends, atol=1e-5, rtol=1e-3)


def change_gradients(
    change: Callable[[Tensor], Tensor], first: int = 1
) -> Callable[[Run, Step], None]:
    def on_gradients(run: Run, step: Step) -> None:
        for parameter in run.model.parameters() if step.number >= first else ():
            assert parameter.grad is not None
            parameter.grad.data = change(parameter.grad)

    return on_gradients


@pytest.mark.parametrize("fault", [math.nan, 0.5])
def test_what_hooks_make_of_the_gradients_is_guarded_and_clipped(fault: float) -> None:
    overrides = (
        *("data=cancer", "optimization=none", "training.steps=2", "training.batch_size=16"),
        *("optimizer.name=SGD", "optimizer.lr=1", "optimizer.weight_decay=0"),
        *("schedule=constant", "stability.clip_norm=0.01"),
    )
    spoil = change_gradients(lambda gradient: torch.full_like(gradient, fault), first=2)
    norms, ends = list[float](), list[Tensor]()

    def keep(run: Run, step: Step) -> None:
        norms.append(float(step.grad_norm))
        ends.append(torch.cat([w.flatten() for w in runs.weights(run).values()]))

    with runs.opened(*overrides) as run:
        run.hooks.append(runs.hook(on_gradients=spoil, on_step=keep))
        summary = train(run)
    moved = ends[1] - ends[0]
    if math.isnan(fault):
        assert summary.skipped_steps == 1 and not moved.any() and math.isnan(norms[1])
    else:
        assert summary.skipped_steps == 0
        assert norms[1] == pytest.approx(fault * moved.numel() ** 0.5, rel=1e-4)
        assert float(moved.norm()) == pytest.approx(0.01, rel=1e-3)


def test_a_hook_that_repairs_the_gradients_has_the_step_made() -> None:
    def spoil(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad[0] = math.nan

    with runs.opened("data=cancer", "optimization=none", "training.steps=3") as run:
        run.update.parameters[0].register_post_accumulate_grad_hook(spoil)
        run.hooks.append(runs.hook(on_gradients=change_gradients(lambda g: g.nan_to_num(0.0))))
        assert train(run).skipped_steps == 0
