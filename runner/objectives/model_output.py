"""Logits in what a model returned, also those not computed yet, and sums over batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from runner.errors import ConfigError, DataError

HALVES = (torch.float16, torch.bfloat16)
KEPT = 2**22  # values that `Rows` keeps: 16 MB


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


def logits(output: Any) -> Tensor:
    """The tensor to take the loss of, in fp32 or better.

    It is the output itself, its `logits` (by key or attribute), or the first of a tuple.
    """
    return float_logits(raw_logits(output))


def raw_logits(output: Any) -> Tensor:
    """The logits in the dtype that the model computed them in."""
    inside = find_logits(output)
    if isinstance(inside, DeferredLogits):
        inside = inside.whole()
    if not isinstance(inside, Tensor):
        problem = f"returns a {type(output).__name__} in which there are no logits"
        fix = "return a tensor, a tuple that starts with one, or something with `logits`"
        raise ConfigError("model", problem, fix)
    return inside


def float_logits(logits: Tensor) -> Tensor:
    """Upcast to fp32: a loss taken in 16 bits would keep two or three digits."""
    return logits.float() if logits.dtype in HALVES else logits


def class_logits(output: Tensor, classes: int | None) -> Tensor:
    """Logits [samples, classes]; one logit for two classes is that of the second, beside 0."""
    if classes != 2 or output.shape[1:].numel() != 1:
        return output
    output = output.reshape(-1, 1)
    return torch.cat([torch.zeros_like(output), output], 1)


def total(values: Tensor) -> Tensor:
    """The sum in float64, so that many batches add up without loss."""
    if values.device.type == "mps":  # has no float64; the host waits for the copy
        values = values.cpu()
    return values.detach().sum(dtype=torch.float64)


class Rows:
    """The rows of some tensors over batches, for metrics that are no sums; on their device.

    Beyond `KEPT` values they are given up, so that memory is bounded.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self.values = sum(tensor.numel() for tensor in tensors)
        # copies: the output of a captured graph is overwritten by its next call
        copies = (tuple(tensor.detach().clone() for tensor in tensors),)
        self.parts: tuple[tuple[Tensor, ...], ...] = copies if self.values <= KEPT else ()

    def __add__(self, other: Rows) -> Rows:
        sums = Rows()
        sums.values = self.values + other.values
        sums.parts = self.parts + other.parts if sums.values <= KEPT else ()
        return sums

    def whole(self) -> tuple[Tensor, ...]:
        """The tensors over all batches; none where there were too many values."""
        return tuple(torch.cat(part) for part in zip(*self.parts, strict=True))


def require_count(totals: dict[str, Tensor]) -> int:
    """The number of items summed up; raises DataError for none. The host waits."""
    count = int(totals["count"]) if "count" in totals else 0
    if count == 0:
        raise DataError("no targets to measure: the validation set is empty, or all are ignored")
    return count
