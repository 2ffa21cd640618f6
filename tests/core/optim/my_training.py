"""Optimizers, models and data as a user would write them: each optimizer makes its own update."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class SignedAdamW(torch.optim.AdamW):
    """A step() written by hand, which counts its calls and knows of no flag and no scale."""

    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            for weight in group["params"]:
                weight.sub_(group["lr"] * weight.grad)
                self.state[weight]["step"] = self.calls  # a number, where torch keeps a tensor


class ShrunkSGD(torch.optim.SGD):
    """torch's step, after which the weights shrink."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                weight.mul_(0.99)


class PlainInit(torch.optim.Adagrad):
    """step() is torch's, and what it collects is the user's: no gradient is taken as it is."""

    def _init_group(self, group: dict[str, Any], params: Any, grads: Any, *rest: Any) -> Any:
        collected = super()._init_group(group, params, grads, *rest)
        grads[:] = [grad.clamp(-0.01, 0.01) for grad in grads]
        return collected


class FromScratch(torch.optim.Optimizer):
    """Momentum in a list beside `state`, and a count in Python."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.velocity = [torch.zeros_like(p) for g in self.param_groups for p in g["params"]]
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for weight, velocity in zip(weights, self.velocity, strict=True):
            velocity.mul_(0.9).add_(weight.grad)
            weight.sub_(velocity * self.param_groups[0]["lr"])


class Rows:
    """Two classes that can be told apart; samples whose index is in `poison` are NaN."""

    sizes = {"task": "classification", "in_features": 6, "classes": 2}

    def __init__(self, poison: tuple[int, ...] = ()) -> None:
        noise = torch.Generator().manual_seed(1)
        self.x = torch.randn(80, 6, generator=noise) + torch.arange(80)[:, None] % 2
        self.x[list(poison)] = float("nan")

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index], index % 2


class Net(nn.Module):
    """Matrices only, since Muon takes nothing else; the buffers are BatchNorm's."""

    def __init__(self, in_features: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(in_features, 8, bias=False),
            nn.BatchNorm1d(8, affine=False),
            nn.Tanh(),
            nn.Linear(8, classes, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class OrderedNet(nn.Module):
    """Two layers of one shape, made in the order of an argument, each with weights of its name."""

    def __init__(self, in_features: int, classes: int, order: str = "ab") -> None:
        super().__init__()
        self.stem = nn.Linear(in_features, 8)
        for name in order:
            torch.manual_seed(ord(name))
            setattr(self, name, nn.Linear(8, 8))
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(self.stem(x).relu()).relu()).relu())


class Bag(nn.Module):
    """Which of the six numbers are positive picks the rows; its gradient is sparse."""

    def __init__(self, in_features: int, classes: int) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(2 * in_features, classes, mode="sum", sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        offsets = 2 * torch.arange(x.shape[1])
        return self.rows((x > 0).long() + offsets) * x.abs().mean()  # NaN stays NaN


# -- optimizers that keep numbers, rates or modes of their own -------------------------------------


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

    def step(self, closure: Any = None) -> Any:
        assert closure is not None
        closure()
        return super().step(closure)


class TwoStepSAM(SAM):
    """The form with two methods."""

    def first_step(self) -> None: ...

    def second_step(self) -> None: ...
