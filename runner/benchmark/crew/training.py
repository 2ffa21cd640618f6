"""Whether an arm trains at all: the loss moves, gradients are not zero, every parameter changes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from runner.hook import Report
    from runner.run import Run

CHUNK = 1 << 20  # values that are summed at a time: they are widened for it
ODD = 0x5851F42D4C957F2D  # of Knuth's MMIX generator: spreads small numbers over 64 bits
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
FIRST = 50  # steps whose losses are kept, and as many of the last ones
FEW = 10  # losses whose mean counts for a target; fewer at an end say nothing of a trend
MOVED, ROSE = 2.0, 3.0  # standard errors by which a loss has
NAMED = 8  # parameters that are listed by name


@dataclass
class Course:
    """The numbers of the steps, as they reach the host; nothing is read for it."""

    target: float | None = None  # of the loss
    steps: int = 0
    skipped: int = 0
    not_finite: int = 0
    sloped: int = 0  # steps whose gradient was not zero
    first: list[float] = field(default_factory=list)
    last: deque[float] = field(default_factory=lambda: deque(maxlen=FIRST))
    reached: int | None = None  # the step at which the mean of a few losses was the target

    def add(self, report: Report) -> None:
        """A stretch of steps; some µs."""
        self.steps += len(report.loss)
        self.skipped += sum(report.skipped)
        self.not_finite += sum(not math.isfinite(loss) for loss in report.loss)
        self.sloped += sum(norm != 0.0 for norm in report.grad_norm)
        self.first += report.loss[: max(0, FIRST - len(self.first))]
        if self.target is None or self.reached is not None:
            self.last.extend(report.loss)
            return
        for number, loss in enumerate(report.loss, report.first):
            self.last.append(loss)
            if len(self.last) >= FEW and self.mean <= self.target:
                self.reached = number
                self.last.extend(report.loss[number - report.first + 1 :])
                return

    @property
    def mean(self) -> float:
        """Of the last few losses."""
        return sum(list(self.last)[-FEW:]) / FEW

    def problems(self) -> list[str]:
        """Signs, in these numbers, that nothing is learned."""
        if not self.steps:
            return []
        found = []
        if self.skipped == self.steps:
            found.append("every update was skipped")
        if self.not_finite:
            found.append(f"the loss was not finite in {self.not_finite} of {self.steps} steps")
        if not self.sloped:
            found.append("gradients are zero")
        moved = _moved(*self._ends())
        return found + ([moved] if moved and not self.not_finite else [])

    def _ends(self) -> tuple[list[float], list[float]]:
        """As many of the first losses as of the last, none of them in both."""
        count = min(FIRST, self.steps // 2)
        return self.first[:count], list(self.last)[-count:] if count else []


def _moved(first: Sequence[float], last: Sequence[float]) -> str:
    """What is wrong with how the loss went; batches differ, so it has to be more than their noise.

    Nothing is said of a run that is too short to tell.
    """
    if len(first) < FEW:
        return ""
    a, b = np.asarray(first), np.asarray(last)
    noise = math.sqrt((a.var(ddof=1) + b.var(ddof=1)) / len(a))
    before, after = float(a.mean()), float(b.mean())
    told = f"{before:.4g} over the first {len(a)} steps, {after:.4g} over the last"
    if after - before > ROSE * noise:
        return f"the loss rises: {told}"
    if len(first) == FIRST and abs(after - before) <= MOVED * noise:
        return f"the loss does not move: {told}"
    return ""


def checksums(model: nn.Module) -> dict[str, int]:
    """Of every parameter that is to be trained; one pass over the weights, the host waits."""
    found: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        wraps: object = parameter  # a subclass that holds its numbers in other tensors is left out
        plain = not is_traceable_wrapper_subclass(wraps) and parameter.element_size() in BITS
        if parameter.requires_grad and plain:
            found[name] = _checksum(parameter)
    return found


def unchanged(model: nn.Module, before: dict[str, int]) -> list[str]:
    """The parameters that are to the bit what they were; one pass, the host waits."""
    now = checksums(model)
    return [name for name, checksum in before.items() if now.get(name) == checksum]


def frozen(model: nn.Module) -> list[str]:
    """The parameters that are not to be trained."""
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


def still_words(run: Run, still: Sequence[str]) -> list[str]:
    """What to say of parameters that never changed."""
    if not still:
        return []
    parameters = dict(run.model.named_parameters())
    # a step in one graph leaves no gradients behind, and has one for each of them
    unused = [name for name in still if run.whole is None and parameters[name].grad is None]
    why = "; no gradient reached " + ("them" if len(unused) > 1 else "it") if unused else ""
    if unused and len(unused) < len(still):
        why = f"; no gradient reached {listed(unused)}"
    return [f"these parameters never changed: {listed(still)}{why}"]


def listed(names: Sequence[str]) -> str:
    """Some of the names, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _checksum(parameter: Tensor) -> int:
    """Its bit patterns, each times an odd number of its place, added up modulo 2^64.

    A single value that changes is always seen; that several cancel, as where one gains what
    another loses, takes a coincidence of some 60 bits.
    """
    values = parameter.detach().view(BITS[parameter.element_size()])
    values = values if values.ndim else values.unsqueeze(0)
    rows = max(1, CHUNK * len(values) // max(1, values.numel()))
    parts = torch.split(values, rows)
    weights = _weights(max(part.numel() for part in parts), parameter.device)
    total = 0
    for part in parts:
        flat = part.reshape(-1)
        total = total * ODD + int((flat * weights[: len(flat)]).sum().item())
    return total % (1 << 64)


def _weights(count: int, device: torch.device) -> Tensor:
    """Odd numbers that have nothing to do with one another, over all of int64."""
    mixed = torch.arange(1, count + 1, device=device) * ODD
    mixed ^= mixed >> 29  # or a weight would be the sum of two others
    mixed *= ODD
    return mixed ^ (mixed >> 32) | 1
