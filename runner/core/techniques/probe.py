"""Observation of model calls and steps: operators, hooks, bytes saved, and evidence by layer."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import profiler_legacy
from torch.utils._python_dispatch import TorchDispatchMode

from runner.core.device.device import Device
from runner.core.interfaces.batch import call_model, slice_rows
from runner.core.interfaces.run import Run
from runner.core.techniques.model_calls import enter_contexts

COMPILED_CODE = os.path.join("torch", "_inductor", "output_code.py")  # calls each compiled graph
OPERATOR_CALL = re.compile(
    r"(?:AOTI_TORCH_ERROR_CODE_CHECK\(\s*aoti_torch_(?:cpu|cuda)_|torch\.ops\.aten\.|extern_kernels\.)"
    r"(\w+?)(?:_out)?(?:\.\w+)?\("
)
"""Operator calls in generated code, C++ and Python."""


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
    """Call `before(module, args, kwargs)` and `after(module, args, output)`, uncompiled."""
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
    """Return the largest group, by parameters, of modules of one class and parent, in its order."""
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


class WorkCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the work outside compiled graphs: FLOP of products, elements of other results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether compiled code runs as such under this mode: else torch runs it uncompiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if not _is_called_by_compiled_code():
            self.work += _work_of(func, args, kwargs or {}, output)
        return output


def _is_called_by_compiled_code() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.endswith(COMPILED_CODE):
        frame = frame.f_back
    return frame is not None


def _work_of(operator: Any, args: Any, kwargs: Any, output: Any) -> int:
    from torch.utils.flop_counter import flop_registry

    if (formula := flop_registry.get(operator._overloadpacket)) is not None:
        return int(formula(*args, **kwargs, out_val=output))
    returned = operator._schema.returns
    if any(value.alias_info is not None and not value.alias_info.is_write for value in returned):
        return 0  # a view
    outputs = output if isinstance(output, tuple | list) else (output,)
    return sum(value.numel() for value in outputs if isinstance(value, Tensor))


def compiled_layers(run: Run) -> tuple[int, int]:
    """Return how many layers ran in compiled graphs in one step, and how many ran in all.

    Compiled code does not call hooks registered later; a layer that runs eagerly, or that a graph
    break splits, does.
    """
    called: set[nn.Module] = set()
    layers = [m for m in run.model.modules() if next(m.parameters(recurse=False), None) is not None]
    dry_run_step(run)  # compiles what this mode of the model needs, before there are hooks
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


def compiled_work(run: Run) -> float | None:
    """Return the share of a step's work, 0 to 1, in compiled graphs; None if not countable."""
    try:
        with WorkCounter() as eager_part:
            dry_run_step(run)
        with torch.compiler.set_stance("force_eager"), WorkCounter() as everything:
            dry_run_step(run)
    except Exception:  # such as an operator without a rule for modes
        return None
    return max(0.0, 1 - float(eager_part.work / max(1, everything.work)))


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


def _count_compiled_operators() -> dict[str, int]:
    """Return the calls by operator in compiled code: a profiler sees none of a cpp_wrapper."""
    from torch._inductor.codecache import PyCodeCache

    files = [Path(str(module.__file__)) for module in PyCodeCache.modules]
    names = [name for f in files for name in OPERATOR_CALL.findall(f.read_text(errors="replace"))]
    return dict(Counter(f"aten::{name}" for name in names))


def count_operators(run: Run) -> Mapping[str, int]:
    """Return the calls of operators and kernels in one step of the run, by name.

    Forward, loss and backward over a training batch, compiled if the run is; without the update,
    so the run does not change. Profiled once and cached; costs 10 ms and a step.
    """
    if run.operators is None:
        # the legacy profiler fails on the ranges that FSDP marks around compiled blocks
        kineto = run.device.kind == "cuda" or run.shards is not None
        events = profile_step(lambda: dry_run_step(run), run.device, kineto)
        run.operators = {event.key: event.count for event in events}
        if run.step_graph is not None:
            run.operators |= _count_compiled_operators()
    return run.operators
