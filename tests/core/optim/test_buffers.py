"""Buffers of every kind go back with a skipped step, and only statistics can spoil one."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from runner import build, compose
from runner.core.build.setup import Components
from runner.core.checkpoint.finite_checks import infinite_buffers
from runner.core.errors import ConfigError
from runner.core.objectives.custom import CustomObjective
from runner.core.optim.buffers import BufferSnapshot, _group_by_type, restore_where
from runner.core.optim.loaded_buffers import load_buffers
from runner.core.optim.optimizer import build_optimizer
from runner.core.optim.optimizer_step import OptimizerStep
from runner.core.schemas.optimizer import OptimizerConfig
from runner.core.schemas.stability import StabilityConfig
from tests.my_package import Centred

from .steps import take_step

Change = Callable[[nn.Module, Tensor], None]


class Net(nn.Module):
    """Does `change` to its buffers in each forward in train mode."""

    def __init__(self, buffer: Tensor | None, change: Change, name: str = "kept") -> None:
        super().__init__()
        self.layer, self.unused, self.change = nn.Linear(6, 3), nn.Linear(2, 2), change
        self.register_buffer(name, buffer)

    def forward(self, x: Tensor) -> Tensor:
        self.change(self, x)
        return self.layer(x)


def step(net: nn.Module, update: OptimizerStep, factor: float = 1.0) -> bool:
    return take_step(update, lambda: net(torch.ones(4, 6) * factor).square().mean())[1]


def updates(net: nn.Module, fused: bool) -> OptimizerStep:
    config = OptimizerConfig(name="AdamW", lr=0.01)
    optimizer = build_optimizer(config, torch.optim.AdamW, net, {"fused": True} if fused else {})
    return OptimizerStep(net, optimizer, StabilityConfig(), 0.01, [1.0])


def nothing(net: nn.Module, x: Tensor) -> None:
    pass


KINDS: dict[str, tuple[Tensor | None, Change]] = {
    "grows": (torch.zeros(1), lambda net, x: setattr(net, "kept", torch.cat([net.kept] * 2))),
    "None at first": (None, lambda net, x: setattr(net, "kept", x.mean(0))),
    "dropped": (torch.ones(3), lambda net, x: setattr(net, "kept", None)),
    "registered late": (None, lambda net, x: net.register_buffer("more", x.mean(0))),
    "expanded": (torch.zeros(1).expand(6), nothing),
    "float8": (torch.ones(4).to(torch.float8_e4m3fn), nothing),
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_buffer_of_any_kind_is_as_before_a_skipped_step(kind: str, fused: bool) -> None:
    buffer, change = KINDS[kind]
    net = Net(buffer, change)
    update = updates(net, fused)
    for good in (False, True, False):
        before = copy.deepcopy(dict(net.named_buffers()))
        assert step(net, update, 1.0 if good else math.nan) != good
        if not good:
            after = dict(net.named_buffers())
            assert after.keys() == before.keys()
            for name, old in before.items():
                assert after[name].shape == old.shape
                assert torch.equal(after[name].float(), old.float())


def test_a_buffer_that_is_infinite_by_design_skips_no_step() -> None:
    lowest = torch.full((3,), torch.finfo(torch.float64).min, dtype=torch.float64)
    for name in ("kept", "running_lowest"):
        net = Net(lowest, nothing, name)
        assert not step(net, updates(net, True))
    net = Net(torch.zeros(4), lambda net, x: net.kept.fill_(-math.inf))  # type: ignore[operator,union-attr]
    assert not step(net, updates(net, True))
    assert infinite_buffers(net.named_buffers()) == {"kept"}


def test_running_statistics_of_a_user_layer_are_watched() -> None:
    def track(net: nn.Module, x: Tensor) -> None:
        net.running_top = x.square().amax() * 1e30

    net = Net(torch.zeros(()), track, "running_top")
    update = updates(net, True)
    assert not step(net, update)
    assert step(net, update, 1e6)
    assert bool(net.running_top.isfinite())  # type: ignore[operator]


def test_a_lazy_model_is_refused_in_words(tmp_path: Path) -> None:
    lazy = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    config = compose(["data=cancer", "training.steps=2", "device=cpu", "monitoring.progress=false"])
    with pytest.raises(ConfigError, match=r"model.*LazyLinear.*lazy"):
        build(config, tmp_path, Components(model=lazy))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_the_buffers_of_a_scripted_module_go_back_too() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))  # type: ignore[no-untyped-call]
    buffers = BufferSnapshot(scripted, torch.device("cpu"))
    before = {name: buffer.clone() for name, buffer in scripted.named_buffers()}
    buffers.save()
    scripted(torch.randn(5, 3) * 1e30)
    assert not bool(buffers.are_finite())
    buffers.restore()
    assert all(torch.equal(before[name], buffer) for name, buffer in scripted.named_buffers())


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_a_flag_on_the_device_selects_between_buffers_bit_by_bit() -> None:
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, 3.4e38])
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float8_e5m2, torch.complex128)
    spoiled = [special.to(dtype) for dtype in dtypes]
    spoiled += [torch.tensor([True, False]), torch.tensor(-(2**63)), torch.zeros(0)]
    spoiled += [torch.full((3, 4), math.nan).t(), torch.full((2, 3), -1, dtype=torch.int16)]
    plain = [torch.ones_like(buffer) for buffer in spoiled]
    for saved, changed in ((plain, spoiled), (spoiled, plain)):
        for flag in (0.0, 1.0):
            current = [buffer.clone() for buffer in changed]
            groups = _group_by_type(current, saved)
            assert len(groups) == 5  # by bytes, and complex128
            for buffers, copies in groups:
                restore_where(torch.tensor(flag), buffers, copies, lists=True)
            for value, expected in zip(current, saved if flag else changed, strict=True):
                assert torch.equal(bits(value), bits(expected))


def test_the_buffers_of_an_objective_go_back_too_and_those_that_changed_are_saved() -> None:
    net, loss = nn.Linear(6, 3), Centred(3)
    optimizer = torch.optim.AdamW(net.parameters())
    update = OptimizerStep(
        net, optimizer, StabilityConfig(), 0.01, [1.0], objective=CustomObjective(loss, "loss")
    )
    target = torch.zeros(4, dtype=torch.int64)

    def take(factor: float) -> bool:
        return take_step(update, lambda: loss(net(torch.ones(4, 6) * factor), target))[1]

    first = loss.average.clone()
    assert take(math.nan) and torch.equal(loss.average, first)
    assert update.buffers.changed() == {}
    assert not take(1.0) and not torch.equal(loss.average, first)
    changed = update.buffers.changed()
    assert [*changed] == ["objective:loss.average"]
    other = Centred(3, 2.0)
    other.weight = torch.full((3,), 5.0)
    snapshot = BufferSnapshot(net, torch.device("cpu"), objective=CustomObjective(other, "loss"))
    load_buffers(snapshot, changed, {})
    assert torch.equal(other.average, loss.average) and other.weight.tolist() == [5.0] * 3
    assert {*other.state_dict()} == {"average", "weight"}
    load_buffers(snapshot, {}, {})  # saved before it changed
    assert other.average.tolist() == [2.0] * 3
    load_buffers(BufferSnapshot(net, torch.device("cpu")), changed, {})  # of another loss


def test_buffers_of_a_loss_may_be_sparse_and_large_ones_are_not_copied_in_each_step() -> None:
    class Loss(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.register_buffer("graph", torch.eye(3).to_sparse())
            self.register_buffer("bank", torch.zeros(size))

    for size, copies in ((4, 1), (2**23, 0)):
        snapshot = BufferSnapshot(nn.Linear(2, 2), torch.device("cpu"), objective=Loss(size))
        snapshot.save()
        snapshot.restore(torch.ones(()))
        assert len(snapshot.saved) == copies
        assert set(snapshot.initial) == {"objective:.graph", "objective:.bank"}
