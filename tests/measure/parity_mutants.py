"""Techniques that are wrong, one way each: parity has to tell every one of them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from runner.batch import count
from runner.run import Run
from runner.technique import Draft, Evidence, Technique


@dataclass
class Mutant(Technique):
    def engaged(self, run: Run) -> Evidence:
        return Evidence(True, "")


@dataclass
class Harmless(Mutant):
    def apply(self, draft: Draft) -> None:
        for parameter in draft.model.parameters():
            parameter.register_hook(torch.clone)


@dataclass
class NotCausal(Mutant):
    """Every token sees those after it."""

    def apply(self, draft: Draft) -> None:
        for module in draft.model.modules():
            if getattr(module, "causal", False):
                module.causal = False  # type: ignore[assignment]


@dataclass
class BlindToPadding(Mutant):
    """Padding counts as text."""

    def apply(self, draft: Draft) -> None:
        forward = draft.forward

        def ignorant(input_ids: Any, attention_mask: Any) -> Any:
            return forward(input_ids)

        draft.forward = ignorant


@dataclass
class DroppedGradient(Mutant):
    """The last parameter, a bias in most models, gets none."""

    def apply(self, draft: Draft) -> None:
        *_, last = draft.model.parameters()
        last.register_hook(torch.zeros_like)


@dataclass
class StaleBuffer(Mutant):
    """BatchNorm goes by this batch, and forgets it."""

    def apply(self, draft: Draft) -> None:
        for module in draft.model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.momentum = 0.0


@dataclass
class SumOfParts(Mutant):
    """Each micro-batch counts as if it were the whole batch."""

    def apply(self, draft: Draft) -> None:
        draft.objective.weight = lambda target: 1.0  # type: ignore[method-assign]


@dataclass
class MeanOfMeans(Mutant):
    """The smaller last micro-batch counts as much as the others."""

    def apply(self, draft: Draft) -> None:
        size = draft.micro_batch
        draft.objective.weight = (  # type: ignore[method-assign]
            lambda target: float(-(-count(target) // size))
        )


@dataclass
class NoDropout(Mutant):
    def apply(self, draft: Draft) -> None:
        for module in draft.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0


@dataclass
class MoreDropout(Mutant):
    def apply(self, draft: Draft) -> None:
        for module in draft.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.8


@dataclass
class NoDecay(Mutant):
    def apply(self, draft: Draft) -> None:
        original = draft.optimizer_class

        class Undecayed(original):  # type: ignore[misc, valid-type]
            def __init__(self, groups: Any, **options: Any) -> None:
                for group in groups:
                    group["weight_decay"] = 0.0
                super().__init__(groups, **options)

        Undecayed.__init__.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
        draft.optimizer_class = Undecayed


@dataclass
class OneInAThousand(Mutant):
    """A loss that is off by a thousandth: less than bf16 rounds."""

    def apply(self, draft: Draft) -> None:
        for parameter in draft.model.parameters():
            parameter.register_hook(lambda gradient: gradient * 1.001)


@dataclass
class Forgetful(Mutant):
    """Gradients that depend on how often this process computed one."""

    def apply(self, draft: Draft) -> None:
        seen = [0]

        def fade(gradient: Any) -> Any:
            seen[0] += 1
            return gradient / seen[0]

        next(draft.model.parameters()).register_hook(fade)


class WrittenInFp32(nn.Module):
    """No mutant but a model: it computes in fp32, whatever its weights are."""

    def __init__(self, in_features: int, classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(in_features, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1).float() @ self.layer.weight.t()
