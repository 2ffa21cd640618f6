"""Small models, batches and steps that the tests of updates share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from runner.core.interfaces.batch import Batch
from runner.core.optim.optimizer import build_optimizer, find_optimizer
from runner.core.optim.optimizer_step import OptimizerStep
from runner.core.optim.schedule import lr_factors
from runner.core.schemas.optimizer import OptimizerConfig, ScheduleConfig, ScheduleKind
from runner.core.schemas.stability import StabilityConfig


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
    update.begin()
    total = torch.zeros(())
    for x, y in zip(batch[0].chunk(parts), batch[1].chunk(parts), strict=True):
        loss = nn.functional.cross_entropy(net(x), y) / parts
        (loss if update.scale is None else loss * update.scale.value).backward()
        total += loss.detach()
    norm, skipped = update.measure(total + beside)
    update.apply(norm, skipped)
    return float(norm), bool(skipped)


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
