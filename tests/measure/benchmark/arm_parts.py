"""Arms to start processes of, and models, data and metrics of a user's: some of them do not train.

Also whether a process is gone.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from runner import compose
from runner.core.schemas.jobs import BenchmarkConfig
from runner.measure.benchmark.arms import Arm

BASE = ["data=digits", "model=mlp", "device=cpu", "device.threads=1", "schedule.warmup=20"]
PARTS = "tests.measure.benchmark.arm_parts"
OWN = ["device=cpu", "device.threads=1", f"security.trusted=[{PARTS}]"]
QUICK = BenchmarkConfig(warmup_steps=4)


def arm(name: str, *overrides: str) -> Arm:
    return Arm(name, compose([*overrides]), [], f"python -m runner optimization={name}", name)


def own(name: str, model: str, *overrides: str) -> Arm:
    return arm(name, *OWN, "data=cancer", f"model._target_={PARTS}.{model}", *overrides)


def is_gone(pid: int) -> bool:
    """Neither the process nor any of its group runs; one that was killed may take a moment."""
    family = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if process.pid == pid or os.getpgid(process.pid) == pid:
                family.append(process)
    return not any(map(_runs, psutil.wait_procs(family, timeout=20)[1]))


def _runs(process: psutil.Process) -> bool:
    """A process that waits to be collected, which some containers never do, does not."""
    with suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


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


class Slow:
    """Each sample takes a while to come; none is a number without `seconds`."""

    sizes = {"task": "classification", "in_features": 6, "classes": 2}

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 2000 if self.seconds else 120

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(self.seconds)
        return torch.full((6,), float(index % 2) if self.seconds else torch.nan), index % 2


def string_hash(run: Any) -> int:
    """Differs between interpreters, each of which has a seed of its own."""
    return hash("runner")


def in_steps(run: Any) -> float:
    """Seconds, by the run's own clock."""
    return float(run.stopwatch.step_seconds().sum())


def fails(run: Any) -> float:
    raise KeyError("no such thing")
