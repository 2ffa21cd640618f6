"""Values of the logits in a model's output, and sums over batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from runner.core.errors import ConfigError, DataError
from runner.core.interfaces.nested import DeferredLogits, find_logits

HALF_DTYPES = (torch.float16, torch.bfloat16)
MAX_KEPT_VALUES = 2**22  # limit of the values in `TensorRows`: 16 MB


def logits(output: Any) -> Tensor:
    """Return the output itself, its `logits` or its first item, in fp32 or better."""
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
    """Tensors over batches, on their device; beyond `MAX_KEPT_VALUES` all are dropped."""

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
