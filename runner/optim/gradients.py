"""The gradients of parameters: their values, their norms, and a division in place."""

from __future__ import annotations

import torch
from torch import Tensor


def gradient_values(parameters: list[Tensor]) -> list[Tensor]:
    """The gradients there are; of sparse ones (embeddings) the values."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if all(gradient.layout is torch.strided for gradient in gradients):
        return gradients
    return [
        g.values() if g.is_sparse else g for g in coalesced_gradients(parameters) if g is not None
    ]


def coalesced_gradients(parameters: list[Tensor]) -> list[Tensor | None]:
    """All gradients; sparse ones with each index once, put in place so that edits reach them."""
    gradients = [parameter.grad for parameter in parameters]
    for i, gradient in enumerate(gradients):
        if gradient is not None and gradient.is_sparse:
            gradients[i] = parameters[i].grad = gradient.coalesce()  # waits for the device
    return gradients


def tensor_norms(tensors: list[Tensor]) -> list[Tensor]:
    """The norm of each, in one kernel; within a graph one by one: the compiler has none for it."""
    if torch.compiler.is_compiling():
        return [torch.linalg.vector_norm(tensor) for tensor in tensors]
    return list(torch._foreach_norm(tensors))


def divide_gradients(groups: list[list[Tensor]], divisors: list[Tensor | None]) -> None:
    """Divide those of each parameter group in place."""
    parts = list(zip(groups, divisors, strict=True))
    if all(divisor is divisors[0] for divisor in divisors):  # mostly: one kernel instead of several
        parts = [([p for parameters, _ in parts for p in parameters], divisors[0])]
    for parameters, divisor in parts:
        gradients = gradient_values(parameters)
        if gradients and divisor is not None:
            torch._foreach_div_(gradients, divisor)
