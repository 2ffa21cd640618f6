"""Optimizers that keep numbers, rates or modes of their own."""

from __future__ import annotations

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


class Averaged(torch.optim.SGD):
    """Schedule-free in small: in evaluation mode the weights are an average of the iterates."""

    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay)
        for group in self.param_groups:
            group["train_mode"], group["count"] = False, 0

    def train(self) -> None:
        self._swap(True)

    def eval(self) -> None:
        self._swap(False)

    @torch.no_grad()
    def _swap(self, train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not train:
                for weight in group["params"]:
                    if "average" in self.state[weight]:  # rounds, as schedule-free does
                        weight.lerp_(self.state[weight]["average"], -1.0 if train else 0.5)
            group["train_mode"] = train

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("call train() before step()")
        super().step(closure)
        for group in self.param_groups:
            group["count"] += 1
            for weight in group["params"]:
                average = self.state[weight].setdefault("average", weight.clone())
                average.lerp_(weight, 1 / group["count"])


class SAM(torch.optim.SGD):
    """Sharpness-aware minimisation, whose step() asserts that it got a closure."""

    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay)

    def step(self, closure: Any = None) -> Any:
        assert closure is not None
        closure()
        return super().step(closure)


class TwoStepSAM(SAM):
    """The form with two methods."""

    def first_step(self) -> None: ...

    def second_step(self) -> None: ...
