"""Evidence by layer from one step: compiled graphs, dtypes of products, NHWC convolutions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from runner.techniques.probe import OperatorObserver, dry_run_step, forward_hooks
from runner.training.run import Run


def compiled_layers(run: Run) -> tuple[int, int]:
    """Return how many layers ran in compiled graphs in one step, and how many ran in all.

    Compiled code does not call hooks registered later; a layer that runs eagerly, or that a graph
    break splits, does.
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
    """Return the output dtypes of each layer's products in one step."""
    from torch.utils.flop_counter import flop_registry

    active: list[nn.Module] = []
    products: dict[nn.Module, set[torch.dtype]] = {}

    def record_dtype(operator: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        is_product = operator._overloadpacket in flop_registry or "rnn" in operator.__name__
        if is_product and active and isinstance(first, Tensor):
            products.setdefault(active[-1], set()).add(first.dtype)

    def enter(module: nn.Module, *_: Any) -> None:
        active.append(module)

    def leave(module: nn.Module, *_: Any) -> None:
        active.pop()

    with forward_hooks(run.model.modules(), enter, leave), OperatorObserver(record_dtype):
        dry_run_step(run)
    return products


def convolution_layouts(run: Run) -> dict[nn.Module, list[bool]]:
    """Return for each convolution whether its input and output are NHWC, if that is decidable."""
    layouts: dict[nn.Module, list[bool]] = {}

    def record_layout(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        for tensor in (*inputs[:1], output):
            nhwc = tensor.is_contiguous(memory_format=torch.channels_last)
            if not (nhwc and tensor.is_contiguous()):
                layouts.setdefault(layer, []).append(nhwc)

    layers = [m for m in run.model.modules() if isinstance(m, nn.Conv2d)]
    with forward_hooks(layers, after=record_layout):
        dry_run_step(run)
    return layouts
