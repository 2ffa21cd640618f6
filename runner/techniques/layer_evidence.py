"""What the layers of a run did in one step: in compiled graphs, in 16 bits, in NHWC order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from runner.techniques.probe import OperatorObserver, dry_run_step, forward_hooks
from runner.training.run import Run


def compiled_layers(run: Run) -> tuple[int, int]:
    """How many layers of a step ran in compiled graphs, and how many ran.

    Compiled code does not call the hooks that a module was given later; a layer that the compiler
    left out, or took to pieces at a graph break, does.
    """
    called: set[nn.Module] = set()
    layers = [m for m in run.model.modules() if next(m.parameters(recurse=False), None) is not None]
    hooks = [m.register_forward_pre_hook(lambda module, _: called.add(module)) for m in layers]
    try:
        dry_run_step(run)
        eager = set(called)
        with torch.compiler.set_stance("force_eager"):
            dry_run_step(run)
    finally:
        for hook in hooks:
            hook.remove()
    return len(called - eager), len(called)


def product_dtypes(run: Run) -> dict[nn.Module, set[torch.dtype]]:
    """The types of each layer's products in a forward."""
    from torch.utils.flop_counter import flop_registry

    active: list[nn.Module] = []
    products: dict[nn.Module, set[torch.dtype]] = {}

    def note(operator: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        product = operator._overloadpacket in flop_registry or "rnn" in operator.__name__
        if product and active and isinstance(first, Tensor):
            products.setdefault(active[-1], set()).add(first.dtype)

    def enter(module: nn.Module, *_: Any) -> None:
        active.append(module)

    def leave(module: nn.Module, *_: Any) -> None:
        active.pop()

    with forward_hooks(run.model.modules(), enter, leave), OperatorObserver(note):
        dry_run_step(run)
    return products


def convolution_layouts(run: Run) -> dict[nn.Module, list[bool]]:
    """Whether tensors of each convolution are in NHWC order, those where that can be told."""
    orders: dict[nn.Module, list[bool]] = {}

    def note(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        for tensor in (*inputs[:1], output):
            nhwc = tensor.is_contiguous(memory_format=torch.channels_last)
            if not (nhwc and tensor.is_contiguous()):
                orders.setdefault(layer, []).append(nhwc)

    layers = [m for m in run.model.modules() if isinstance(m, nn.Conv2d)]
    with forward_hooks(layers, after=note):
        dry_run_step(run)
    return orders
