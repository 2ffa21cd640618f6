"""Optimizers that keep numbers, rates or modes of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Adapted(torch.optim.Optimizer):
    """Estimates its rate `d` as Prodigy does: a number in each group that grows at every step."""

    def __init__(self, params: Any, lr: float, growth: float = 1.5, weight_decay: float = 0.0):
        defaults = {"lr": lr, "growth": growth, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "d": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["d"] = min(group["d"] * group["growth"], 0.1)
            group["k"] = group.get("k", 0) + 1
            for weight in group["params"]:
                weight.sub_(group["lr"] * group["d"] * weight.grad)


class TwoRates(torch.optim.SGD):
    """Vectors get a hundredth of the rate, whatever groups the caller made."""

    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.0) -> None:
        weights = [p for group in params for p in group["params"]]
        matrices = {"params": [p for p in weights if p.ndim > 1], "lr": lr}
        vectors = {"params": [p for p in weights if p.ndim == 1], "lr": lr / 100}
        super().__init__([matrices, vectors], lr=lr, weight_decay=weight_decay)
