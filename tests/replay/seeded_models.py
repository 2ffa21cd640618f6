"""More that goes wrong in a real run, one thing each, beside `faulty_models`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from runner import Hook


class Huge(nn.Module):
    """Finite, and so large that its square is not."""

    def forward(self, x: Tensor, off: Tensor) -> Tensor:
        return x * (1 + 1e20 * off)


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
