"""Data and models as a user would write them, which only a GPU shows to be handled."""

from __future__ import annotations

import torch
from torch import Tensor, nn

FEATURES, CLASSES = 6, 3


class WrongLabels:
    """A label beyond the classes from the 200th sample fetched on, so within training."""

    sizes = {"task": "classification", "in_features": FEATURES, "classes": CLASSES}

    def __init__(self, samples: int = 600, good: int = 200) -> None:
        self.samples, self.good, self.fetched = samples, good, 0

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.fetched += 1
        target = index % CLASSES if self.fetched <= self.good else 99
        return torch.full((FEATURES,), float(index % CLASSES)), target


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
