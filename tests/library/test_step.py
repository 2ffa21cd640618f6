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


def assert_close(net: nn.Module, twin: nn.Module, atol: float = 1e-6) -> None:
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a, b, atol=atol)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"lr": 1e-3}),
        (torch.optim.AdamW, {"lr": 1e-3, "fused": False}),
        (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
        (torch.optim.RMSprop, {"lr": 1e-3}),
    ],
)
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


def test_groups_a_scheduler_and_hooks_on_the_optimizer_work_without_a_warning(
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
    seen: list[int] = []
    ours.register_step_post_hook(lambda *_: seen.append(1))
    for batch in batches[:20]:
        train_step(net, ours, batch, loss_of)
        plain_step(twin, theirs, batch, 1.0)
        mine.step()
        their.step()
        assert [g["lr"] for g in ours.param_groups] == [g["lr"] for g in theirs.param_groups]
    assert len(seen) == 20
    assert_close(net, twin, atol=1e-5)


def test_without_the_guard_a_nan_goes_in(net: nn.Module, batches: Batches) -> None:
    optimizer = torch.optim.AdamW(net.parameters())
    bad = (batches[0][0] * math.nan, batches[0][1])
    assert not train_step(net, optimizer, bad, loss_of, guard=False).skipped
    assert not next(net.parameters()).isfinite().all()


def test_steps_of_the_callers_own_may_come_between_and_the_state_can_be_saved_and_loaded(
    net: nn.Module, twin: nn.Module, batches: Batches
) -> None:
    ours, theirs = (torch.optim.AdamW(n.parameters(), lr=1e-3) for n in (net, twin))
    for i, batch in enumerate(batches[:12]):
        if i % 3:
            train_step(net, ours, batch, loss_of)
        else:
            plain_step(net, ours, batch, 1.0)
        plain_step(twin, theirs, batch, 1.0)
        if i == 6:
            assert {float(s["step"]) for s in ours.state_dict()["state"].values()} == {7.0}
            file = io.BytesIO()
            torch.save({"net": twin.state_dict(), "optimizer": theirs.state_dict()}, file)
            file.seek(0)
            saved = torch.load(file)
            net.load_state_dict(saved["net"])
            ours.load_state_dict(saved["optimizer"])  # of one that was not fused
    assert {float(s["step"]) for s in ours.state_dict()["state"].values()} == {12.0}
    assert_close(net, twin)


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
    usual: dict[str, Any] = {"model": net, "optimizer": optimizer, "batch": (x, y)}
    usual["loss_fn"] = loss_of
    changes: list[tuple[dict[str, Any], str]] = [
        ({"batch": x}, "batch must be .* float32 of shape"),
        ({"batch": {"x": x}}, r"batch must be .* \{x: float32"),
        ({"loss_fn": True}, "loss_fn must be"),
        ({"loss_fn": lambda o, t: o}, "loss must be a scalar"),
        ({"loss_fn": lambda o, t: o.detach().sum()}, "depends on no weight"),
        ({"clip_norm": 0}, "clip_norm must be"),
        ({"model": net.forward}, "model must be"),
        ({"model": optimize(net, "none")}, "use optimize_training_loop"),
        ({"optimizer": net}, "optimizer must be"),
        ({"model": nn.Linear(2, 2)}, "none of the optim"),
    ]
    for change, message in changes:
        with pytest.raises(UsageError, match=message):
            train_step(**usual | change)
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())
