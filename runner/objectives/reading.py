"""Reading what a model returned, and summing what a batch says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from runner.errors import ConfigError, DataError

HALVES = (torch.float16, torch.bfloat16)


def logits(output: Any) -> Tensor:
    """The tensor to take the loss of, in fp32 or better.

    It is the output itself, its `logits` (by key or attribute), or the first of a tuple. A loss
    taken in 16 bits would keep two or three digits.
    """
    if isinstance(output, Tensor):
        found = output
    else:
        found = _inside(output)
    if found.dtype in HALVES:
        found = found.float()
    return found


def _inside(output: Any) -> Tensor:
    found: Any
    if isinstance(output, dict):
        found = output.get("logits")
    elif isinstance(output, tuple | list):
        # a named tuple may hold the logits anywhere, a plain one holds them first
        found = getattr(output, "logits", output[0] if output else None)
    else:
        found = getattr(output, "logits", None)
    if not isinstance(found, Tensor):
        raise ConfigError(
            "model",
            f"returns a {type(output).__name__} in which there are no logits",
            "return a tensor, a tuple that starts with one, or something with `logits`",
        )
    return found


def total(values: Tensor) -> Tensor:
    """The sum in float64, so that many batches add up without loss."""
    if values.device.type == "mps":  # has no float64; the host waits for the copy
        values = values.cpu()
    return values.detach().sum(dtype=torch.float64)


def counted(totals: dict[str, Tensor]) -> int:
    """How many items were tallied; raises DataError when there were none. The host waits."""
    count = int(totals["count"]) if "count" in totals else 0
    if count == 0:
        raise DataError("no targets to measure: the validation set is empty, or all are ignored")
    return count
