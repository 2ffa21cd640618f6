"""What layers really produce: one validation batch through the run's own forward, watched."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from runner.run import Run, call

if TYPE_CHECKING:
    from torch import Tensor, nn


def outputs(run: Run, layers: Sequence[nn.Module]) -> list[Tensor]:
    """The first output of each layer that ran, in the order they ran.

    Uncompiled, since hooks would break the compiled graph, in eval mode and without gradients,
    so nothing of the run changes.
    """
    import torch

    seen: dict[nn.Module, Tensor] = {}

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            seen.setdefault(module, output)

    training = run.model.training
    run.model.eval()
    with ExitStack() as stack:
        stack.callback(run.model.train, training)
        stack.callback(run.validation.close)
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for layer in layers:
            stack.callback(layer.register_forward_hook(look).remove)
        for context in run.contexts:
            stack.enter_context(context())
        call(run.forward, next(run.validation.batches(0))[0])
    return list(seen.values())
