"""Logits in a model's output, also deferred ones, and sums over batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from runner.core.errors import ConfigError, DataError

HALF_DTYPES = (torch.float16, torch.bfloat16)
MAX_KEPT_VALUES = 2**22  # limit of the values in `TensorRows`: 16 MB


@dataclass(frozen=True)
class DeferredLogits:
    """Deferred product of an output layer: hidden [..., width], weight [vocab, width]."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    chunk: int  # tokens at a time

    @property
    def shape(self) -> torch.Size:
        """The shape of the logits."""
        return torch.Size((*self.hidden.shape[:-1], self.weight.shape[0]))

    def compute(self) -> Tensor:
        """Compute the logits, [..., vocab]."""
        return F.linear(self.hidden, self.weight, self.bias)

    def mean_cross_entropy(self, target: Tensor, ignore_index: int) -> Tensor:
        """Return the mean loss over targets other than `ignore_index`, 0-d, in fp32 or better.

        NaN with gradients of 0 if there are none, as in torch.
        """
        kind = self.hidden.device.type
        dtype = self.hidden.dtype
        if torch.is_autocast_enabled(kind) and dtype is not torch.float64:
            dtype = torch.get_autocast_dtype(kind)  # as in a linear layer
        # imported only where logits are deferred
        from runner.core.objectives.chunked_cross_entropy import _MeanCrossEntropy

        hidden, target = self.hidden.flatten(0, -2), target.flatten()
        loss: Tensor = _MeanCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden, self.weight, self.bias, target, ignore_index, self.chunk, dtype
        )
        return loss


def find_logits(output: Any) -> Any:
    """Return the logits of an output: itself, its `logits`, or the first of a tuple."""
    if isinstance(output, Tensor | DeferredLogits):
        return output
    if isinstance(output, dict):
        return output.get("logits")
    # a named tuple may have `logits` anywhere, a plain one has them first
    first = output[0] if isinstance(output, tuple | list) and output else None
    return getattr(output, "logits", first)


def logits(output: Any) -> Tensor:
    """Return the logits of a model's output, in fp32 or better.

    They are the output itself, its `logits` (by key or attribute), or the first of a tuple.
    """
    return float_logits(raw_logits(output))


def raw_logits(output: Any) -> Tensor:
    """Return the logits in the model's dtype. Raises ConfigError if there are none."""
    tensor = find_logits(output)
    if isinstance(tensor, DeferredLogits):
        tensor = tensor.compute()
    if not isinstance(tensor, Tensor):
        problem = f"returns a {type(output).__name__} without logits"
        fix = "return a tensor, a tuple that starts with one, or an object with `logits`"
        raise ConfigError("model", problem, fix)
    return tensor


def float_logits(logits: Tensor) -> Tensor:
    """Upcast 16-bit logits to fp32: a loss in 16 bits has two or three digits."""
    return logits.float() if logits.dtype in HALF_DTYPES else logits


def class_logits(output: Tensor, classes: int | None) -> Tensor:
    """Return logits [samples, classes]; a single logit for two classes becomes [0, logit]."""
    if classes != 2 or output.shape[1:].numel() != 1:
        return output
    output = output.reshape(-1, 1)
    return torch.cat([torch.zeros_like(output), output], 1)


def sum_float64(values: Tensor) -> Tensor:
    """Return the sum in float64, which limits rounding errors over many batches."""
    if values.device.type == "mps":  # no float64; host sync
        values = values.cpu()
    return values.detach().sum(dtype=torch.float64)


class TensorRows:
    """Concatenation of tensors over batches, for metrics that are no sums; on their device.

    Beyond `MAX_KEPT_VALUES` all are dropped, so that memory is bounded.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self.value_count = sum(tensor.numel() for tensor in tensors)
        # copies: the output of a captured graph is overwritten by its next call
        copies = (tuple(tensor.detach().clone() for tensor in tensors),)
        fits = self.value_count <= MAX_KEPT_VALUES
        self.parts: tuple[tuple[Tensor, ...], ...] = copies if fits else ()

    def __add__(self, other: TensorRows) -> TensorRows:
        sums = TensorRows()
        sums.value_count = self.value_count + other.value_count
        sums.parts = self.parts + other.parts if sums.value_count <= MAX_KEPT_VALUES else ()
        return sums

    def concatenate(self) -> tuple[Tensor, ...]:
        """Return the tensors over all batches; () if there were too many values."""
        return tuple(torch.cat(part) for part in zip(*self.parts, strict=True))


def require_count(totals: dict[str, Tensor]) -> int:
    """Return the number of items in the totals; DataError for none. Host sync."""
    count = int(totals["count"]) if "count" in totals else 0
    if count == 0:
        raise DataError("no targets to evaluate: the validation set is empty, or all are ignored")
    return count
