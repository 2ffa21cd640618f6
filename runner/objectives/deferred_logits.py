"""Logits that a model has not computed yet, and where its output has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class DeferredLogits:
    """What an output layer would have multiplied: hidden [..., width], weight [vocab, width]."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    chunk: int  # tokens at a time

    @property
    def shape(self) -> torch.Size:
        """Of the logits."""
        return torch.Size((*self.hidden.shape[:-1], self.weight.shape[0]))

    def whole(self) -> Tensor:
        """The logits after all, [..., vocab]."""
        return F.linear(self.hidden, self.weight, self.bias)

    def mean_cross_entropy(self, target: Tensor, skip: int) -> Tensor:
        """Over the targets that are not `skip`, 0-d and in fp32 or better.

        NaN, with gradients of 0, where there are none: as torch's own.
        """
        kind = self.hidden.device.type
        dtype = self.hidden.dtype
        if torch.is_autocast_enabled(kind) and dtype is not torch.float64:
            dtype = torch.get_autocast_dtype(kind)  # what a linear layer would compute in
        # imported only where logits are deferred
        from runner.objectives.chunked_cross_entropy import _MeanCrossEntropy

        hidden, target = self.hidden.flatten(0, -2), target.flatten()
        loss: Tensor = _MeanCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden, self.weight, self.bias, target, skip, self.chunk, dtype
        )
        return loss


def find_logits(output: Any) -> Any:
    """Where a model's output has its logits: itself, `logits` by name, or the first of a tuple."""
    if isinstance(output, Tensor | DeferredLogits):
        return output
    if isinstance(output, dict):
        return output.get("logits")
    # a named tuple may hold the logits anywhere, a plain one holds them first
    first = output[0] if isinstance(output, tuple | list) and output else None
    return getattr(output, "logits", first)
