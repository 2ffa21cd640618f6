"""A user's package with a fault on request, in the data or in the model."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SAMPLE_MIB = {"memory": 128, "one_sample": 2000}


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
            case "crashes":
                os.kill(os.getpid(), signal.SIGSEGV)
        return x, index % 2


class Net(nn.Module):
    """A small model with BatchNorm; `fault` happens in forward, at call 5 of training."""

    def __init__(self, in_features: int, classes: int, fault: str = "", once: str = "") -> None:
        super().__init__()
        self.fault, self.once, self.calls = fault, once, 0
        if fault == "read-only":
            lose_rights_of_root()
        self.layers = nn.Sequential(
            nn.Linear(in_features, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.training and self.fault in SAMPLE_MIB:
            self.allocate(len(x))
        if self.training and self.calls == 5 and not (self.once and Path(self.once).exists()):
            if self.once:
                Path(self.once).touch()
            if self.fault == "statistics":
                x = x * 1e30
            else:
                self.break_something()
        elif self.fault == "descriptors" and self.calls == 8:
            limit_to(resource.RLIMIT_NOFILE, 1000)
        elif self.fault == "full_for_a_while" and self.calls == 9:
            limit_to(resource.RLIMIT_FSIZE, resource.RLIM_INFINITY)
        output: Tensor = self.layers(x)
        return output * 1e4 if self.fault == "spike" and self.calls == 20 else output

    def allocate(self, samples: int) -> None:
        """Use memory for each sample, of which from the first step on 1.5 GiB are left."""
        if self.calls == 1:
            in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            limit_to(resource.RLIMIT_AS, in_use + (1536 << 20))
        torch.empty(samples * SAMPLE_MIB[self.fault] << 20, dtype=torch.uint8)

    def break_something(self) -> None:
        match self.fault:
            case "weights":
                with torch.no_grad():
                    self.layers[0].weight[0, 0] = torch.nan
            case "file size" | "full_for_a_while":
                limit_to(resource.RLIMIT_FSIZE, 100)
            case "descriptors":
                limit_to(resource.RLIMIT_NOFILE, 1)
            case "clock":
                now = time.time
                time.time = lambda: now() - 86_400
            case "event_files":
                for file in Path("outputs/runs/machine_event_files").rglob("events.*"):
                    file.unlink()
            case "read-only":
                Path("read-only/checkpoints").chmod(0o500)
            case "waits":
                limit = time.monotonic() + 120
                while not Path(f"{self.once}_go").exists() and time.monotonic() < limit:
                    time.sleep(0.02)


def limit_to(what: int, number: int) -> None:
    resource.setrlimit(what, (number, resource.getrlimit(what)[1]))


def lose_rights_of_root() -> None:
    """Files are no longer written regardless of their modes, by this thread and later ones."""
    header, rights = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    ctypes.CDLL(None).capset(header, rights)
