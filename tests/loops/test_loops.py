"""Loops of the user's own: `train_step`, `Stability` and `optimize_training_loop`.

Each is clip_grad_norm_ and step() with a guard, and the optimizer stays the caller's.
"""

import copy
import io
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner import Stability, optimize, optimize_training_loop, train_step
from runner.core.errors import ConfigError, UsageError
from tests.loops.builders import Batch, assert_close, loss_of, poisoned, same, state

Optimizer = torch.optim.Optimizer
ADAMW: tuple[Any, dict[str, Any]] = (torch.optim.AdamW, {"lr": 1e-3})
OPTIMIZERS = [
    ADAMW,
    (torch.optim.AdamW, {"lr": 1e-3, "fused": False}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    (torch.optim.RMSprop, {"lr": 1e-3}),
]
WAYS = ["train_step", "Stability", "loop"]
COMPILES = [pytest.mark.slow, pytest.mark.skipif(not shutil.which("g++"), reason="g++")]
CASES = [
    *[("train_step", optimizer) for optimizer in OPTIMIZERS],
    *[(way, ADAMW) for way in WAYS[1:]],
    pytest.param("one graph", ADAMW, marks=COMPILES),
]


@contextmanager
def stepping(
    way: str, net: nn.Module, optimizer: Optimizer, clip: float = 0.5
) -> Iterator[Callable[[Batch], Any]]:
    if way == "train_step":
        yield lambda batch: train_step(net, optimizer, batch, loss_of, clip_norm=clip)
    elif way == "Stability":
        with Stability([f"stability.clip_norm={clip}"]) as stability:
            yield lambda batch: stability.step(net, loss_of(net(batch[0]), batch[1]), optimizer)
    else:
        whole = f"optimization.whole_step.enabled={way == 'one graph'}"
        own = [whole, "optimization.whole_step.cpp_wrapper=false"]
        with optimize_training_loop(
            net, optimizer, loss_of, level="basic", clip_norm=clip, overrides=own
        ) as loop:
            yield loop
            rows = {row.name: row for row in loop.summary().techniques}
            assert rows["whole_step"].engaged is (way == "one graph")


def plain_step(
    net: nn.Module, optimizer: Optimizer, batch: Batch, clip: float = 0.5
) -> tuple[float, float]:
    """The step as everybody writes it."""
    optimizer.zero_grad()
    loss = loss_of(net(batch[0]), batch[1])
    loss.backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), clip)
    optimizer.step()
    return loss.item(), norm.item()


def updates(optimizer: Optimizer) -> set[float]:
    return {float(state["step"]) for state in optimizer.state_dict()["state"].values()}


@pytest.mark.parametrize(("way", "made"), CASES)
def test_the_curve_is_that_of_clip_grad_norm_and_step_with_groups_and_a_scheduler(
    net: Any, twin: Any, batches: list[Batch], way: str, made: tuple[Any, dict[str, Any]]
) -> None:
    def grouped(model: Any) -> tuple[Optimizer, Any]:
        kind, options = made
        groups = [
            {"params": model[1].parameters(), "weight_decay": 0.3},
            {"params": [*model[2].parameters(), *model[4].parameters()]},
        ]
        optimizer = kind(groups, **options)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 21)

    (ours, mine), (theirs, their) = grouped(net), grouped(twin)
    fused = ours.param_groups[0].get("fused")
    with stepping(way, net, ours) as step:
        for batch in batches[:20]:
            report = step(batch)
            loss, norm = plain_step(twin, theirs, batch)
            mine.step()
            their.step()
            assert float(report.loss) == pytest.approx(loss, rel=1e-4)
            assert float(report.grad_norm) == pytest.approx(norm, rel=1e-3)
            assert not report.skipped
            assert [g["lr"] for g in ours.param_groups] == [g["lr"] for g in theirs.param_groups]
    assert_close(net, twin)
    if made[0] is torch.optim.AdamW:
        assert updates(ours) == {20.0}
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    if way != "train_step":
        assert ours.param_groups[0].get("fused") == fused  # as it was
        plain_step(net, ours, batches[20])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("made", OPTIMIZERS)
