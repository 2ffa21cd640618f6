"""A model that can be told how to fail."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch


class Net(torch.nn.Module):
    def __init__(self, in_features: int, classes: int, how: str = "fine", work: int = 8) -> None:
        super().__init__()
        print(f"pid {os.getpid()} of {os.getppid()}", flush=True)  # noqa: T201
        if how == "fail" or (how == "fail_once" and _is_first("failed")):
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


def _is_first(name: str) -> bool:
    try:
        Path(name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
