"""Gradients of parameters: values, norms, and in-place division."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from runner.core.errors import UsageError


def disable_autocast(device_type: str) -> AbstractContextManager[None]:
    """Return a context without autocast, for a backward: within one it rounds fp32 gradients."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def gradient_values(parameters: list[Tensor]) -> list[Tensor]:
    """Return the gradients that exist; of sparse ones (embeddings) the values."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if all(gradient.layout is torch.strided for gradient in gradients):
        return gradients
    coalesced = coalesced_gradients(parameters)
    return [g.values() if g.is_sparse else g for g in coalesced if g is not None]


def coalesced_gradients(parameters: list[Tensor]) -> list[Tensor | None]:
    """Return all gradients; sparse ones are coalesced in place, so that edits reach them."""
    gradients = [parameter.grad for parameter in parameters]
    for i, gradient in enumerate(gradients):
        if gradient is not None and gradient.is_sparse:
            # host sync: the number of rows of a sparse gradient
            gradients[i] = parameters[i].grad = gradient.coalesce()
    return gradients


def tensor_norms(tensors: list[Tensor]) -> list[Tensor]:
    """Return the norm of each tensor, in one kernel; in a compiled graph one by one."""
    if torch.compiler.is_compiling():
        return [torch.linalg.vector_norm(tensor) for tensor in tensors]
    if not tensors:
        raise UsageError("the loss depends on none of the parameters that the optimizer updates")
    return list(torch._foreach_norm(tensors))


def divide_gradients(groups: list[list[Tensor]], divisors: list[Tensor | None]) -> None:
    """Divide the gradients of each parameter group in place."""
    parts = list(zip(groups, divisors, strict=True))
    if all(divisor is divisors[0] for divisor in divisors):  # usual case: one kernel suffices
        parts = [([p for parameters, _ in parts for p in parameters], divisors[0])]
    for parameters, divisor in parts:
        gradients = gradient_values(parameters)
        if gradients and divisor is not None:
            torch._foreach_div_(gradients, divisor)
