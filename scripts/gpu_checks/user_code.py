"""Data and models as a user would write them, which only a GPU shows to be handled."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LateIndexNet(nn.Module):
    """Looks up a row beyond its table from the 7th training forward on.

    On a GPU that is an assert in a kernel, after which every call to the device raises.
    """

    def __init__(self, in_features: int, classes: int, good_steps: int = 6) -> None:
        super().__init__()
        self.table = nn.Embedding(4, in_features)
        self.head = nn.Linear(in_features, classes)
        self.good_steps, self.forwards = good_steps, 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += self.training
        row = 3 if self.forwards <= self.good_steps else 99
        rows = torch.full((len(x),), row, device=x.device)
        return self.head(x.flatten(1) + self.table(rows))


class Tf32Net(nn.Module):
    """Turns TF32 on by the switch that torch documents, which excludes reading the older one."""

    def __init__(self, in_features: int, classes: int) -> None:
        super().__init__()
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(in_features, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class DoubleNet(nn.Module):
    """Weights in 64 bits."""

    def __init__(self, in_features: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.Linear(in_features, classes, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.flatten(1).double())
