"""Whether a batch was there before in the epoch: by a few marks of each one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from runner.checks.inputs.measure import LARGEST, MARKS

KEPT = 1024  # batches of an epoch that are remembered
LIKE = 1e-3  # of the samples' spread, by which the marks of the same batch may differ
LEAST = 4  # different samples that a batch must have: fewer are alike by chance


class Repeats:
    """The marks of an epoch's batches, the last thousand of them.

    Marks do not depend on the order of the samples. Where less than half of a batch's samples
    differ from each other, the data are of few different ones, and batches of them are alike by
    chance: those are not judged.
    """

    def __init__(self) -> None:
        self.marks = np.zeros((KEPT, MARKS), np.float32)
        self.steps = np.zeros(KEPT, np.int64)
        self.sizes = np.zeros(KEPT, np.int64)
        self.count = 0
        self.epoch = -1

    def find(self, epoch: int, marks: list[float], samples: int, step: int) -> int:
        """The earlier step of the epoch that had this batch, or nearly; 0: none had."""
        if epoch != self.epoch or not _telling(marks, samples):
            return 0
        n = min(self.count, KEPT)
        mine = np.asarray(marks[:MARKS], np.float32)
        near = LIKE * (mine[-1] - mine[0]) / 4 * min(1.0, (64 / samples) ** 0.5)
        far = np.abs(self.marks[:n] - mine).max(1, initial=0.0)
        same = (far <= near) & (self.sizes[:n] == samples) & (self.steps[:n] < step)
        return int(self.steps[:n][same].max(initial=0))

    def add(self, epoch: int, marks: list[float], samples: int, step: int) -> None:
        """Remember this batch."""
        if epoch != self.epoch:
            self.epoch, self.count = epoch, 0
        if _telling(marks, samples):
            at = self.count % KEPT
            self.marks[at], self.steps[at], self.sizes[at] = marks[:MARKS], step, samples
            self.count += 1

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: 48 bytes a batch of the epoch, 48 kB at most."""
        n = min(self.count, KEPT)
        return {
            "epoch": self.epoch,
            "count": self.count,
            "marks": torch.from_numpy(self.marks[:n].copy()),
            "steps": self.steps[:n].tolist(),
            "sizes": self.sizes[:n].tolist(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        n = len(state["steps"])
        self.epoch, self.count = state["epoch"], state["count"]
        self.marks[:n] = state["marks"].cpu().numpy()
        self.steps[:n], self.sizes[:n] = state["steps"], state["sizes"]


def _telling(marks: list[float], samples: int) -> bool:
    distinct = marks[MARKS] if len(marks) > MARKS else 0.0
    return distinct >= max(LEAST, samples / 2) and bool((np.abs(marks) < LARGEST / 4).all())
