"""Linear layers with int8 weights; the products are torch's own operators."""

from __future__ import annotations

from collections import Counter
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LEVELS = 127  # on either side of zero
TINY = 1e-12  # the smallest scale, for rows of zeros
MIN_CUDA_ROWS = 17  # the fewest that `torch._int_mm` takes on CUDA; other sizes: multiples of 8


class Int8Linear(nn.Module):
    """Replaces a linear layer: int8 weights with one scale per output.

    [..., in] -> [..., out], in the dtype of the layer it replaces. `dynamic` quantises each row of
    the input as it comes and multiplies in int8 (`torch._int_mm`); otherwise weights become floats
    for each product, which saves memory alone.
    """

    quantized: Tensor  # [out, in]
    scale: Tensor  # [out]
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, dynamic: bool) -> None:
        super().__init__()
        self.dynamic = dynamic
        exact = weight.detach().float()
        levels = product_levels(weight.device.type) if dynamic else LEVELS
        scale = exact.abs().amax(1).clamp(min=TINY) / levels
        self.register_buffer("quantized", (exact / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if bias is None else bias.detach().float().clone())

    @property
    def weight(self) -> Tensor:
        """The weights in fp32: torch's transformer layers read them beside the forward."""
        return self.quantized * self.scale[:, None]

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, in the dtype of the input or of autocast."""
        kind = x.device.type
        autocast = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if autocast else x.dtype
        if self.dynamic:
            product = self._int8_product(x)
        elif dtype is torch.float16:  # sums of unscaled weights overflow it
            product = F.linear(x.float(), self.quantized.float())
        else:
            product = F.linear(x.to(dtype), self.quantized.to(dtype))
        y = product * self.scale
        return (y if self.bias is None else y + self.bias).to(dtype)

    def _int8_product(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).float()
        step = rows.abs().amax(1, keepdim=True).clamp(min=TINY) / LEVELS
        levels = (rows / step).round().to(torch.int8)
        if x.is_cuda:  # at every size: a branch would fix the batch size of an exported model
            levels = F.pad(levels, (0, 0, 0, MIN_CUDA_ROWS - 1))
        product = torch._int_mm(levels, self.quantized.t())[: rows.shape[0]]
        return (product * step).reshape(*x.shape[:-1], -1)


@cache
def product_levels(device_type: str) -> int:
    """Levels of a weight on either side of zero with which int8 products are exact.

    A CPU without VNNI adds pairs of products in 16 bits, which saturate beyond 64 levels (oneDNN,
    "Nuances of int8 computations"); found by trying it, as torch does not say.
    """
    if device_type != "cpu":
        return LEVELS
    largest = torch.full((4, 64), LEVELS, dtype=torch.int8)
    exact = bool((torch._int_mm(largest, largest.t()) == 64 * LEVELS**2).all())
    return LEVELS if exact else 64


def linear_weight(module: nn.Module) -> Tensor | None:
    """[out, in] of a plain linear layer, or of transformers' Conv1D; else None.

    Subclasses and layers with hooks may compute anything, so they stay float.
    """
    weight = module._parameters.get("weight")
    if weight is None or not weight.is_floating_point():
        return None
    if module._forward_hooks or module._forward_pre_hooks:
        return None
    kind = type(module)
    if kind is nn.Linear:
        return weight
    if (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D"):
        return weight.t()
    return None


def candidates(model: nn.Module, min_features: int, multiple: int = 1) -> dict[nn.Module, Tensor]:
    """The linear layers to quantise, with their weights.

    Not those below `min_features` on a side, nor weights that another module shares: there would
    be two copies.
    """
    owners = Counter(
        id(p) for module in model.modules() for p in module._parameters.values() if p is not None
    )
    layers: dict[nn.Module, Tensor] = {}
    for module in model.modules():
        weight = linear_weight(module)
        if weight is None or owners[id(module._parameters["weight"])] > 1:
            continue
        if min(weight.shape) >= min_features and not any(n % multiple for n in weight.shape):
            layers[module] = weight
    return layers


def replace_layers(model: nn.Module, layers: dict[nn.Module, Tensor], dynamic: bool) -> nn.Module:
    """The model with an `Int8Linear` in place of each of its `layers`, wherever it occurs."""
    replacements: dict[nn.Module, nn.Module] = {
        module: Int8Linear(weight, module._parameters.get("bias"), dynamic).eval()
        for module, weight in layers.items()
    }
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in replacements:
                parent._modules[name] = replacements[child]
    return replacements.get(model, model)


def model_bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers, each counted once."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())
