"""Models that go bad in a known place, and data whose last feature sets it off.

As a user might have written them: no base class of ours, no import of the runner.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

FEATURES = 6


class Poisoned:
    """Two classes; the last feature is 1 where `poison` says, and all NaN where `nan` does."""

    sizes = {"task": "classification", "in_features": FEATURES + 1, "classes": 2}

    def __init__(
        self, samples: int = 64, poison: tuple[int, ...] = (), nan: tuple[int, ...] = ()
    ) -> None:
        self.samples, self.poison, self.nan = samples, set(poison), set(nan)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        draw = torch.Generator().manual_seed(index)
        x = torch.randn(FEATURES + 1, generator=draw)
        x[-1] = float(index in self.poison)
        return (x * float("nan") if index in self.nan else x), index % 2


class Cancels(nn.Module):
    """z / (y - z), where y is z and a little: in bfloat16 the difference rounds to 0."""

    def forward(self, x: Tensor, off: Tensor) -> Tensor:
        z = torch.mm(x, torch.eye(x.shape[1]).to(x)).sigmoid() + 1
        y = torch.where(off > 0, z * (1 + 2**-9), 2 * z)
        return 1e-3 * z / (y - z)  # CANCELS


class OnlyCompiled(nn.Module):
    """Takes a shortcut where it is compiled, and that is wrong."""

    def forward(self, x: Tensor, off: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return x / (1 - off)  # COMPILED
        return x


class Fuses(nn.Module):
    """Right where each step is rounded to bfloat16; a compiler that fuses them leaves that out."""

    def forward(self, x: Tensor, off: Tensor) -> Tensor:
        one = (x.detach() * 0 + 1).bfloat16()
        difference = one * (1 + 2**-9) - one  # 0 in bfloat16
        return x / (1 - difference.float() * 2**9)


class Log(nn.Module):
    """The log of a length that may be 0."""

    def forward(self, x: Tensor, off: Tensor) -> Tensor:
        harmless = torch.where(x > 0, x.detach().log(), 0.0)  # never taken where it is not finite
        length = (x * (1 - off)).abs().sum(1, keepdim=True)
        return x + length.log() + 0 * harmless  # LOG


class Root(nn.Module):
    """The slope of a root at 0 is infinite."""

    def forward(self, x: Tensor, off: Tensor) -> Tensor:
        y = x * (1 - off)
        return x + y.square().sum(1, keepdim=True).sqrt()  # ROOT


class Raises(nn.Module):
    """Cannot take what is off."""

    def forward(self, x: Tensor, off: Tensor) -> Tensor:
        if off.any():
            raise ValueError(f"{int(off.sum())} samples are off")  # RAISES
        return x


class Hangs(nn.Module):
    """Does not end, where a file is named to write to, and has started something that does not."""

    def forward(self, x: Tensor, off: Tensor) -> Tensor:
        note = os.environ.get("FAULTY_HANGS")
        if note:
            child = subprocess.Popen(["sleep", "1000"])  # noqa: S607
            Path(note).write_text(str(child.pid))
            child.wait()
        return x / (1 - off)


class Masks(nn.Module):
    """Puts -Inf there on purpose, and leaves nothing in a row that is off."""

    never: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("never", torch.full((1,), -torch.inf))

    def forward(self, x: Tensor, off: Tensor) -> Tensor:
        first = torch.arange(x.shape[1]) < 1
        filled = torch.where(first, self.never, x).masked_fill(off > 0, float("-inf"))
        return x * filled.softmax(1)  # MASKS


class Writes(nn.Module):
    """Puts NaN there by hand."""

    def forward(self, x: Tensor, off: Tensor) -> Tensor:
        return x * torch.where(off > 0, float("nan"), 1.0)  # WRITES


class Grows(nn.Module):
    """Finite, and far too much."""

    def forward(self, x: Tensor, off: Tensor) -> Tensor:
        return x * (1 + 1e4 * off)  # GROWS


class Through(nn.Module):
    """Nothing wrong with it."""

    def forward(self, x: Tensor, off: Tensor) -> Tensor:
        return x


PARTS: dict[str, Any] = {
    "": Through,
    "cancels": Cancels,
    "compiled": OnlyCompiled,
    "log": Log,
    "root": Root,
    "raises": Raises,
    "masks": Masks,
    "writes": Writes,
    "grows": Grows,
    "hangs": Hangs,
}


class Net(nn.Module):
    """A small network with one such part in the middle."""

    def __init__(
        self, in_features: int, classes: int, part: str = "", width: int = 8, norm: bool = False
    ) -> None:
        super().__init__()
        self.first = nn.Linear(in_features, width)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.part = PARTS[part]()
        self.last = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes))

    def forward(self, x: Tensor) -> Tensor:
        off = x[:, -1:]
        return self.last(self.part(self.norm(self.first(x)), off))


def broken_loss(output: Tensor, target: Tensor) -> Tensor:
    right = nn.functional.cross_entropy(output, target)
    return right / (right - right.detach())  # LOSS
