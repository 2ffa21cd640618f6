"""Small models, batches and steps that the tests of updates share."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner import RunConfig, build, train
from runner.core.checkpoint.checkpointer import Checkpointer
from runner.core.interfaces.batch import Batch
from runner.core.optim.optimizer import build_optimizer, find_optimizer
from runner.core.optim.optimizer_step import OptimizerStep
from runner.core.optim.schedule import lr_factors
from runner.core.schemas.optimizer import OptimizerConfig, ScheduleConfig, ScheduleKind
from runner.core.schemas.stability import StabilityConfig

FUSED, LISTS, LOOP = {"fused": True}, {"foreach": True}, {"foreach": False}
MOMENTUM = {"momentum": 0.9, "nesterov": True}
OPTIMIZERS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *[(name, {}, how) for name in ("AdamW", "Adam", "Adagrad") for how in (FUSED, LISTS, LOOP)],
    ("Adam", {"amsgrad": True}, FUSED),
    *[("SGD", options, how) for options in (MOMENTUM, {}) for how in (FUSED, LISTS, LOOP)],
    ("SGD", {"momentum": 0.9, "dampening": 0.5}, LISTS),
    *[
        (name, {}, how)
        for name in ("Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "Rprop", "Adafactor")
        for how in (LISTS, LOOP)
    ],
    *[("RMSprop", {"momentum": 0.9, "centered": True}, how) for how in (LISTS, LOOP)],
    ("Muon", {}, {}),
]


def model(plain: bool = True) -> nn.Module:
    """With BatchNorm; without vectors among its weights where it is not `plain`."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8, bias=plain),
        nn.BatchNorm1d(8, affine=plain),
        nn.ReLU(),
        nn.Linear(8, 3, bias=plain),
    )


def batches(count: int) -> list[Batch]:
    """So many random batches, the same each time."""
    noise = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, 6, generator=noise), torch.randint(0, 3, (16,), generator=noise))
        for _ in range(count)
    ]


def make(
    net: nn.Module,
    name: str = "AdamW",
    options: Any = None,
    how: Any = None,
    steady: bool = False,
    **more: Any,
) -> OptimizerStep:
    """An update by torch's optimizer of that name, with a cosine schedule unless `steady`."""
    config = OptimizerConfig(name=name, lr=0.02, options=options or {})
    optimizer = build_optimizer(config, find_optimizer(name), net, how or {})
    rates = [1.0] * 20 if steady else lr_factors(ScheduleConfig(ScheduleKind.cosine, warmup=2), 20)
    stability = more.pop("stability", StabilityConfig())
    return OptimizerStep(net, optimizer, stability, 0.02, rates, **more)


def step(
    net: Callable[..., Tensor],
    update: OptimizerStep,
    batch: Batch,
    beside: float = 0.0,
    parts: int = 1,
) -> tuple[float, bool]:
    """A step whose loss has `beside` added to it, which gradients know nothing of."""
    losses = [
        lambda x=x, y=y: nn.functional.cross_entropy(net(x), y) / parts
        for x, y in zip(batch[0].chunk(parts), batch[1].chunk(parts), strict=True)
    ]
    return take_step(update, *losses, beside=beside)


def net_and_twin() -> tuple[nn.Module, nn.Module]:
    """The same small network twice, with a norm whose weight is a vector."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))
    return net, copy.deepcopy(net)


def train_beside(
    net: nn.Module, update: OptimizerStep, twin: nn.Module, by_hand: Callable[[int], object]
) -> None:
    """Train the net by the update, and its twin by hand on the same batches: weights are equal."""
    for number, batch in enumerate(batches(6)):
        step(net, update, batch)
        twin.zero_grad()
        nn.functional.cross_entropy(twin(batch[0]), batch[1]).backward()
        by_hand(number)
    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def take_step(
    update: OptimizerStep, *losses: Callable[[], Tensor], beside: float = 0.0
) -> tuple[float, bool]:
    """A step with the sum of what `losses` return, and `beside` added as in `step`."""
    update.begin()
    total = torch.zeros(())
    for forward in losses:
        loss = forward()
        (loss if update.scale is None else loss * update.scale.value).backward()
        total += loss.detach()
    norm, skipped = update.measure(total + beside)
    update.apply(norm, skipped)
    return float(norm), bool(skipped)


def assert_a_killed_run_ends_in_the_same_bits(config: RunConfig, folder: Path) -> None:
    """Resume from step 5 of the run in `folder / "whole"`; weights and moments are its own."""
    killed = folder / "killed"
    place = next((folder / "whole/checkpoints").glob("step_*5"))
    shutil.copytree(place, killed / "checkpoints" / place.name)
    config.checkpoint.resume = "auto"
    with build(config, killed) as run:
        assert run.progress.step == 5
        train(run)
    ends = [Checkpointer(folder / name, keep=9).restore() for name in ("whole", "killed")]
    assert_same(*([end.model, end.state["update"]["optimizer"]] for end in ends if end is not None))


def flat(tree: Any) -> list[Any]:
    """The leaves of a nest of dicts, lists and tuples; sparse tensors are made dense."""
    if isinstance(tree, dict):
        return [x for key in tree for x in flat(tree[key])]
    if isinstance(tree, list | tuple):
        return [x for item in tree for x in flat(item)]
    return [tree.to_dense() if isinstance(tree, Tensor) else tree]


def assert_same(one: Any, other: Any) -> None:
    """All leaves are equal to the bit."""
    ones, others = flat(one), flat(other)
    assert len(ones) == len(others)
    for a, b in zip(ones, others, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b
