"""More that goes wrong in a real run, one thing each, beside `faulty_models`."""

from __future__ import annotations

from typing import Any

import torch
from faulty_models import FEATURES, Net
from torch import Tensor, nn

from runner import Hook


class Huge(nn.Module):
    """Finite, and so large that its square is not."""

    def forward(self, x: Tensor, off: Tensor) -> Tensor:
        return x * (1 + 1e20 * off)


class Doubled(torch.autograd.Function):
    """x as it is, and twice the gradient that it has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class WrongBackward(nn.Module):
    """A layer whose backward is off by a factor."""

    def forward(self, x: Tensor, off: Tensor) -> Tensor:
        found: Tensor = Doubled.apply(x)  # type: ignore[no-untyped-call]
        return found


class Seeded(Net):
    """The small network, with a fault that needs no bad batch."""

    def __init__(self, in_features: int, classes: int, fault: str = "", width: int = 8) -> None:
        super().__init__(in_features, classes, width=width)
        if fault == "dead":
            with torch.no_grad():
                self.last[0].bias.fill_(-1e3)
        if fault == "wrong":
            self.part = WrongBackward()
        if fault == "unused":
            self.left_out = nn.Linear(FEATURES, 3)


class Normalised(nn.Module):
    """Statistics over values that are too large for them, and a way around what comes of it."""

    def __init__(self, in_features: int, classes: int) -> None:
        super().__init__()
        self.huge = Huge()
        self.norm = nn.BatchNorm1d(in_features)
        self.last = nn.Linear(in_features, classes)

    def forward(self, x: Tensor) -> Tensor:
        off = x[:, -1:]
        self.norm(self.huge(x, off).detach())
        return self.last(x)


def infinite_loss(output: Tensor, target: Tensor) -> Tensor:
    """Infinite where the network was driven far out; its gradient is finite."""
    loss = nn.functional.cross_entropy(output, target)
    far = output.detach().abs().max() > 1e3
    return loss + torch.where(far, torch.inf, 0.0)


class Ruin(Hook):
    """Writes a NaN into a weight, once."""

    def __init__(self, at: int) -> None:
        self.every = at
        self.done = False

    def on_step(self, run: Any, step: Any) -> None:
        if not self.done:
            self.done = True
            with torch.no_grad():
                run.model.first.weight[0, 0] = torch.nan


class Hoard(Hook):
    """Keeps something of each step, 50 KB of it."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def on_step(self, run: Any, step: Any) -> None:
        self.kept.append(torch.ones(12_800))
