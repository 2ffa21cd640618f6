"""What a model and a run do: repeated blocks, layer outputs, operators and kernels of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from runner.data.batch import call, rows
from runner.models import modes
from runner.techniques import compiler
from runner.training.run import Run

if TYPE_CHECKING:
    from torch import Tensor, nn


def outputs(run: Run, layers: Sequence[nn.Module]) -> list[Tensor]:
    """The first output of each layer that ran, in the order they ran.

    One validation batch through the run's own forward; uncompiled, since hooks would break the
    compiled graph, in eval mode and without gradients, so nothing of the run changes.
    """
    import torch

    seen: dict[nn.Module, Tensor] = {}

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            seen.setdefault(module, output)

    with ExitStack() as stack:
        stack.enter_context(modes.evaluation_mode(run.model))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for layer in layers:
            stack.callback(layer.register_forward_hook(look).remove)
        for context in run.contexts:
            stack.enter_context(context())
        call(run.forward, run.validation.peek()[0])
    return list(seen.values())


def operators(run: Run) -> Mapping[str, int]:
    """The operators and kernels of one step as the run really makes it, by name.

    Forward, loss and backward over a training batch, compiled if the run is; the update is not
    made, so nothing of the run changes. Profiled once and kept; 10 ms and a step.
    """
    import torch
    from torch.autograd import profiler_legacy

    if run.operators is None:
        if run.device.kind == "cuda":
            profiler: Any = torch.profiler.profile(acc_events=True)
        else:  # starting the newer one takes a second
            profiler = profiler_legacy.profile()  # type: ignore[no-untyped-call]
        with profiler:
            dry_run_step(run)
            run.device.synchronize()
        seen = {event.key: event.count for event in profiler.key_averages()}
        run.operators = {**seen, **compiler.kernels()} if run.whole is not None else seen
    return run.operators


def dry_run_step(run: Run) -> None:
    """A step over the first training batch, and no update: forward and backward, or one graph."""
    import torch

    gradients = [parameter.grad for parameter in run.model.parameters()]
    try:
        batch = run.train.peek()
        if run.whole is not None and run.whole.takes(batch):
            run.whole.dry_run(batch)
            return
        batch = rows(batch, slice(run.micro_batch))
        run.update.begin()
        with ExitStack() as stack:
            for context in run.contexts:
                stack.enter_context(context())
            loss = run.objective(call(run.forward, batch[0]), batch[1])
        torch.autograd.backward(loss)
    finally:
        run.update.abandon()
        for parameter, gradient in zip(run.model.parameters(), gradients, strict=True):
            parameter.grad = gradient


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The largest group, by parameters, of two or more modules of one class under one parent.

    In the order that the parent holds them; of blocks within blocks the outermost are found.
    Empty where nothing repeats.
    """
    best: list[nn.Module] = []
    most = 0
    for parent in model.modules():
        groups: dict[type[nn.Module], list[nn.Module]] = {}
        for child in parent.children():
            groups.setdefault(type(child), []).append(child)
        for group in groups.values():
            size = sum(p.numel() for block in group for p in block.parameters())
            if len(group) > 1 and size > most and any(list(b.children()) for b in group):
                best, most = group, size
    return best
