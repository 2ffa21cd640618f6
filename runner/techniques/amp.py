"""Automatic mixed precision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

from runner.errors import ConfigError
from runner.techniques.base import Choice, Evidence, RunBuilder, Technique
from runner.techniques.cost import product_mflop
from runner.techniques.probe import dry_run_step, outputs
from runner.training.run import Run

if TYPE_CHECKING:
    import torch
    from torch import nn

    from runner.device.device import Device


class Precision(Enum):
    """What matrix products run in; auto takes bf16 where it is fast, else fp16 on a GPU."""

    auto = "auto"
    bf16 = "bf16"
    fp16 = "fp16"


@dataclass
class Amp(Technique):
    """Matrix products in 16 bits; weights, reductions and the loss stay in fp32.

    With `pure` everything between input and loss is in bf16, also what autocast would keep in
    fp32; the weights that are updated and saved, and the optimizer's state, stay in fp32 all the
    same. It is faster and coarser.
    """

    dtype: Precision = Precision.auto
    pure: bool = False
    min_mflop: float = 0.0  # a product smaller than this loses more by casting than it gains
    initial_scale: float = 65536.0  # of the loss in fp16, torch's default; it adapts

    def __post_init__(self) -> None:
        if self.pure and self.dtype is Precision.fp16:
            raise ConfigError(
                "optimization.amp.pure", "in fp16 would overflow", "use optimization.amp.dtype=bf16"
            )
        if self.min_mflop < 0:
            raise ConfigError("optimization.amp.min_mflop", "is negative", "use 0 or more")

    def unavailable(self, device: Device) -> str | None:
        """`auto` needs a fast 16-bit type; one that is asked for by name only has to work."""
        able = device.capabilities
        if self.dtype is Precision.auto and not (able.bf16_fast or able.fp16_fast):
            return f"{device.name} has no fast 16-bit matrix product"
        if self.dtype is Precision.bf16 and not able.bf16:
            return f"{device.name} has no bf16"
        if self.dtype is Precision.fp16 and not able.fp16:
            return f"{device.name} has no fp16"
        if self.pure and not able.bf16:
            return f"{device.name} has no bf16"
        return None

    def apply(self, draft: RunBuilder) -> str | None:
        """Enter autocast around forward and loss; fp16 also gets a loss scale."""
        import torch

        complex_weights = [n for n, p in draft.model.named_parameters() if p.is_complex()]
        if complex_weights:
            return f"there are no 16-bit complex numbers, and {complex_weights[0]} is complex"
        if self.min_mflop and (mflop := product_mflop(draft)) < self.min_mflop:
            return f"a product takes {mflop:,.1f} MFLOP: casting costs more than it saves"
        able = draft.device.capabilities
        fp16 = self.dtype is Precision.fp16 or (
            self.dtype is Precision.auto and not able.bf16_fast and not self.pure
        )
        dtype = torch.float16 if fp16 else torch.bfloat16
        key = "optimization.amp.dtype"
        if self.dtype is Precision.auto:
            reason = "no fast bf16 here" if fp16 else "bf16 is fast here and needs no loss scale"
            draft.choices.append(Choice(key, "fp16" if fp16 else "bf16", reason))
        elif fp16 and draft.device.kind == "cpu":
            reason = "asked for; 20 to 30 times slower on a CPU"
            draft.choices.append(Choice(key, "fp16", reason))
        if fp16:
            draft.loss_scale = self.initial_scale
        if self.pure:
            draft.forward = pure(draft.model, draft.forward, dtype)
        else:
            draft.contexts.append(partial(torch.autocast, draft.device.kind, dtype=dtype))
        return None

    def engaged(self, run: Run) -> Evidence:
        """Layers whose products are in 16 bits in a step; types of layer outputs and weights.

        A layer is the innermost module of a product of matrices, a convolution or attention.
        """
        import torch

        kinds = (torch.nn.Linear, torch.nn.modules.conv._ConvNd)
        layers = [m for m in run.model.modules() if isinstance(m, kinds)]
        seen = Counter(_name(output.dtype) for output in outputs(run, layers))
        low, whole = low_precision_layers(run)
        weights = Counter(_name(p.dtype) for p in run.model.parameters())
        facts: dict[str, Any] = {"layer_outputs": dict(seen), "weights": dict(weights)}
        if run.update.scale is not None:
            facts["loss_scale"] = float(run.update.scale.value)
        return Evidence.of_share(low, whole, "layers with all products in 16 bits", **facts)


def low_precision_layers(run: Run) -> tuple[int, int]:
    """How many layers have only 16-bit products in the forward of a step, and how many have any."""
    import torch
    from torch.utils.flop_counter import flop_registry

    from runner.techniques.operators import OperatorObserver

    active: list[nn.Module] = []
    types: dict[nn.Module, set[torch.dtype]] = {}

    def note(operator: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        product = operator._overloadpacket in flop_registry or "rnn" in operator.__name__
        if product and active and isinstance(first, torch.Tensor):
            types.setdefault(active[-1], set()).add(first.dtype)

    def enter(module: nn.Module, inputs: Any) -> None:
        active.append(module)

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        active.pop()

    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module in run.model.modules():
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        stack.enter_context(OperatorObserver(note))
        dry_run_step(run)
    low = {torch.float16, torch.bfloat16}
    return sum(seen <= low for seen in types.values()), len(types)


def pure(model: nn.Module, forward: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """`forward` with weights and inputs cast to `dtype`, and outputs back to fp32.

    Gradients pass through the casts, so what is updated are the model's own weights. Norms over
    the batch keep theirs in fp32: their running statistics are.
    """
    import torch
    from torch.func import functional_call
    from torch.utils._pytree import tree_map

    kept = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
        for parameter in module.parameters(recurse=False)
    }

    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.to(dtype)
        return value

    def back(value: Any) -> Any:
        return value.float() if isinstance(value, torch.Tensor) and value.dtype is dtype else value

    def call(*inputs: Any, **named: Any) -> Any:
        weights = {
            name: parameter if id(parameter) in kept else cast(parameter)
            for name, parameter in model.named_parameters()
        }
        output = functional_call(model, weights, tree_map(cast, inputs), tree_map(cast, named))
        return tree_map(back, output)

    return call


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
