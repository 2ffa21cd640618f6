"""The result of comparing techniques with the plain run."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Agreement(Enum):
    """How far a candidate's numbers are those of the plain run."""

    exact = "exact"  # bit by bit
    explained = "explained by precision"
    fail = "FAIL"


@dataclass(frozen=True)
class ParityRow:
    """One tensor over all steps, at the first beyond its bound, else at the one nearest to it.

    Error and bound are relative to its norm in the reference. An `output` counts validation
    batches in place of steps.
    """

    step: int  # 1 is the first
    kind: str
    name: str
    error: float
    bound: float
    kinks: int = 0  # steps beyond it by as little as an activation's kink explains

    def __str__(self) -> str:
        what = self.kind if self.name == self.kind else f"{self.kind} of {self.name}"
        places = {
            "draw": f"{self.name} over draws of dropout",
            "output": f"{self.name} in evaluation mode, of validation batch {self.step}",
            "parameter": f"{what} before step 1",
        }
        place = places.get(self.kind, f"{what} at step {self.step}")
        return f"{place}: off by {self.error:.1e}, rounding or chance explains {self.bound:.1e}"

    @property
    def within(self) -> bool:
        """Whether rounding explains it."""
        return self.error <= self.bound


@dataclass(frozen=True)
class Parity:
    """What comparing a set of techniques with the plain run found."""

    verdict: Agreement
    techniques: list[str]  # those that were applied
    refused: dict[str, str]  # those asked for that could not be, and why
    precision: str  # that the candidate says it computes in
    reference: str  # what stands for the truth: fp64, or fp32 where the model does not run in it
    steps: int
    first: ParityRow | None  # the first that precision does not explain
    rows: list[ParityRow]
    notes: list[str] = field(default_factory=list)
    not_judged: list[str] = field(default_factory=list)  # what a fault could hide in
    culprits: list[str] = field(default_factory=list)  # smallest set that fails
    alone: dict[str, str] = field(default_factory=dict)  # verdict of each technique by itself
