"""Operators of a step as they are dispatched, below autocast and autograd."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runner.techniques.probe import dry_run_step
from runner.training.run import Run


class OperatorObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls `note` with each operator and its output, for as long as it is entered."""

    def __init__(self, note: Callable[[Any, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.note(func, output)
        return output


def largest_tensors(
    run: Run, note_output: Callable[[Any], object], layers: list[nn.Module]
) -> dict[int, int]:
    """Elements of the largest tensor that a step makes, for each size of a last dimension.

    One step over a training batch without its update; uncompiled, so that every operator is seen
    and `note_output` is called with the output of each of `layers`.
    """
    elements: dict[int, int] = {}

    def note(operator: Any, output: Any) -> None:
        for tensor in () if operator.is_view else tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.ndim:
                last = tensor.shape[-1]
                elements[last] = max(elements.get(last, 0), tensor.numel())

    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for layer in layers:
            hook = layer.register_forward_hook(lambda _module, _inputs, output: note_output(output))
            stack.callback(hook.remove)
        stack.enter_context(OperatorObserver(note))
        dry_run_step(run)
    return elements
