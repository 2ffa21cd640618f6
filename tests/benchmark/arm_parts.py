"""Models, data and metrics of a user's, for arms: some of them train, and some do not."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import zlib
from typing import Any

import torch
from torch import Tensor, nn


class Ends(nn.Module):
    """Something happens to it from the forward of number `at` on: killed, hangs or raises."""

    def __init__(self, in_features: int, classes: int, how: str = "raises", at: int = 1) -> None:
        super().__init__()
        self.layer = nn.Linear(in_features, classes)
        self.how, self.at, self.calls = how, at, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls >= self.at:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "hangs":
                threading.Event().wait()
            raise ValueError("my own mistake")
        return self.layer(x)


class Huge(nn.Module):
    """More than any machine has."""

    def __init__(self, in_features: int, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1 << 50))


class Broken:
    """Every sample is NaN."""

    sizes = {"task": "classification", "in_features": 6, "classes": 2}

    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((6,), torch.nan), index % 2


class Slow:
    """Each sample takes a while to come."""

    sizes = {"task": "classification", "in_features": 6, "classes": 2}

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(self.seconds)
        return torch.full((6,), float(index % 2)), index % 2


def weights(run: Any) -> float:
    return float(sum(p.numel() for p in run.model.parameters()))


def path(run: Any) -> float:
    """A number for the module path."""
    return float(zlib.crc32("\n".join(sys.path).encode()))


def string_hash(run: Any) -> float:
    """Differs between interpreters, each of which has a seed of its own."""
    return float(hash("runner") % 2**50)


def spin(run: Any) -> float:
    return float(os.environ.get("GOMP_SPINCOUNT", "0"))


def in_steps(run: Any) -> float:
    """Seconds, by the run's own clock."""
    return float(run.watch.laps().sum())


def fails(run: Any) -> float:
    raise KeyError("no such thing")


def words(run: Any) -> str:
    return "good"
