"""Some values of each gradient and weight, for histograms."""

from __future__ import annotations

import torch
from torch import Tensor

from runner.debug.gradients.layers import Named

SAMPLE = 10_000  # values of a tensor in a histogram, evenly spread


def sampled(named: Named, scale: Tensor | None) -> dict[str, Tensor]:
    """Values of each gradient and weight for a histogram, by tag; still on the device."""
    found = {}
    for name, parameter in named:
        found[f"weights/{name}"] = _spread(parameter.detach())
        if parameter.grad is not None and parameter.grad.layout is torch.strided:
            gradient = _spread(parameter.grad)
            found[f"gradients/{name}"] = gradient if scale is None else gradient / scale
    return found


def _spread(tensor: Tensor) -> Tensor:
    """A copy of at most `SAMPLE` values."""
    values = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten()
    return values[:: -(-max(1, values.numel()) // SAMPLE)].clone()
