"""A user's package with a fault on request, in the data or in the model."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class Unpicklable(Exception):
    """No process can send it to another one."""

    def __init__(self, sample: int) -> None:
        super().__init__(f"sample {sample} is unreadable")
        self.lock = open(os.devnull)


class Data:
    """Two classes that can be told apart; `fault` happens at sample 37 of those for training.

    With `once`, a file that is made then, it happens a single time.
    """

    task, in_features, classes = "classification", 6, 2

    def __init__(self, split: str = "train", fault: str = "", once: str = "") -> None:
        self.fault, self.once = (fault, once) if split == "train" else ("", "")
        self.samples = 0 if self.fault == "empty" else 80

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        torch.manual_seed(index)
        x: Tensor = torch.randn(6) + index % 2
        if index != 37 or not self.fault or self.once and Path(self.once).exists():
            return x, index % 2
        if self.once:
            Path(self.once).touch()
        match self.fault:
            case "missing":
                x[2] = torch.nan
            case "shape":
                x = x[:4]
            case "label":
                return x, 7
            case "huge":
                x *= 1e6
            case "stop":
                raise StopIteration
            case "raises":
                raise Unpicklable(index)
            case "hangs":
                time.sleep(600)
            case "dies":
                os.kill(os.getpid(), signal.SIGKILL)
        return x, index % 2


class Net(nn.Module):
    """A small model with BatchNorm; `fault` happens in forward, at call 5 of training."""

    def __init__(self, in_features: int, classes: int, fault: str = "", once: str = "") -> None:
        super().__init__()
        self.fault, self.once, self.calls = fault, once, 0
        self.layers = nn.Sequential(
            nn.Linear(in_features, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.training and self.calls == 5 and not (self.once and Path(self.once).exists()):
            if self.once:
                Path(self.once).touch()
            if self.fault == "statistics":
                x = x * 1e30
            else:
                self.break_something()
        elif self.fault == "descriptors" and self.calls == 8:
            limit_to(resource.RLIMIT_NOFILE, 1000)
        output: Tensor = self.layers(x)
        return output

    def break_something(self) -> None:
        match self.fault:
            case "weights":
                with torch.no_grad():
                    self.layers[0].weight[0, 0] = torch.nan
            case "file size":
                limit_to(resource.RLIMIT_FSIZE, 100)
            case "descriptors":
                limit_to(resource.RLIMIT_NOFILE, 1)
            case "clock":
                now = time.time
                time.time = lambda: now() - 86_400
            case "waits":
                time.sleep(2)


def limit_to(what: int, number: int) -> None:
    resource.setrlimit(what, (number, resource.getrlimit(what)[1]))
