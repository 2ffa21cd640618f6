"""`train_step` is clip_grad_norm_ and step() with a guard; the optimizer stays the caller's."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner import optimize, train_step
from runner.errors import UsageError

Batches = list[tuple[Tensor, Tensor]]
OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 1e-3}),
    (torch.optim.AdamW, {"lr": 1e-3, "fused": False}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    (torch.optim.RMSprop, {"lr": 1e-3}),
]
loss_of = nn.functional.cross_entropy


def plain_step(
    net: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], clip: float
) -> tuple[float, float]:
    """The step as everybody writes it."""
    optimizer.zero_grad()
    loss = loss_of(net(batch[0]), batch[1])
    loss.backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), clip)
    optimizer.step()
    return loss.item(), norm.item()


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_the_curve_is_that_of_clip_grad_norm_and_step(
    net: nn.Module, twin: nn.Module, batches: Batches, kind: Any, options: dict[str, Any]
) -> None:
    ours, theirs = kind(net.parameters(), **options), kind(twin.parameters(), **options)
    for batch in batches[:30]:
        step = train_step(net, ours, batch, loss_of, clip_norm=0.5)
        loss, norm = plain_step(twin, theirs, batch, 0.5)
        assert float(step.loss) == pytest.approx(loss, rel=1e-4)
        assert float(step.grad_norm) == pytest.approx(norm, rel=1e-3)
        assert not step.skipped


def test_groups_and_a_scheduler_go_on_working_without_a_warning(
    net: nn.Module, twin: nn.Module, batches: Batches
) -> None:
    def grouped(model: Any) -> tuple[torch.optim.Optimizer, Any]:
        groups = [
            {"params": model[1].parameters(), "lr": 1e-4, "weight_decay": 0.3},
            {"params": [*model[2].parameters(), *model[4].parameters()]},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-3, 1e-2], 20)

    (ours, mine), (theirs, their) = grouped(net), grouped(twin)
    for batch in batches[:20]:
        train_step(net, ours, batch, loss_of)
        plain_step(twin, theirs, batch, 1.0)
        mine.step()
        their.step()
        assert [g["lr"] for g in ours.param_groups] == [g["lr"] for g in theirs.param_groups]
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_without_the_guard_a_nan_goes_in(net: nn.Module, batches: Batches) -> None:
    optimizer = torch.optim.AdamW(net.parameters())
    bad = (batches[0][0] * math.nan, batches[0][1])
    assert not train_step(net, optimizer, bad, loss_of, guard=False).skipped
    assert not next(net.parameters()).isfinite().all()


def test_the_state_can_be_saved_and_loaded_between_steps(
    net: nn.Module, twin: nn.Module, batches: Batches
) -> None:
    ours, theirs = (torch.optim.AdamW(n.parameters(), lr=1e-3) for n in (net, twin))
    for batch in batches[:5]:
        train_step(net, ours, batch, loss_of)
        plain_step(twin, theirs, batch, 1.0)
    assert {float(s["step"]) for s in ours.state_dict()["state"].values()} == {5.0}
    file = io.BytesIO()
    torch.save({"net": twin.state_dict(), "optimizer": theirs.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    net.load_state_dict(saved["net"])
    ours.load_state_dict(saved["optimizer"])  # of one that was not fused
    for batch in batches[5:10]:
        train_step(net, ours, batch, loss_of)
        plain_step(twin, theirs, batch, 1.0)
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_steps_of_the_callers_own_may_come_between(
    net: nn.Module, twin: nn.Module, batches: Batches
) -> None:
    ours, theirs = (torch.optim.AdamW(n.parameters(), lr=1e-3) for n in (net, twin))
    for i, batch in enumerate(batches[:12]):
        if i % 3:
            train_step(net, ours, batch, loss_of)
        else:
            plain_step(net, ours, batch, 1.0)
        plain_step(twin, theirs, batch, 1.0)
    assert {float(s["step"]) for s in ours.state_dict()["state"].values()} == {12.0}
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_every_call_of_step_is_seen_by_whoever_hooked_it(net: nn.Module, batches: Batches) -> None:
    optimizer, seen = torch.optim.AdamW(net.parameters()), []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    for batch in batches[:3]:
        train_step(net, optimizer, batch, loss_of)
    assert len(seen) == 3


def test_parameters_added_later_are_trained_too(net: Any, batches: Batches) -> None:
    head, body = net[4], [*net[1].parameters(), *net[2].parameters()]
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    train_step(net, optimizer, batches[0], loss_of)
    before = body[0].detach().clone()
    optimizer.add_param_group({"params": body})
    for batch in batches[1:3]:
        train_step(net, optimizer, batch, loss_of)
    assert not torch.equal(before, body[0])


def test_a_mistake_names_the_argument_and_leaves_the_model_alone(
    net: nn.Module, batches: Batches
) -> None:
    before = copy.deepcopy(net.state_dict())
    (x, y), optimizer = batches[0], torch.optim.AdamW(net.parameters())
    wrong: Any = net
    optimized: Any = optimize(net, "none")
    for call, message in (
        (lambda: train_step(net, optimizer, x, loss_of), "batch must be .* float32 of shape"),
        (lambda: train_step(net, optimizer, {"x": x}, loss_of), r"batch must be .* \{x: float32"),
        (lambda: train_step(net, optimizer, (x, y), wrong.training), "loss_fn must be"),
        (lambda: train_step(net, optimizer, (x, y), lambda o, t: o), "loss must be a scalar"),
        (
            lambda: train_step(net, optimizer, (x, y), lambda o, t: o.detach().sum()),
            "depends on no weight",
        ),
        (lambda: train_step(net, optimizer, (x, y), loss_of, clip_norm=0), "clip_norm must be"),
        (lambda: train_step(wrong.forward, optimizer, (x, y), loss_of), "model must be"),
        (lambda: train_step(optimized, optimizer, (x, y), loss_of), "use optimize_training_loop"),
        (lambda: train_step(net, wrong, (x, y), loss_of), "optimizer must be"),
        (lambda: train_step(nn.Linear(2, 2), optimizer, (x, y), loss_of), "none of the optim"),
    ):
        with pytest.raises(UsageError, match=message):
            call()
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())
