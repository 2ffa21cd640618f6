"""Observation of model calls: their operators, hooks, and bytes saved for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import profiler_legacy
from torch.utils._python_dispatch import TorchDispatchMode

from runner.core.device.device import Device
from runner.core.interfaces.batch import call_model, slice_rows
from runner.core.interfaces.run import Run
from runner.core.techniques.model_calls import enter_contexts


class OperatorObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls `callback` with each operator below autocast and autograd, and its output."""

    def __init__(self, callback: Callable[[Any, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.callback = callback

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.callback(func, output)
        return output


@contextmanager
def forward_hooks(
    modules: Iterable[nn.Module],
    before: Callable[..., None] | None = None,
    after: Callable[..., None] | None = None,
) -> Iterator[None]:
    """Call `before(module, args, kwargs)` and `after(module, args, output)` around each forward.

    Uncompiled, since compiled code does not call hooks.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module in modules:
            if before is not None:
                hook = module.register_forward_pre_hook(before, with_kwargs=True)
                stack.callback(hook.remove)
            if after is not None:
                stack.callback(module.register_forward_hook(after, always_call=True).remove)
        yield


def saved_bytes(
    model: nn.Module,
    step: Callable[[], object],
    *excluded: Tensor,
    outputs: Callable[[Any], bool] | None = None,
) -> int:
    """Return the bytes that a step saves for backward, except state of the model and `excluded`.

    With `outputs`, also the output of each operator for which it is true; not of compiled code.
    """
    tensors = [*model.state_dict(keep_vars=True).values(), *excluded]
    excluded_ids = {t.untyped_storage()._cdata for t in tensors}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided and tensor.untyped_storage()._cdata not in excluded_ids:
            sizes[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    def add_output(operator: Any, output: Any) -> None:
        if outputs is not None and outputs(operator):
            for tensor in output if isinstance(output, tuple | list) else (output,):
                if isinstance(tensor, Tensor):
                    pack(tensor)

    observer: AbstractContextManager[Any] = nullcontext()
    if outputs is not None:
        observer = OperatorObserver(add_output)
    with observer, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    return sum(sizes.values())


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the largest group, by parameters, of two or more modules of one class and parent.

    In the parent's order; of nested blocks the outermost. Empty if no module repeats.
    """
    best: list[nn.Module] = []
    best_size = 0
    for parent in model.modules():
        groups: dict[type[nn.Module], list[nn.Module]] = {}
        for child in parent.children():
            groups.setdefault(type(child), []).append(child)
        for group in groups.values():
            size = sum(p.numel() for block in group for p in block.parameters())
            if len(group) > 1 and size > best_size and any(list(b.children()) for b in group):
                best, best_size = group, size
    return best


def dry_run_step(run: Run, samples: int | None = None) -> None:
    """Run a step over the first training batch without its update, in one graph if the run does.

    Forward and loss alone where gradients are disabled.
    With `samples`, run forward and backward over at most that many, never one graph.
    """
    gradients = [parameter.grad for parameter in run.model.parameters()]
    try:
        batch = run.train.peek()
        if samples is None and run.step_graph is not None and run.step_graph.takes(batch):
            run.step_graph.dry_run(batch)
            return
        batch = slice_rows(batch, slice(min(run.micro_batch, samples or run.micro_batch)))
        run.update.begin()
        with enter_contexts(run.contexts):
            loss = run.objective(call_model(run.forward, batch[0]), batch[1])
        if torch.is_grad_enabled():
            torch.autograd.backward(loss)
    finally:
        run.update.abandon()
        for parameter, gradient in zip(run.model.parameters(), gradients, strict=True):
            parameter.grad = gradient


def profile_step(step: Callable[[], object], device: Device, kineto: bool) -> Any:
    """Return the profiler's events of a step, by name; without `kineto` it starts faster."""
    profiler: Any
    if kineto:  # takes a second to start
        profiler = torch.profiler.profile(acc_events=True)
    else:
        profiler = profiler_legacy.profile()  # type: ignore[no-untyped-call]
    with profiler:
        step()
        device.synchronize()
    return profiler.key_averages()
