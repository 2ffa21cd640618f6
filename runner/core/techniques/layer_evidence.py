"""Evidence by layer from one step: compiled graphs, dtypes of products, NHWC convolutions."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from runner.core.interfaces.run import Run
from runner.core.techniques.probe import (
    OperatorObserver,
    dry_run_step,
    forward_hooks,
    profile_step,
)

COMPILED_CODE = os.path.join("torch", "_inductor", "output_code.py")  # calls each compiled graph


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
    """Return the share of a step's work, 0 to 1, in compiled graphs; None if it is not countable.

    It includes functions that are no layers, and weighs layers by their size.
    """
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
            from runner.core.techniques import compiler

            run.operators |= compiler.count_compiled_operators()
    return run.operators
