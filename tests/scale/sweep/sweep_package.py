"""Models that fail on request, and one whose validation loss is a function of a hyper-parameter."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path

import torch

BEST = 0.3


class Net(torch.nn.Module):
    def __init__(self, in_features: int, classes: int, how: str = "fine", work: int = 8) -> None:
        super().__init__()
        print(f"pid {os.getpid()} of {os.getppid()}", flush=True)  # noqa: T201
        if how == "fail":
            raise ValueError("told to fail")
        if how == "big":
            torch.ones(2**27).sum()  # 512 MiB, for a moment
        if how == "memory":
            raise MemoryError("told to have none")
        self.how, self.work = how, work
        self.layer = torch.nn.Linear(in_features, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "die" and not Path("spared").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        torch.ones(self.work, self.work) @ torch.ones(self.work, self.work)
        return self.layer(x.flatten(1))


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


def mean_output(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that is the model's output."""
    return output.mean()
