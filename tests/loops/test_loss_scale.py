"""`scaler=` of `Stability.step` and `train_step`: the step as torch documents it for fp16."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner import Stability, train_step
from runner.core.errors import UsageError
from tests.loops.builders import Batch, assert_close, poisoned, same

GradScaler = torch.amp.GradScaler
CLIP = 0.5
OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.1}),
    (torch.optim.AdamW, {"lr": 1e-3}),
    (torch.optim.AdamW, {"lr": 1e-3, "fused": False}),
    (torch.optim.RMSprop, {"lr": 1e-3}),
]
SCALES = {
    "no overflow": {"init_scale": 2.0**10},
    "overflows": {"init_scale": 2.0**127, "backoff_factor": 2.0**-6, "growth_interval": 3},
}


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """With gradients that overflow in fp32 at the largest scales."""
    return nn.functional.cross_entropy(output, target).div(1e-3)


def plain_step(net: nn.Module, optimizer: Any, parts: list[Batch], scaler: GradScaler) -> float:
    """The documented order: scale, backward, unscale_, clip, step, update; returns the norm."""
    optimizer.zero_grad()
    for x, y in parts:
        scaler.scale(loss_of(net(x), y) / len(parts)).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(net.parameters(), CLIP)
    scaler.step(optimizer)
    scaler.update()
    return norm.item()


@pytest.fixture
def stability() -> Any:
    with Stability([f"stability.clip_norm={CLIP}"]) as stability:
        yield stability


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("made", OPTIMIZERS)
@pytest.mark.parametrize("way", ["Stability", "train_step", "unguarded"])
def test_a_step_with_a_scaler_is_unscale_clip_step_and_update_by_hand(
    net: nn.Module,
    twin: nn.Module,
    batches: list[Batch],
    stability: Stability,
    way: str,
    made: tuple[Any, dict[str, Any]],
    scale: str,
) -> None:
    kind, options = made
    ours, theirs = (kind(model.parameters(), **options) for model in (net, twin))
    mine, their = (GradScaler("cpu", **SCALES[scale]) for _ in range(2))
    skipped = []
    for x, y in batches[:12]:
        before = their.get_scale()
        if way == "Stability":
            report: Any = stability.step(net, loss_of(net(x), y), ours, scaler=mine)
        else:
            report = train_step(
                net, ours, (x, y), loss_of, clip_norm=CLIP, guard=way != "unguarded", scaler=mine
            )
        norm = plain_step(twin, theirs, [(x, y)], their)
        assert mine.state_dict() == their.state_dict()
        skipped.append(bool(report.skipped))
        assert skipped[-1] == (their.get_scale() < before)
        assert float(report.loss) < 1e4
        if not skipped[-1]:
            assert float(report.grad_norm) == pytest.approx(norm, rel=1e-4)
    assert any(skipped) == (scale == "overflows") and not all(skipped)
    assert_close(net, twin, atol=1e-6)


def test_gradients_of_earlier_parts_are_accumulated_scaled(
    net: nn.Module, twin: nn.Module, batches: list[Batch], stability: Stability
) -> None:
    ours, theirs = (torch.optim.AdamW(model.parameters()) for model in (net, twin))
    mine, their = GradScaler("cpu"), GradScaler("cpu")
    for (x, y), last in zip(batches[:6:2], batches[1:6:2], strict=True):
        mine.scale(loss_of(net(x), y) / 2).backward()
        stability.step(net, loss_of(net(last[0]), last[1]) / 2, ours, scaler=mine)
        plain_step(twin, theirs, [(x, y), last], their)
    assert_close(net, twin, atol=1e-6)


def test_an_overflow_is_no_bad_batch_but_a_nan_batch_and_a_gradient_that_never_fits_are(
    net: nn.Module, batches: list[Batch]
) -> None:
    optimizer = torch.optim.AdamW(net.parameters())
    scaler = GradScaler("cpu", init_scale=2.0**127)
    x, y = batches[0]
    overflows, before = 0, [p.clone() for p in net.parameters()]
    with Stability(["stability.max_consecutive_skips=1"]) as stability:
        while stability.step(net, loss_of(net(x), y), optimizer, scaler=scaler).skipped:
            overflows += 1
            assert same(before, list(net.parameters()))
            assert stability.progress.consecutive_skips == 0
        assert overflows > 2 and scaler.get_scale() == 2.0 ** (127 - overflows)
        bad = poisoned(batches[1])[0]
        report = stability.step(net, loss_of(net(bad), y), optimizer, scaler=scaler)
        assert [fault.kind for fault in report.faults] == ["non_finite"]
        assert stability.summary().faults == {"overflow": overflows, "non_finite": 1}
    root = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(root.parameters(), lr=0.1)
    scaler, seen = GradScaler("cpu", init_scale=2.0), []
    with Stability(["stability.max_consecutive_skips=5"]) as stability:
        for _ in range(4):  # the root of 0 has no finite gradient, whatever the scale
            loss = root(torch.zeros(1)).abs().sqrt().sum()
            seen += stability.step(root, loss, optimizer, scaler=scaler).faults
    assert [fault.kind for fault in seen] == ["overflow", "overflow", "non_finite", "non_finite"]


def test_limits_apply_to_the_unscaled_numbers(net: nn.Module, batches: list[Batch]) -> None:
    spike = [f"stability.spike.{name}" for name in ("window=20", "at_least=10", "floor=1")]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    scaler = GradScaler("cpu", growth_interval=4)  # the scale grows while limits are learned
    with Stability(spike) as stability:
        for x, y in batches[:20]:
            assert not stability.step(net, loss_of(net(x), y), optimizer, scaler=scaler).skipped
        x, y = batches[20]
        report = stability.step(net, loss_of(net(x), y).div(1e-4), optimizer, scaler=scaler)
    assert [fault.kind for fault in report.faults] == ["spike"]
    assert scaler.get_scale() == 2.0**16 * 2 ** (21 // 4)  # a spike is no overflow


@pytest.mark.parametrize("way", ["Stability", "train_step"])
def test_a_scaled_loss_is_refused_with_the_scaler_and_warned_of_once_without(
    net: nn.Module,
    batches: list[Batch],
    stability: Stability,
    caplog: pytest.LogCaptureFixture,
    way: str,
) -> None:
    (x, y), optimizer = batches[0], torch.optim.SGD(net.parameters(), lr=0.01)
    scaler = GradScaler("cpu")

    def step(change: Callable[[Tensor], Tensor], scaler: Any = None) -> Any:
        if way == "Stability":
            return stability.step(net, change(loss_of(net(x), y)), optimizer, scaler=scaler)
        return train_step(
            net, optimizer, (x, y), lambda out, target: change(loss_of(out, target)), scaler=scaler
        )

    before = [p.clone() for p in net.parameters()]
    for scaled in (scaler.scale, lambda loss: scaler.get_scale() * loss):
        with pytest.raises(UsageError, match=f"{way}: loss .* give the unscaled loss"):
            step(scaled, scaler)
    assert same(before, list(net.parameters()))
    optimizer.zero_grad()
    with caplog.at_level(logging.WARNING, "runner"):
        step(lambda loss: 0.1 * loss)
        step(lambda loss: 3 * loss)
        step(lambda loss: 2 * loss, scaler)
        step(lambda loss: loss * 65536 / 65536)
        assert not caplog.messages
        step(scaler.scale)
        step(scaler.scale)
        step(lambda loss: loss * 65536)
    assert len(caplog.messages) == 1
    assert "multiplies it by 65536" in caplog.text and "scaler=" in caplog.text
    with pytest.raises(UsageError, match="give the unscaled loss"):
        step(scaler.scale, scaler)


def test_a_disabled_scaler_changes_nothing(
    net: nn.Module, twin: nn.Module, batches: list[Batch]
) -> None:
    scaler = GradScaler("cpu", enabled=False)
    for model, given in ((net, scaler), (twin, None)):
        optimizer = torch.optim.AdamW(model.parameters())
        with Stability() as stability:
            for x, y in (*batches[:3], poisoned(batches[3])):
                loss = scaler.scale(loss_of(model(x), y))
                report = stability.step(model, loss, optimizer, scaler=given)
        assert [fault.kind for fault in report.faults] == ["non_finite"]
    assert same(list(net.parameters()), list(twin.parameters()))


def test_what_is_no_scaler_or_was_unscaled_already_names_the_argument(
    net: nn.Module, batches: list[Batch], stability: Stability
) -> None:
    (x, y), optimizer = batches[0], torch.optim.SGD(net.parameters(), lr=0.01)
    wrong: Any = 65536.0
    with pytest.raises(UsageError, match=r"scaler must be a torch.amp.GradScaler or None, got a f"):
        stability.step(net, loss_of(net(x), y), optimizer, scaler=wrong)
    with pytest.raises(UsageError, match=r"scaler must be .*, got a str"):
        train_step(net, optimizer, (x, y), loss_of, scaler="dynamic")  # type: ignore[arg-type]
    scaler = GradScaler("cpu")
    scaler.scale(loss_of(net(x), y)).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(UsageError, match=r"unscale_\(\) has already been called"):
        stability.step(net, loss_of(net(x), y), optimizer, scaler=scaler)
