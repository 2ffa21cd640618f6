"""The tensors that a step makes, by their last dimension."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runner.run import Run
from runner.techniques.probe import rehearse


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most numbers in one new tensor, by the size of its last dimension."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if not func.is_view:
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.ndim:
                    last = tensor.shape[-1]
                    self.numbers[last] = max(self.numbers.get(last, 0), tensor.numel())
        return output


def of_a_step(run: Run, look: Callable[[Any], object], layers: list[nn.Module]) -> dict[int, int]:
    """Numbers in the largest tensor that a step makes, for each last dimension there is.

    One step over a training batch without its update; uncompiled, so that every operator is seen
    and `look` sees what each of `layers` puts out.
    """
    largest = _Largest()
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for layer in layers:
            hook = layer.register_forward_hook(lambda _module, _inputs, output: look(output))
            stack.callback(hook.remove)
        stack.enter_context(largest)
        rehearse(run)
    return largest.numbers
