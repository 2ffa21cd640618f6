"""`optimize_training_loop`: the caller's loop, a run's steps."""

from __future__ import annotations

import math
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner import optimize_training_loop
from runner.errors import ConfigError, UsageError

Batches = list[tuple[Tensor, Tensor]]
loss_of = nn.functional.cross_entropy


def plain(net: nn.Module, batches: Batches, lr: float) -> list[float]:
    """Losses of the loop as everybody writes it, with a scheduler."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(batches))
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = loss_of(net(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


ONE_GRAPH = ["optimization.whole_step.enabled=true", "optimization.whole_step.cpp_wrapper=false"]
COMPILES = [pytest.mark.slow, pytest.mark.skipif(not shutil.which("g++"), reason="g++")]


@pytest.mark.parametrize("overrides", [[], pytest.param(ONE_GRAPH, marks=COMPILES)])
def test_the_curve_is_that_of_the_plain_loop_and_its_scheduler(
    net: nn.Module, twin: nn.Module, batches: Batches, overrides: list[str]
) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    losses = []
    with optimize_training_loop(
        net, optimizer, loss_of, level="basic", overrides=overrides
    ) as loop:
        for batch in batches[:20]:
            losses.append(float(loop(batch).loss))
            scheduler.step()
        summary = loop.summary()
    assert losses == pytest.approx(plain(twin, batches[:20], 3e-3), rel=1e-4)
    assert (summary.steps, summary.skipped_steps) == (20, 0)
    rows = {row.name: row for row in summary.techniques}
    assert rows["fused_optimizer"].engaged
    assert rows["whole_step"].engaged is bool(overrides)
    assert sum(summary.throughput.split.values()) == pytest.approx(1.0)
    assert optimizer.param_groups[0]["fused"] is None  # as it was
    assert {float(s["step"]) for s in optimizer.state.values()} == {20.0}


def test_a_bad_batch_is_skipped_and_counted(net: nn.Module, batches: Batches) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    with optimize_training_loop(net, optimizer, loss_of, level="basic") as loop:
        loop(batches[0])
        before = [p.detach().clone() for p in net.parameters()]
        assert loop((batches[1][0] * math.nan, batches[1][1])).skipped
        assert all(map(torch.equal, before, net.parameters()))
        assert loop.summary().skipped_steps == 1


def test_dropout_follows_the_callers_generator(batches: Batches) -> None:
    def losses(seed: int) -> list[float]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        with optimize_training_loop(net, optimizer, loss_of, level="none") as loop:
            loop(batches[0])
            torch.manual_seed(seed)
            return [float(loop(batches[0]).loss) for _ in range(3)]

    assert losses(1) == losses(1) != losses(2)
    assert len(set(losses(1))) == 3


def test_a_loss_with_weights_and_a_model_that_takes_names(batches: Batches) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 10)

        def forward(self, *, image: Tensor) -> Tensor:
            return self.layer(image.flatten(1))

    net = Named()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    weighted = nn.CrossEntropyLoss(weight=torch.ones(10))
    with optimize_training_loop(net, optimizer, weighted, level="basic") as loop:
        steps = [loop({"image": x, "labels": y}) for x, y in batches]
    assert steps[-1].loss < steps[0].loss


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"loss_fn": 3}, UsageError, "loss_fn must be"),
        ({"loss_fn": nn.Linear(2, 2)}, ConfigError, "loss_fn: Linear has parameters"),
        ({"steps": 0}, UsageError, "steps must be"),
        ({"clip_norm": -1.0}, ConfigError, "clip_norm"),
        ({"level": "fast"}, ConfigError, "optimization"),
        ({"loss_fn": lambda output, target: output}, ConfigError, "loss_fn: <lambda> returned"),
        ({"example": 3}, UsageError, "batch must be"),
    ],
)
def test_a_mistake_names_the_argument(
    net: nn.Module, batches: Batches, change: dict[str, Any], error: Any, message: str
) -> None:
    optimizer = torch.optim.AdamW(net.parameters())
    arguments: dict[str, Any] = {"loss_fn": loss_of, "level": "none"} | change
    with pytest.raises(error, match=message):
        with optimize_training_loop(net, optimizer, **arguments) as loop:
            loop(batches[0])
