"""Linear layers with int8 weights, and putting them in a model's place of its own."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.device.capabilities import cpu_flags

LEVELS = 127  # on either side of zero
TINY = 1e-12  # a row of zeros has some scale too
VNNI = frozenset({"avx512_vnni", "avx_vnni"})
FEWEST_ROWS = 17  # that the int8 product of CUDA takes; its other sizes are multiples of 8


class Int8Linear(nn.Module, ABC):
    """Stands in for a linear layer: int8 weights, with one scale per output.

    [..., in] -> [..., out], in the type that the layer it replaces would have put out.
    """

    quantized: Tensor  # [out, in]
    scale: Tensor  # [out]
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        exact = weight.detach().float()
        scale = exact.abs().amax(1).clamp(min=TINY) / LEVELS
        self.register_buffer("quantized", (exact / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if bias is None else bias.detach().float().clone())

    @property
    def weight(self) -> Tensor:
        """The weights in fp32: torch's own transformer layers read them past the forward."""
        return self.quantized * self.scale[:, None]

    def put_out(self, x: Tensor) -> torch.dtype:
        """The type of the output for this input."""
        kind = x.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype

    def finish(self, product: Tensor, dtype: torch.dtype) -> Tensor:
        """The scale of each output, and its bias."""
        y = product * self.scale
        return (y if self.bias is None else y.add_(self.bias)).to(dtype)

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""


class WeightOnlyLinear(Int8Linear):
    """A quarter of the memory: weights become floats again for each product, which takes time.

    int8 is exact in bf16. `torch._weight_int8pack_mm` is faster for a few rows in bf16 and slower
    by far for many; a branch on their number would fix the batch size of an exported model.
    """

    def forward(self, x: Tensor) -> Tensor:
        """The product in the type of the input, or of autocast."""
        dtype = self.put_out(x)
        if dtype is torch.float16:  # sums of unscaled weights would overflow it
            bias = None if self.bias is None else self.bias.to(dtype)
            return F.linear(x.to(dtype), self.weight.to(dtype), bias)
        return self.finish(F.linear(x.to(dtype), self.quantized.to(dtype)), dtype)


class DynamicLinear(Int8Linear):
    """The product in int8 as well: each row of the input gets a scale of its own as it comes."""

    def forward(self, x: Tensor) -> Tensor:
        """int8 times int8, summed in int32."""
        dtype = self.put_out(x)
        rows = x.reshape(-1, x.shape[-1]).float()
        step = rows.abs().amax(1, keepdim=True).clamp(min=TINY) / LEVELS
        levels = (rows / step).round().to(torch.int8)
        if x.is_cuda:  # always, since a branch would fix the batch size of an exported model
            levels = F.pad(levels, (0, 0, 0, FEWEST_ROWS - 1))
        product = torch._int_mm(levels, self.quantized.t())[: rows.shape[0]]
        return self.finish(product * step, dtype).reshape(*x.shape[:-1], -1)


class PackedLinear(Int8Linear):
    """The same through torch's own kernel for CPUs: one scale for the whole input, and less time.

    256 rows of 1024 by 1024 take 0.12 of the fp32 product's time, DynamicLinear 0.25.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        zeros = torch.zeros(len(self.scale), dtype=torch.int64)
        engine = torch.backends.quantized.engine
        try:
            if "onednn" in torch.backends.quantized.supported_engines:
                torch.backends.quantized.engine = "onednn"  # twice as fast as the default one
            with warnings.catch_warnings():  # 2.13 announces that quantised types will go
                warnings.filterwarnings("ignore", r"torch\.quantize_per_tensor", UserWarning)
                filled = torch._make_per_channel_quantized_tensor(
                    self.quantized, self.scale.double(), zeros, 0
                )
            self.packed: Any = torch.ops.quantized.linear_prepack(filled, self.bias)
        finally:
            torch.backends.quantized.engine = engine
        # without these instructions sums of two products saturate in 16 bits
        self.seven_bits = VNNI.isdisjoint(cpu_flags())

    def forward(self, x: Tensor) -> Tensor:
        """Quantised, multiplied and scaled in one kernel, which knows fp32 alone."""
        product: Tensor = torch.ops.quantized.linear_dynamic(
            x.float(), self.packed, self.seven_bits
        )
        return product.to(self.put_out(x))


def has_packed() -> bool:
    """Whether torch still has the kernel, and it works here."""
    try:
        layer = PackedLinear(torch.eye(8), None)
        return bool(torch.allclose(layer(torch.eye(8)), torch.eye(8), atol=0.05))
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


def weight_of(module: nn.Module) -> Tensor | None:
    """[out, in] of a plain linear layer, GPT-2's Conv1D of transformers among them; else None.

    A subclass may do anything, and so may hooks: they stay as they are.
    """
    found = module._parameters.get("weight")
    if found is None or not found.is_floating_point():
        return None
    if module._forward_hooks or module._forward_pre_hooks:
        return None
    kind = type(module)
    if kind is nn.Linear:
        return found
    if (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D"):
        return found.t()
    return None


def candidates(model: nn.Module, min_features: int, multiple: int = 1) -> dict[nn.Module, Tensor]:
    """The linear layers to quantise, with their weights.

    Not those below `min_features` on a side, nor weights that another module shares: there would
    be two copies then.
    """
    owners = Counter(
        id(p) for module in model.modules() for p in module._parameters.values() if p is not None
    )
    found: dict[nn.Module, Tensor] = {}
    for module in model.modules():
        weight = weight_of(module)
        if weight is None or owners[id(module._parameters["weight"])] > 1:
            continue
        if min(weight.shape) >= min_features and not any(n % multiple for n in weight.shape):
            found[module] = weight
    return found


def replace(model: nn.Module, layers: dict[nn.Module, Tensor], kind: type[Int8Linear]) -> nn.Module:
    """The model with `kind` in place of its `layers`, wherever each of them occurs."""
    made: dict[nn.Module, nn.Module] = {
        module: kind(weight, module._parameters.get("bias")).eval()
        for module, weight in layers.items()
    }
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in made:
                parent._modules[name] = made[child]
    return made.get(model, model)


def size(model: nn.Module) -> int:
    """Bytes of parameters and buffers, each counted once."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(_bytes(t) for t in tensors.values())


def _bytes(tensor: Any) -> int:
    if type(tensor) not in (Tensor, nn.Parameter) and hasattr(tensor, "__tensor_flatten__"):
        return sum(_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return int(tensor.numel() * tensor.element_size())
