"""Which units are dead: the outputs of ReLU that are 0 for every sample."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# those whose gradient is 0 where their output is; that of a leaky one, or of GELU, is not
RELUS = {"relu", "relu_", "relu6", "_threshold", "threshold_"}
CHANNELS = ("conv", "batch_norm", "instance_norm", "group_norm")  # units are in dimension 1
SAMPLES = 128  # fewer say little of a unit that is rarely needed


@dataclass
class _Units:
    """Units of one layer."""

    looks: Tensor  # in a row at which a unit was 0 throughout
    alive: Tensor | None = None  # in this step
    samples: int = 0  # in this step
    needed: int = 0  # looks in a row, until a unit is dead


class DeadUnits(TorchFunctionMode):
    """While entered, notes which units of each ReLU's output were ever other than 0.

    It sees calls of torch, so `x.relu()` as well as `nn.ReLU`, in code that is not compiled. Units
    are those of the last layer with a parameter that ran before. Nothing is read, and nothing of
    the computation changes.
    """

    def __init__(self, model: nn.Module, after: int) -> None:
        super().__init__()
        self.after = after  # looks in a row
        self.owners = {
            id(parameter): prefix or "model"
            for prefix, module in model.named_modules()
            for parameter in module.parameters(recurse=False)
        }
        self.layers: dict[str, _Units] = {}
        self.watching = False
        self.layer, self.dimension = "", -1

    def begin(self) -> None:
        """Another step."""
        self.watching, self.layer = True, ""
        for layer in self.layers.values():
            layer.alive, layer.samples = None, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if self.watching and isinstance(output, Tensor):
            name = getattr(func, "__name__", "")
            relu6 = name == "hardtanh" and [*args[1:2], kwargs.get("min_val")][0] == 0
            if name in RELUS or relu6:
                self._record(output)
            else:
                owners = [self.owners.get(id(value)) for value in (*args, *kwargs.values())]
                if name != "__get__" and any(owners):  # not an attribute of a parameter
                    self.layer = next(filter(None, owners))
                    self.dimension = 1 if name.startswith(CHANNELS) else -1
        return output

    def _record(self, output: Tensor) -> None:
        if not self.layer or output.dim() < 2 or not output.numel():
            return
        unit = 1 if output.dim() > 3 else self.dimension % output.dim()
        rest = [i for i in range(output.dim()) if i != unit]
        alive = output.detach().amax(rest) != 0  # none is below 0; a NaN is no zero
        layer = self.layers.get(self.layer)
        if layer is None or layer.looks.shape != alive.shape:
            layer = self.layers[self.layer] = _Units(torch.zeros_like(alive, dtype=torch.int32))
        layer.alive = alive if layer.alive is None else layer.alive | alive
        layer.samples += len(output)

    def count(self, skipped: Tensor) -> Tensor:
        """How many units of each layer are dead, on the device; of a skipped step nothing counts.

        In the order of `self.layers`, of which there must be one.
        """
        dead = []
        for layer in self.layers.values():
            if layer.alive is not None:
                again = torch.where(layer.alive, 0, layer.looks + 1)
                layer.looks = torch.where(skipped > 0, layer.looks, again)
                layer.needed = max(self.after, -(-SAMPLES // layer.samples))
            dead.append((layer.looks >= layer.needed).sum())
        self.watching = False
        return torch.stack([number.to(skipped.device, torch.float32) for number in dead])

    def describe(self, dead: Iterable[float]) -> dict[str, tuple[int, int]]:
        """Dead units and all units, by layer, from what `count` gave."""
        pairs = zip(self.layers.items(), dead, strict=True)
        return {name: (int(number), len(layer.looks)) for (name, layer), number in pairs}