def test_a_nan_batch_leaves_all_bit_equal_to_never_having_seen_it(
    net: nn.Module,
    twin: nn.Module,
    batches: list[Batch],
    way: str,
    made: tuple[Any, dict[str, Any]],
) -> None:
    kind, options = made
    bad = poisoned(batches[9])
    ends = []
    for model, seen in ((net, [*batches[:3], bad, *batches[3:6]]), (twin, batches[:6])):
        optimizer = kind(model.parameters(), **options)
        with stepping(way, model, optimizer) as step:
            skipped = [bool(step(batch).skipped) for batch in seen]
            ends.append(state(model, optimizer))
        assert skipped == [batch is bad for batch in seen]
    assert same(*ends)


# -- train_step ------------------------------------------------------------------------------------


def test_without_the_guard_a_nan_goes_in(net: nn.Module, batches: list[Batch]) -> None:
    optimizer = torch.optim.AdamW(net.parameters())
    assert not train_step(net, optimizer, poisoned(batches[0]), loss_of, guard=False).skipped
    assert not next(net.parameters()).isfinite().all()


def test_steps_of_the_callers_own_may_come_between_and_the_state_can_be_saved_and_loaded(
    net: nn.Module, twin: nn.Module, batches: list[Batch]
) -> None:
    ours, theirs = (torch.optim.AdamW(n.parameters(), lr=1e-3) for n in (net, twin))
    for i, batch in enumerate(batches[:12]):
        if i % 3:
            train_step(net, ours, batch, loss_of, clip_norm=0.5)
        else:
            plain_step(net, ours, batch)
        plain_step(twin, theirs, batch)
        if i == 6:
            assert updates(ours) == {7.0}
            file = io.BytesIO()
            torch.save({"net": twin.state_dict(), "optimizer": theirs.state_dict()}, file)
            file.seek(0)
            saved = torch.load(file)
            net.load_state_dict(saved["net"])
            ours.load_state_dict(saved["optimizer"])  # of one that was not fused
    assert updates(ours) == {12.0}
    assert_close(net, twin)


def test_every_call_of_step_reaches_the_hooks_on_the_optimizer(
    net: nn.Module, batches: list[Batch]
) -> None:
    optimizer, seen = torch.optim.AdamW(net.parameters()), []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    for batch in batches[:3]:
        train_step(net, optimizer, batch, loss_of)
    assert len(seen) == 3


def test_parameters_added_later_are_trained_too(net: Any, batches: list[Batch]) -> None:
    head, body = net[4], [*net[1].parameters(), *net[2].parameters()]
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    train_step(net, optimizer, batches[0], loss_of)
    before = body[0].detach().clone()
    optimizer.add_param_group({"params": body})
    for batch in batches[1:3]:
        train_step(net, optimizer, batch, loss_of)
    assert not torch.equal(before, body[0])


def test_a_mistake_names_the_argument_and_leaves_the_model_alone(
    net: nn.Module, batches: list[Batch]
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
        ({"loss_fn": lambda o, t: o.detach().sum()}, "depends on no parameter"),
        ({"clip_norm": 0}, "clip_norm must be"),
        ({"clip_norm": "1"}, "clip_norm must be a number > 0 or None, got '1'"),
        ({"model": net.forward}, "model must be"),
        ({"model": optimize(net, "none")}, "use optimize_training_loop"),
        ({"optimizer": net}, "optimizer must be"),
        ({"model": nn.Linear(2, 2)}, "has none of the model"),
    ]
    for change, message in changes:
        with pytest.raises(UsageError, match=message):
            train_step(**usual | change)
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())


# -- optimize_training_loop ------------------------------------------------------------------------


def test_steps_and_skipped_steps_are_counted(net: nn.Module, batches: list[Batch]) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    with optimize_training_loop(net, optimizer, loss_of, level="basic") as loop:
        loop(batches[0])
        loop(poisoned(batches[1]))
        summary = loop.summary()
    assert {row.name: row for row in summary.techniques}["fused_optimizer"].engaged
    assert (summary.steps, summary.skipped_steps) == (2, 1)
    assert sum(summary.throughput.split.values()) == pytest.approx(1.0)


def test_dropout_follows_the_callers_generator(batches: list[Batch]) -> None:
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


def test_a_loss_with_weights_and_a_model_that_takes_names(batches: list[Batch]) -> None:
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
    net: nn.Module, batches: list[Batch], change: dict[str, Any], error: Any, message: str
) -> None:
    optimizer = torch.optim.AdamW(net.parameters())
    arguments: dict[str, Any] = {"loss_fn": loss_of, "level": "none"} | change
    with pytest.raises(error, match=message):
        with optimize_training_loop(net, optimizer, **arguments) as loop:
            loop(batches[0])
