"""What tests of hand-written loops build and compare."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
loss_of = nn.functional.cross_entropy


def poisoned(batch: Batch) -> Batch:
    return batch[0] * math.nan, batch[1]


def state(net: nn.Module, optimizer: Any) -> list[Tensor]:
    """Weights, buffers, and the values in the optimizer's state."""
    values = [v for s in optimizer.state_dict()["state"].values() for v in s.values()]
    return [*net.state_dict().values(), *(torch.as_tensor(v) for v in values if v is not None)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def assert_close(net: nn.Module, twin: nn.Module, atol: float = 1e-5) -> None:
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a, b, atol=atol)
