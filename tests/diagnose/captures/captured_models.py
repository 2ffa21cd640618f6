"""A model that keeps a capture honest: everything that can make two steps of it differ."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn


class Chancy(nn.Module):
    """Dropout, BatchNorm, a buffer of its own, and a number from python's generator."""

    seen: Tensor

    def __init__(
        self,
        in_features: int,
        classes: int,
        draws: bool = False,
        fails: int = 0,
        saved: bool = True,
    ) -> None:
        super().__init__()
        self.draws, self.fails = draws, fails
        self.first = nn.Linear(in_features, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(8, classes)
        self.register_buffer("seen", torch.zeros(()), persistent=saved)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        if self.fails and self.training and int(self.norm.num_batches_tracked) + 1 == self.fails:
            raise ValueError("my own mistake")
        x = self.drop(self.norm(self.first(x)).relu()) * (1 + 0.001 * self.seen)
        if self.draws:
            x = x * (1 + random.random())
        return self.last(x)
