"""Data in memory of which some samples are spoiled, and runs over them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from runner import build, compose
from runner.core.build.setup import Components
from runner.core.data.dataset import Dataset
from runner.core.interfaces.batch import Batch, Sizes
from runner.core.interfaces.run import Run

SAMPLES, TRAIN, FEATURES, CLASSES, BATCH = 400, 320, 12, 4, 16
QUIET = ["device.threads=1", "monitoring.progress=false", "optimization=basic", "model=mlp",
         "model.width=8", "data=cancer", "training.steps=40", "training.validate_every=1000",
         f"training.batch_size={BATCH}", "data.shuffle=false",
         "data.workers=0"]  # fmt: skip


class Spoiled(Dataset):
    """Four clouds; `change` may spoil them. Unshuffled, so step n has samples 16(n-1) to 16n."""

    sizes = Sizes("classification", in_features=FEATURES, classes=CLASSES)

    def __init__(self) -> None:
        drawn = torch.Generator().manual_seed(7)
        self.y = torch.randint(0, CLASSES, (SAMPLES,), generator=drawn)
        noise = torch.randn(SAMPLES, FEATURES, generator=drawn)
        self.x = noise + self.y[:, None].float()
        self.train, self.validation = np.arange(TRAIN), np.arange(TRAIN, SAMPLES)
        self.odd: tuple[int, Tensor] | None = None  # a first sample, and what its batch is instead

    def fetch(self, indices: np.ndarray, seeds: np.ndarray | None) -> Batch:
        rows = torch.from_numpy(indices)
        if self.odd is not None and len(indices) and indices[0] == self.odd[0]:
            return self.odd[1][: len(indices)], self.y[rows]
        return self.x[rows], self.y[rows]


def spoiled(data: Spoiled, folder: Path | None, *overrides: str) -> Run:
    return build(compose([*QUIET, *overrides]), folder, Components(data=data))
