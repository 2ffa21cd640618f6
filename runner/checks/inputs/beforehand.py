"""What can be said of every batch before the first, where the data lie in memory as tensors.

A look at a batch costs as much as a third of the step of a very small model. One pass over the
samples says of all batches at once that none can be outside the limits, be constant, or come again
within an epoch. What is left, drift, is then looked at in batches that are drawn by their number,
so that a run that is resumed draws the same ones. Where the pass finds anything, or a policy does
more than warn of drift or repetition, every batch is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np
import torch
from torch import Tensor

from runner.batch import Batch
from runner.checks.config import Policy
from runner.checks.inputs.look import InputChecks
from runner.checks.inputs.measure import TINY, Labels, Measure
from runner.seeds import mix

EVERY = 64  # batches of which one is looked at
SMALL = 1 << 22  # weights times samples of a step, below which a look is more than 1 % of it
MOST = 1 << 26  # values that are looked through: a fifth of a second
PART = 1 << 22  # values at a time
ALIKE = 1e-5  # of the spread, within which the projections of copies lie
DRAW = 0x10_0C  # apart from what else is drawn by the number of a step


class Beforehand:
    """Speaks for the batches of `size` rows of two tensors, while nobody writes to these."""

    def __init__(self, inputs: Tensor, target: Tensor, rows: np.ndarray, size: int) -> None:
        self.inputs, self.target, self.rows, self.size = inputs, target, rows, size
        self.versions = (inputs._version, target._version)
        self.settled: bool | None = None  # None: until there are limits
        self.free = range(0)  # steps in a row of which none is drawn

    def clears(self, step: int, batch: Batch, checks: InputChecks) -> bool:
        """Whether the batch of that step needs no look."""
        if self.settled is None and checks.baseline.full:
            self.settled = self._settle(batch, checks)
        if not self.settled or (self.inputs._version, self.target._version) != self.versions:
            return False
        if step in self.free:
            return True
        if drawn(step):
            return False
        self.free = range(step, next(later for later in count(step) if drawn(later)))
        return True

    def _settle(self, batch: Batch, checks: InputChecks) -> bool:
        config = checks.config
        if {config.drift, config.duplicates} - {Policy.off, Policy.warn}:
            return False  # what is done about one batch must not be missed
        if self.inputs.is_complex() or self.target.is_complex():
            return False
        if self.inputs[0].numel() * len(self.rows) > MOST:
            return False
        seen = checks.see(batch)  # finds out the form, after a checkpoint too
        if seen.findings or checks.form != seen.plan.form:
            return False
        ends = self._ends(checks.measure, checks.known, seen.plan.labels)
        for limit in checks.limits:
            entry = seen.plan.entries[limit.at]
            if not limit.low <= ends[entry.leaf, entry.stat] <= limit.high:  # neither is NaN
                return False
        return self._differ()

    def _ends(
        self, measure: Measure, known: Labels, labels: str | None
    ) -> dict[tuple[str, str], float]:
        """The least and the largest value of all rows, of inputs and target."""
        found: dict[tuple[str, str], float] = {}
        for name, tensor in (("inputs", self.inputs), ("target", self.target)):
            parts = [
                measure.of_labels(part) if name == labels else torch.aminmax(part)
                for part in self._parts(tensor)
            ]
            found[name, "low"] = float(torch.stack([low for low, _ in parts]).amin())
            found[name, "high"] = float(torch.stack([high for _, high in parts]).amax())
        return found

    def _differ(self) -> bool:
        """Whether too few samples have a copy, or are of one value, to make up half a batch."""
        own = torch.Generator().manual_seed(20_14)  # apart from the run's own generators
        width = self.inputs[0].numel()
        directions = torch.randn(width, 2, generator=own, dtype=torch.float64) / width**0.5
        marks, flat = [], 0
        for part in self._parts(self.inputs):
            samples = part.reshape(len(part), -1)
            low, high = torch.aminmax(samples, dim=1)
            flat += int((low == high).sum()) if width > 1 else 0
            marks.append(samples.double() @ directions)
        shadows = torch.cat(marks)
        shadows = shadows[shadows[:, 0].argsort()]
        near = ALIKE * (shadows.amax(0) - shadows.amin(0)) + TINY
        copies = 2 * int(((shadows[1:] - shadows[:-1]).abs() <= near).all(1).sum())
        last = len(self.rows) % self.size or self.size
        return 2 * copies < self.size and flat < (last if last > 1 else self.size)

    def _parts(self, tensor: Tensor) -> Iterator[Tensor]:
        most = max(1, PART // max(1, tensor[0].numel()))
        for first in range(0, len(self.rows), most):
            yield tensor.index_select(0, torch.from_numpy(self.rows[first : first + most]))


def drawn(step: int) -> bool:
    """Whether the batch of that step is looked at; by no pattern that data could have."""
    return mix(DRAW, step) % EVERY == 0
