"""Finiteness checks of weights, buffers and optimizer state."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


def is_statistic(buffer: str) -> bool:
    """Whether a buffer is a normalisation's running statistic, which must be finite."""
    return buffer.rpartition(".")[2].startswith("running_")


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all are finite, by the largest: a sum of squares would overflow; one host sync."""
    floats = [tensor for tensor in tensors if _has_floats(tensor)]
    if not floats:
        return True
    with torch.no_grad():
        largest = torch._foreach_norm([_computable(tensor) for tensor in floats], float("inf"))
        device = largest[0].device
        return bool(torch.stack([x.to(device, torch.float32) for x in largest]).isfinite().all())


def infinite_buffers(buffers: Iterable[tuple[str, Tensor]]) -> set[str]:
    """Return the names of buffers with Inf but no NaN, such as masks. Host sync."""
    return {n for n, b in buffers if not all_finite([b]) and not bool(_computable(b).isnan().any())}


def find_non_finite(
    model: Mapping[str, Any], update: Any, exempt: Collection[str] = ()
) -> str | None:
    """Return which part of a checkpoint is not finite, or None; `exempt` buffers may hold Inf."""
    weights = {n: t for n, t in model.items() if isinstance(t, Tensor) and n not in exempt}
    if not all_finite(weights.values()):
        return next((name for name, t in weights.items() if not all_finite([t])), "the model")
    if not all_finite(leaf for leaf in tree_leaves(update) if isinstance(leaf, Tensor)):
        return "the optimizer's state"
    return None


def _has_floats(tensor: Tensor) -> bool:
    numbers = tensor.is_floating_point() or tensor.is_complex()
    packed = str(tensor.dtype).endswith("_x2")  # two numbers per byte, always finite
    return numbers and not packed and tensor.layout is torch.strided and tensor.numel() > 0


def _computable(tensor: Tensor) -> Tensor:
    """Cast 1-byte floats, which have no arithmetic, to bfloat16, which represents all of them."""
    return tensor.to(torch.bfloat16) if tensor.itemsize == 1 else tensor
