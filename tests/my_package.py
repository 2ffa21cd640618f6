"""Classes as a user would write them: no base class of ours, no import of the runner."""

from __future__ import annotations

import random
import time

import numpy as np
import torch
from torch import Tensor, nn


class Net(nn.Module):
    """Sizes by name, one size of its own."""

    def __init__(self, in_features: int, classes: int, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(in_features, width), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Dropout(0.3), nn.Linear(width, classes),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Noisy:
    """Two classes that can be told apart, with noise from every global generator.

    Samples whose index is in `poison` are NaN; fetching takes `seconds`.
    """

    sizes = {
        "task": "classification",
        "in_features": 6,
        "classes": 2,
    }  # so that none is looked into

    def __init__(
        self, samples: int = 120, poison: tuple[int, ...] = (), seconds: float = 0.0
    ) -> None:
        self.samples, self.poison, self.seconds = samples, set(poison), seconds

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.seconds:
            time.sleep(self.seconds)
        target = index % 2
        noise = torch.randn(6) + float(np.random.randn()) * 0.1 + random.random() * 0.1
        x = noise + 2.0 * target
        return (x * float("nan") if index in self.poison else x), target


class Masked:
    """Token sequences whose targets are masked to different lengths."""

    vocab = 16

    def __init__(self, samples: int = 40) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        ids = (torch.arange(9) * (index + 1)) % self.vocab
        target = ids[1:].clone()
        target[: index % 8] = -100
        return ids[:-1], target


class Line:
    """A straight line through seven dimensions, for regression."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.sin(torch.arange(7) * float(index + 1))
        return x, (x * torch.arange(7)).sum() / 7


def absolute_error(output: Tensor, target: Tensor) -> Tensor:
    return (output.squeeze(-1) - target).abs().mean()
