"""Gradients of parameters: values, norms, in-place division, clipping beyond the total norm."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import final

import torch
from torch import Tensor, nn

from runner.core.errors import UsageError
from runner.core.schemas.stability import StabilityConfig

EPSILON = 1e-3  # as in Brock et al.: lets weights that start at zero change


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
    return [dense_values(g) for g in coalesced_gradients(parameters) if g is not None]


def dense_values(gradient: Tensor) -> Tensor:
    """Return a gradient's values as a dense tensor; of a sparse one those that are stored."""
    return gradient.values() if gradient.is_sparse else gradient


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


@final
class GradientClipper:
    """Clips gradients, in this order: adaptive, by value, by the remaining norm.

    Adaptive is AGC (Brock et al. 2021, arXiv:2102.06171, section 4.1): the norm of an output
    unit's gradient is at most `clip_adaptive` times the norm of its weights, or 1e-3 where that is
    less. A unit is one index of dimension 0; vectors and scalars are one unit. As in the paper the
    last linear layer is left out: the last `nn.Linear` that the model registers, unless it is the
    only layer with weights.

    Limits apply to gradients without the loss scale. No host sync. Costs one pass over the
    gradients for each kind of limit and one for the norm.
    """

    def __init__(
        self, config: StabilityConfig, model: nn.Module, groups: list[list[Tensor]]
    ) -> None:
        self.value, self.adaptive = config.clip_value, config.clip_adaptive
        self.per_group = config.clip_per_group
        excluded = _last_linear(model)
        self.adaptive_mask = [[p not in excluded for p in group] for group in groups]

    def clip_gradients(
        self,
        groups: list[list[tuple[Tensor | None, Tensor]]],  # gradient and weight
        clip_norm: float | None,
        scale: Tensor | None,
    ) -> list[Tensor | None]:
        """Clip (coalesced) gradients in place; return each group's divisor, with the loss scale."""
        gradients = [[dense_values(g) for g, _ in group if g is not None] for group in groups]
        all_gradients = [gradient for group in gradients for gradient in group]
        if scale is not None and (self.adaptive or self.value):
            torch._foreach_div_(all_gradients, scale)
            scale = None
        if self.adaptive:
            self._clip_adaptively(groups, self.adaptive)
        if self.value:
            torch._foreach_clamp_min_(all_gradients, -self.value)
            torch._foreach_clamp_max_(all_gradients, self.value)
        if clip_norm is None:
            return [scale] * len(groups)
        if not self.per_group:
            return [_divisor(all_gradients, clip_norm, scale)] * len(groups)
        return [_divisor(group, clip_norm, scale) if group else None for group in gradients]

    def _clip_adaptively(
        self, groups: list[list[tuple[Tensor | None, Tensor]]], factor: float
    ) -> None:
        gradients, weights = [], []
        for group, mask in zip(groups, self.adaptive_mask, strict=True):
            for (gradient, weight), is_adaptive in zip(group, mask, strict=True):
                if gradient is None or not is_adaptive:
                    continue
                gradients.append(dense_values(gradient))
                rows = gradient.indices()[0] if gradient.is_sparse else None
                weights.append(weight.detach() if rows is None else weight.detach()[rows])
        if not gradients:
            return
        factors = _unit_norms(weights)
        torch._foreach_clamp_min_(factors, EPSILON)
        torch._foreach_mul_(factors, factor)
        torch._foreach_div_(factors, _unit_norms(gradients))  # Inf if the gradient is 0
        torch._foreach_clamp_max_(factors, 1.0)
        torch._foreach_mul_(gradients, factors)


def _divisor(gradients: list[Tensor], clip_norm: float, scale: Tensor | None) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(torch.stack(tensor_norms(gradients)))
    if norm.dtype in (torch.float16, torch.bfloat16):
        norm = norm.float()  # as fused kernels require
    if scale is None:
        return (norm / clip_norm).clamp(min=1.0)
    return (norm / clip_norm / scale).clamp(min=1.0) * scale


def _unit_norms(tensors: list[Tensor]) -> list[Tensor]:
    """Return the norms of rows, one tensor at a time: there is no foreach kernel for them."""
    norm, dims = torch.linalg.vector_norm, [tuple(range(1, t.ndim)) or None for t in tensors]
    pairs = zip(tensors, dims, strict=True)
    return [norm(tensor, dim=dim, keepdim=dim is not None) for tensor, dim in pairs]


def _last_linear(model: nn.Module) -> set[Tensor]:
    layers = [m for m in model.modules() if any(p.ndim > 1 for p in m.parameters(recurse=False))]
    linear = [module for module in layers if isinstance(module, nn.Linear)]
    return set(linear[-1].parameters(recurse=False)) if linear and len(layers) > 1 else set()
