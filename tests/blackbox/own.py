"""A user's package: noise and dropout, faults on request, and a death at a given sample."""

from __future__ import annotations

import logging.config
import os
import signal

import torch
from torch import Tensor, nn

fetched = 0


class Data:
    """Two classes that can be told apart. `OWN_DIES_AT` kills the process, as kill -9 does."""

    task, in_features, classes = "classification", 6, 2

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        global fetched
        fetched += 1
        if fetched == int(os.environ.get("OWN_DIES_AT", -1)):
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.randn(6) + index % 2, index % 2


class Log(nn.Module):
    """NaN for whatever is negative."""

    def forward(self, x: Tensor) -> Tensor:
        return x.log()


class Net(nn.Module):
    """Dropout and BatchNorm; `fault` is log (NaN in module `part`) or raises."""

    def __init__(self, in_features: int, classes: int, fault: str = "") -> None:
        super().__init__()
        if fault == "raises":
            raise ValueError("told to fail")
        self.part = Log() if fault == "log" else nn.Identity()
        self.layers = nn.Sequential(
            nn.Linear(in_features, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3),
            nn.Linear(8, classes),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.part(x))


class Intrusive(Net):
    """Sets up logging and a handler of SIGTERM of its own, then raises, at once or in a step."""

    def __init__(self, in_features: int, classes: int, early: bool = False) -> None:
        super().__init__(in_features, classes)
        self.calls = 0
        logging.config.dictConfig({"version": 1, "root": {"level": "WARNING", "handlers": []}})
        if early:
            raise ValueError("own fault")

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.calls == 2:
            signal.signal(signal.SIGTERM, self.on_signal)
        if self.calls > 5:
            logging.disable()
            raise KeyError("own fault")
        return super().forward(x)

    def on_signal(self, number: int, frame: object) -> None:
        pass
