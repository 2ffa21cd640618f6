"""Batches of uneven sizes, tallied and summed as an evaluation does."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from runner.core.interfaces.objective import Objective

CUTS = ([16, 16, 5], [1, 30, 6])  # uneven batches of the same 37 samples


def totals(objective: Objective, output: Tensor, target: Tensor, cuts: list[int]) -> dict[str, Any]:
    """What the batches add up to."""
    sums: dict[str, Any] = {}
    for o, t in zip(output.split(cuts), target.split(cuts), strict=True):
        batch = objective.batch_sums(o, t)
        sums = {k: sums[k] + v for k, v in batch.items()} if sums else batch
    return sums


def measured(group: Any, output: Tensor, target: Tensor, cuts: list[int]) -> dict[str, float]:
    """What a group of metrics comes to over batches of these sizes."""
    parts = zip(output.split(cuts), target.split(cuts), strict=True)
    first, *others = [group.batch_sums(o, t) for o, t in parts]
    for other in others:
        first = first + other
    return dict(first.compute(group))


def weighted_loss(objective: Objective, output: Tensor, target: Tensor, cuts: list[int]) -> float:
    """The mean of the batches' losses by their weights."""
    parts = list(zip(output.split(cuts), target.split(cuts), strict=True))
    summed = sum(objective(o, t) * objective.weight(t) for o, t in parts)
    return float(summed / objective.weight(target))
