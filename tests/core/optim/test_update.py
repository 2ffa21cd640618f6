"""An update: clipped as torch clips, and a skipped one leaves everything bit-equal."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner.core.errors import ConfigError
from runner.core.interfaces.batch import Batch
from runner.core.optim.fused_kernel import RevertibleStep
from runner.core.optim.optimizer import build_optimizer, resolve_optimizer_class
from runner.core.optim.optimizer_step import OptimizerStep
from runner.core.optim.whole_step import update_weights
from runner.core.schemas.optimizer import OptimizerConfig
from runner.core.schemas.stability import StabilityConfig
from runner.core.security.registry import resolve

from .steps import OPTIMIZERS, assert_same, batches, make, model, step, take_step


@pytest.mark.parametrize("how", [{"fused": True}, {}])
def test_the_schedule_follows_updates_not_batches(how: Any) -> None:
    net = model()
    update = make(net, "SGD", {}, how)
    rates = []
    good = batches(3)
    for batch in [good[0], (torch.full((16, 6), math.nan), good[0][1]), good[1], good[2]]:
        step(net, update, batch)
        rates.append(float(update.optimizer.param_groups[0]["lr"]))
    # the skipped batch met the rate that the next one gets (a host-side skip does not set it)
    expected = [update.lr_at(0), update.lr_at(1), update.lr_at(2)]
    assert [rates[0], *rates[2:]] == pytest.approx(expected)
    assert int(update.updates) == 3


@pytest.mark.parametrize(
    ("name", "how", "is_undone"),
    [
        ("AdamW", {"fused": True}, False),
        ("RAdam", {"foreach": True}, False),
        ("SGD", {"foreach": True}, True),
    ],
)
def test_a_loss_scale_halves_on_overflow_alone_and_the_update_is_unscaled(
    name: str, how: Any, is_undone: bool
) -> None:
    data, plain, scaled = batches(3), model(), model()
    first = make(plain, name, {}, how, steady=True)
    second = make(scaled, name, {}, how, steady=True, loss_scale=1024.0)
    if is_undone:
        second.revertible = RevertibleStep(second.optimizer)
    for batch in data:
        norm, _ = step(plain, first, batch)
        assert step(scaled, second, batch) == (pytest.approx(norm, rel=1e-5), False)
    for a, b in zip(plain.parameters(), scaled.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    assert second.scale is not None
    second.set_limits(math.inf, norm / 9)
    assert step(scaled, second, data[0])[1] and float(second.scale.value) == 1024.0  # a spike
    assert step(scaled, second, (torch.full((16, 6), math.inf), data[0][1]))[1]
    assert float(second.scale.value) == 512.0
    second.set_limits(math.inf, math.inf)
    assert not step(scaled, second, data[0])[1]


@pytest.mark.parametrize(("name", "options", "how"), OPTIMIZERS)
def test_state_continues_an_update_bit_for_bit(name: str, options: Any, how: Any) -> None:
    data, plain = batches(6), name != "Muon"
    straight, resumed = model(plain), model(plain)
    one = make(straight, name, options, how, ema=0.9, loss_scale=8.0)
    for batch in data[:3]:
        step(straight, one, batch)
    weights, state = copy.deepcopy([straight.state_dict(), one.state()])
    for batch in data[3:]:
        step(straight, one, batch)
    other = make(resumed, name, options, how, ema=0.9, loss_scale=8.0)
    resumed.load_state_dict(weights)
    other.load(state)
    for batch in data[3:]:
        step(resumed, other, batch)
    assert_same([straight.state_dict(), one.state()], [resumed.state_dict(), other.state()])


def in_one_graph(net: nn.Module, update: OptimizerStep, batch: Batch) -> bool:
    """A step as the whole-step graph computes it, without the compiler."""
    assert update.kernel is not None
    update.begin()
    loss = nn.functional.cross_entropy(net(batch[0]), batch[1])
    gradients = list(torch.autograd.grad(loss, update.parameters))
    with torch.no_grad():
        results = update_weights(update, update.kernel, gradients, loss.detach(), update.zero)
        update.buffers.restore(results[1])
    return bool(results[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("how", ["kernel", "host", "reverted", "one graph", "no warm-up"])
def test_the_average_of_a_warm_up_has_the_decay_of_its_number_of_updates(
    how: str, dtype: torch.dtype
) -> None:
    net, warm_up = model().to(dtype), how != "no warm-up"
    fused = {"fused": how in ("kernel", "one graph", "no warm-up")}
    update = make(net, "AdamW", {}, fused, ema=0.4, ema_warmup=warm_up)  # 0.4 after 5 updates
    if how == "reverted":
        update.revertible = RevertibleStep(update.optimizer)
        update.schedule_on_device()
    expected = [p.detach().double().clone() for p in update.parameters]
    applied = 0
    for number, (x, y) in enumerate(batches(9)):
        batch = (x.to(dtype) * (math.nan if number in (0, 4) else 1.0), y)
        skipped = (
            in_one_graph(net, update, batch) if how == "one graph" else step(net, update, batch)[1]
        )
        assert skipped is (number in (0, 4))
        if not skipped:
            applied += 1
            decay = min(0.4, (1 + applied) / (10 + applied)) if warm_up else 0.4
            expected = [
                decay * e + (1 - decay) * p.detach().double()
                for e, p in zip(expected, update.parameters, strict=True)
            ]
    assert applied == 7 and (not warm_up or int(update.ema_updates) == 7)
    tolerance = 1e-13 if dtype is torch.float64 and warm_up else 1e-6
    for average, value in zip(update.average, expected, strict=True):
        assert torch.allclose(average.double(), value, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("saved", "requested", "warm_up"),
    [(True, None, 3), (None, None, None), (None, True, 0), (True, False, None)],
)
def test_a_loaded_average_keeps_its_warm_up_unless_another_is_requested(
    saved: bool | None, requested: bool | None, warm_up: int | None
) -> None:
    net = model()
    update = make(net, ema=0.9, ema_warmup=saved)
    for batch in batches(3):
        step(net, update, batch)
    state = update.state()
    if saved is None:  # a checkpoint of an older version
        del state["ema_updates"]
    resumed = make(net, ema=0.9, ema_warmup=requested)
    resumed.load(state)
    count = resumed.state()["ema_updates"]
    assert (None if count is None else int(count)) == warm_up


def test_decay_is_kept_off_norms_and_biases() -> None:
    net = model()
    optimizer = make(net).optimizer
    decayed, plain = optimizer.param_groups
    assert {p.ndim for p in decayed["params"]} == {2}
    assert {p.ndim for p in plain["params"]} == {1}
    assert plain["weight_decay"] == 0.0
    assert decayed["weight_decay"] == 0.01


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "AdmaW"}, "optimizer.name: .* did you mean AdamW"),
        ({"name": "mine.Lion"}, "use optimizer._target_=mine.Lion"),
        ({"name": "LBFGS"}, "several times a step"),
        ({"name": "SparseAdam"}, "sparse gradients, but those of 0.weight are dense"),
        (
            {"_target_": "torch.nn.Linear"},
            "optimizer._target_: torch.nn.Linear is not an optimizer",
        ),
    ],
)
def test_an_optimizer_that_cannot_be_used_is_answered_with_a_way_out(
    config: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_optimizer_class(OptimizerConfig(**config), model(), partial(resolve, trusted=()))


def test_options_are_handed_on_to_the_class_that_it_is_made_from(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Own(torch.optim.SGD):
        def __init__(self, params: Any, scale: float = 1.0, **rest: Any) -> None:
            super().__init__(params, **rest)

    config = OptimizerConfig("SGD", weight_decay=0.5, options={"scale": 2.0, "momentum": 0.9})
    made = build_optimizer(config, Own, model(), {})
    assert [group["weight_decay"] for group in made.param_groups] == [0.5, 0.0]
    assert made.param_groups[0]["momentum"] == 0.9
    caplog.set_level("INFO", "runner")
    build_optimizer(OptimizerConfig("Rprop"), torch.optim.Rprop, model(), {})
    assert "optimizer.weight_decay is not used: Rprop has no weight decay" in caplog.text


def test_an_unknown_optimizer_option_is_named() -> None:
    config = OptimizerConfig(options={"momentun": 0.9})
    with pytest.raises(ConfigError, match=r"optimizer\.options\.momentun"):
        build_optimizer(config, torch.optim.AdamW, model(), {})


def test_a_parameter_without_gradients_at_times_updates_as_torch_does_also_after_a_resume() -> None:
    def sometimes(net: nn.Module, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        x = net[0](batch[0]) if number % 2 else torch.cat([batch[0], batch[0][:, :2]], 1)
        return nn.functional.cross_entropy(net[3](x.relu()), batch[1])

    data = batches(8)
    ours, theirs = model(), model()
    update = make(ours, how={"fused": True}, stability=StabilityConfig(clip_norm=None))
    reference = make(theirs, how={"fused": True}).optimizer
    for number, batch in enumerate(data):
        if number == 4:  # a fresh process
            state = copy.deepcopy(update.state())
            update = make(ours, how={"fused": True}, stability=StabilityConfig(clip_norm=None))
            update.load(state)
        take_step(update, lambda batch=batch, n=number: sometimes(ours, batch, n))
        reference.zero_grad()
        sometimes(theirs, batch, number).backward()
        for group in reference.param_groups:
            group["lr"] = update.lr_at(number)
        reference.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_what_the_config_says_of_the_optimizer_wins_over_the_state_that_is_loaded() -> None:
    net = model()
    state = copy.deepcopy(make(net, how={}).state())
    update = make(net, options={"eps": 1e-3}, how={"fused": True})
    step(net, update, batches(1)[0])
    update.load(state)
    assert update.optimizer.param_groups[0]["eps"] == 1e-3
    assert update.optimizer.param_groups[0]["fused"]
    step(net, update, batches(1)[0])


def test_moments_follow_weights_into_another_memory_order() -> None:
    def trained(after: torch.memory_format) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 3))
        x, y = torch.randn(8, 3, 3, 3), torch.randint(0, 3, (8,))
        update = make(net, how={"fused": True})
        step(net, update, (x, y))
        state = copy.deepcopy(update.state())
        net.to(memory_format=after)  # type: ignore[call-overload]
        update = make(net, how={"fused": True})
        update.load(state)
        step(net, update, (x, y))
        return [p.detach().contiguous() for p in net.parameters()]

    for a, b in zip(trained(torch.contiguous_format), trained(torch.channels_last), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_sgd_with_dampening_is_not_guarded_in_the_kernel() -> None:
    """Its first step is not dampened, which a momentum buffer of zeros cannot give."""
    results = []
    for how in ({"fused": True}, {"foreach": False}):
        net = model()
        update = make(net, "SGD", {"momentum": 0.9, "dampening": 0.5}, how)
        assert not update.in_kernel
        step(net, update, batches(1)[0])
        results.append([p.detach().clone() for p in net.parameters()])
    for fused, plain in zip(*results, strict=True):
        assert torch.allclose(fused, plain, atol=1e-7)
