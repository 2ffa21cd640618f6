"""What is in a tensor, and which of its samples are not finite. The host waits at each call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from runner.objectives.deferred_logits import DeferredLogits
from runner.replay.findings import TensorStats

FINITE, INF, NAN = 0, 1, 2
GROWN = 1e3  # weights begin around 1, and those of a model that learns stay below 100


def level(tensor: Tensor) -> int:
    """FINITE, INF or NAN; whole numbers are always finite."""
    values = _values(tensor)
    if values is None or bool(torch.isfinite(values).all()):
        return FINITE
    return NAN if bool(torch.isnan(values).any()) else INF


def stats(name: str, tensor: Tensor) -> TensorStats:
    """Its shape and type, and the range of its finite values."""
    found = TensorStats(name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    values = tensor.detach() if tensor.layout is torch.strided else _values(tensor)
    if values is None or values.is_quantized or values.is_meta:
        return found
    values = values.detach().abs() if values.is_complex() else values.detach()
    values = values.double() if values.device.type != "mps" else values.float()
    finite = values[torch.isfinite(values)]
    found.not_finite = values.numel() - finite.numel()
    if finite.numel():
        found.minimum, found.maximum = float(finite.min()), float(finite.max())
        found.mean, found.std = float(finite.mean()), float(finite.std(correction=0))
    return found


def size(tensor: Tensor) -> float:
    """The root of the mean square."""
    values = _values(tensor)
    if values is None or not values.numel():
        return 0.0
    values = values.detach()
    return float((values.abs() if values.is_complex() else values).float().square().mean().sqrt())


def tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a nest of tuples, lists and dicts, with its place in it."""
    if isinstance(value, Tensor):
        yield name or "tensor", value
    elif isinstance(value, DeferredLogits):
        yield from tensors({"hidden": value.hidden, "weight": value.weight}, name)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, tuple | list):
        for i, item in enumerate(value):
            yield from tensors(item, f"{name}[{i}]" if name else str(i))


def bad_samples(tensor: Tensor) -> list[int]:
    """The rows in which a value is not finite."""
    values = _values(tensor)
    if values is None or values.ndim == 0 or tensor.layout is not torch.strided:
        return []
    bad = ~torch.isfinite(values)
    return [int(i) for i in bad.reshape(len(bad), -1).any(1).nonzero()] if len(bad) else []


def bad_state(model: nn.Module) -> list[tuple[str, str, TensorStats]]:
    """Parameters and buffers with NaN or Inf: its name, the module's name, and its numbers.

    A buffer whose only such values are -Inf is a mask, and healthy, but for a norm's.
    """
    found = []
    for owner, module in model.named_modules():
        norm = isinstance(module, nn.modules.batchnorm._NormBase)
        for name, tensor in _own(module):
            parameter = name in module._parameters
            if level(tensor) == FINITE:
                continue
            if parameter or norm or bool((tensor.isnan() | (tensor == torch.inf)).any()):
                what = name if parameter else f"buffer {name}"
                found.append((what, owner, stats(name, tensor)))
    return found


def largest_weight(model: nn.Module) -> str:
    """The largest weight, where it is larger than any a model begins with; else empty."""
    largest, found = GROWN, ""
    for name, parameter in model.named_parameters():
        values = _values(parameter.detach())
        if values is None or not values.numel():
            continue
        most = float(values.abs().max())
        if most > largest:  # NaN is not
            largest, found = most, f"{name} is up to {most:.2g}"
    return found


def state_of(module: nn.Module) -> list[TensorStats]:
    """The module's own parameters and buffers, not those of the modules in it."""
    return [stats(name, tensor) for name, tensor in _own(module)]


def _own(module: nn.Module) -> list[tuple[str, Tensor]]:
    both = [*module._parameters.items(), *module._buffers.items()]
    return [(name, tensor) for name, tensor in both if tensor is not None]


def _values(tensor: Tensor) -> Tensor | None:
    """What may be NaN in it; None where nothing can."""
    if tensor.is_meta or not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    if tensor.is_sparse:
        return tensor.detach().coalesce().values()
    if tensor.layout != torch.strided or tensor.is_quantized:
        return None
    if tensor.element_size() < 2:  # eight-bit types have no arithmetic
        return tensor.detach().float()
    return tensor
