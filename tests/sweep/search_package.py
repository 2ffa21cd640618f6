"""A model whose validation loss is a planted function of a hyper-parameter."""

from __future__ import annotations

import math
import time

import torch

BEST = 0.3


class Planted(torch.nn.Module):
    """Its output is (x - 0.3)², and 1 more unless `how` is good; it learns nothing."""

    def __init__(self, x: float, how: str = "good", pause_s: float = 0.0) -> None:
        super().__init__()
        if how == "fail":
            raise ValueError("told to fail")
        self.value = math.nan if how == "lost" else (x - BEST) ** 2 + (how != "good")
        self.pause_s = pause_s
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(self.pause_s)
            return self.value + 0 * self.weight + torch.zeros(len(x), 1)
        return self.value + torch.zeros(len(x), 1)


def output(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that is the model's output."""
    return output.mean()
