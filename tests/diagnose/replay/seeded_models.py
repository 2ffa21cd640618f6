"""More that goes wrong in a real run, beside `faulty_models`; these need the runner."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from runner import Hook
from runner.core.interfaces.run import Run
from runner.core.interfaces.technique import Evidence, RunBuilder, Technique


class Normalised(nn.Module):
    """Statistics over values that are too large for them, and a way around what comes of it."""

    def __init__(self, in_features: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(in_features)
        self.last = nn.Linear(in_features, classes)

    def forward(self, x: Tensor) -> Tensor:
        self.norm((x * (1 + 1e20 * x[:, -1:])).detach())  # finite, and its square is not
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


class LastLayer(Technique):
    """A technique that decides which weights are trained: the last linear layer's."""

    def apply(self, builder: RunBuilder) -> None:
        builder.model.requires_grad_(False)
        [m for m in builder.model.modules() if isinstance(m, nn.Linear)][-1].requires_grad_(True)

    def engaged(self, run: Run) -> Evidence:
        return Evidence(True, "")
