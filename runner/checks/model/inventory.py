"""Every weight and buffer of a model, once, and whose it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor and the module that holds it under `attribute`."""

    name: str
    tensor: Tensor  # without gradient, hooks, and whatever attributes hang on
    original: Tensor
    owner: nn.Module
    attribute: str
    is_parameter: bool

    @property
    def bytes(self) -> int:
        """What its values take."""
        if is_lazy(self.original):
            return 0
        return int(self.tensor.numel() * self.tensor.element_size())


def held(model: nn.Module) -> list[Held]:
    """Parameters and buffers, those under several names by the first of them."""
    found: list[Held] = []
    seen: set[int] = set()
    for path, module in model.named_modules():
        # the dicts themselves, since a class may say otherwise; scripted modules have none
        own = vars(module)
        parameters, buffers = own.get("_parameters"), own.get("_buffers")
        if not isinstance(parameters, dict) or not isinstance(buffers, dict):
            parameters = dict(module.named_parameters(recurse=False))
            buffers = dict(module.named_buffers(recurse=False))
        for kind, tensors in ((True, parameters), (False, buffers)):
            for name, tensor in tensors.items():
                if isinstance(tensor, Tensor) and id(tensor) not in seen:
                    seen.add(id(tensor))
                    full = f"{path}.{name}" if path else name
                    bare = torch.detach(tensor) if plain(tensor) else tensor
                    found.append(Held(full, bare, tensor, module, name, kind))
    return found


def tied(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several: one tensor, or two of the same memory."""
    names: dict[tuple[object, ...], list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        names.setdefault(place(tensor), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def place(tensor: Tensor) -> tuple[object, ...]:
    """Which memory its values are in, and how; equal where two tensors are tied."""
    bare = torch.detach(tensor) if plain(tensor) else None
    if bare is None or not bare.numel():
        return (id(tensor),)
    return (str(bare.device), bare.data_ptr(), bare.shape, bare.stride())


def plain(tensor: Tensor) -> bool:
    """Whether it has values, and they lie in memory as torch's own tensors have them."""
    if is_lazy(tensor) or tensor.is_meta or tensor.is_quantized:
        return False
    wrapper: object = tensor
    return tensor.layout is torch.strided and not is_traceable_wrapper_subclass(wrapper)
