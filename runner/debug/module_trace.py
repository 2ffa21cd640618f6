"""Where in the model a step is, and the first tensor that is not finite, forward or backward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from runner.data.nested import tensors
from runner.models import modes


@dataclass(frozen=True)
class TracedOperation:
    """A step of the backward pass; both numbers are on the device."""

    name: str
    trace: str  # of its forward, as Python prints it
    module: str | None  # None: of the loss
    incoming: Tensor  # largest absolute value of the gradients, 0-d
    outgoing: Tensor


class ModuleTrace:
    """While `watching`, knows the module whose backward is under way.

    A module is entered when the gradient of its output is there, and left when that of its input
    is. Forward costs a reduction over each module's output, and nothing is read before it is asked
    for. With `operations_too` each operation's gradients are recorded as well.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.inside: list[str] = []  # entered and not left; what is in another comes after it
        self.inputs: list[Tensor] = []  # of each micro-batch: which samples are not finite
        self.outputs: list[tuple[str, Tensor]] = []  # largest absolute value, in order
        self.operations_too = False
        self.operations: list[TracedOperation] = []  # in the order of backward

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hooks on every module; the records stay afterwards."""
        self.forget()
        self.inside, self.operations_too = [], False
        with ExitStack() as stack:
            for name, module in modes.hookable(self.model):
                stack.callback(module.register_forward_pre_hook(self._before(name)).remove)
                stack.callback(module.register_forward_hook(self._after(name)).remove)
            hook = self.model.register_forward_pre_hook(self._record_inputs, with_kwargs=True)
            stack.callback(hook.remove)
            yield

    def forget(self) -> None:
        """Drop the records of a step that is made again."""
        self.inputs, self.outputs, self.operations = [], [], []

    def module(self) -> str | None:
        """The innermost module whose backward is under way; None outside the model."""
        return self.inside[-1] if self.inside else None

    def bad_input(self) -> tuple[int, int] | None:
        """How many of the model's samples are not finite, and of how many; waits."""
        return _count(self.inputs)

    def first_bad_output(self) -> tuple[str, str] | None:
        """The first module with an output that is not finite, and whether NaN or Inf; waits."""
        peaks = _read([largest for _, largest in self.outputs])  # waits
        for (name, _), largest in zip(self.outputs, peaks, strict=True):
            if not math.isfinite(largest):
                return name, _kind(largest)
        return None

    def origin(self) -> tuple[TracedOperation, str] | None:
        """The first operation that made NaN or Inf of a finite gradient, and which; waits.

        Anomaly mode itself looks for NaN alone, and so names the operation after the one that
        made an Inf: that of `x * 0`, say, in place of that of its square root.
        """
        incoming = _read([operation.incoming for operation in self.operations])  # waits
        outgoing = _read([operation.outgoing for operation in self.operations])  # waits
        for operation, came, went in zip(self.operations, incoming, outgoing, strict=True):
            if not math.isfinite(came):
                return None  # it is from the loss
            if not math.isfinite(went):
                return operation, _kind(went)
        return None

    def _before(self, name: str) -> Any:
        def leave(_: Tensor) -> None:
            if name in self.inside:
                self.inside.remove(name)

        def hook(module: nn.Module, inputs: Any) -> None:
            if module is self.model:  # the backward before, of another micro-batch, is over
                self.inside.clear()
            for tensor in tensors(inputs):
                if tensor.requires_grad:
                    tensor.register_hook(leave)  # type: ignore[no-untyped-call]

        return hook

    def _after(self, name: str) -> Any:
        prefix = f"{name}." if name else ""

        def enter(_: Tensor) -> None:
            """Put it before what is within it: of two with one output the inner is told first."""
            if name not in self.inside:
                within = (i for i, other in enumerate(self.inside) if other.startswith(prefix))
                self.inside.insert(next(within, len(self.inside)), name)

        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            for tensor in tensors(output):
                if tensor.is_floating_point() or tensor.is_complex():
                    self.outputs.append((name, peak([tensor])))
                if tensor.requires_grad:
                    tensor.register_hook(enter)  # type: ignore[no-untyped-call]
            if self.operations_too and module is self.model:
                self._record_operations(output)

        return hook

    def _record_inputs(self, module: nn.Module, inputs: Any, by_name: dict[str, Any]) -> None:
        bad = _bad_rows((inputs, by_name))
        if bad is not None:
            self.inputs.append(bad)

    def _record_operations(self, output: Any) -> None:
        """Record all operations that lead to the model's output."""
        waiting: list[Any] = [tensor.grad_fn for tensor in tensors(output)]
        seen: set[Any] = {None}
        while waiting:
            node = waiting.pop()
            if node not in seen:
                seen.add(node)
                node.register_hook(self._recorder(node))
                waiting.extend(next_ for next_, _ in node.next_functions)

    def _recorder(self, node: Any) -> Any:
        trace = "".join(node.metadata.get("traceback_", ()))  # anomaly mode writes it there

        def hook(outgoing: Any, incoming: Any) -> None:
            peaks = peak(tensors(incoming)), peak(tensors(outgoing))
            self.operations.append(TracedOperation(node.name(), trace, self.module(), *peaks))

        return hook


def bad_samples(value: Any) -> tuple[int, int] | None:
    """How many samples of a batch's nest are not finite, and of how many; None: all are. Waits."""
    bad = _bad_rows(value)
    return None if bad is None else _count([bad])


def _bad_rows(value: Any) -> Tensor | None:
    """Which samples of a nest are not finite, on the device; None where it has no floats."""
    result: Tensor | None = None
    for tensor in tensors(value):
        if tensor.is_floating_point() and tensor.dim() and tensor.layout is torch.strided:
            bad = (~tensor.detach().isfinite()).unsqueeze(-1).flatten(1).any(1)
            if result is None or result.shape == bad.shape:
                result = bad if result is None else result | bad.to(result.device)
    return result


def _count(bad: Sequence[Tensor]) -> tuple[int, int] | None:
    few = sum(int(one.sum()) for one in bad)  # waits
    return (few, sum(map(len, bad))) if few else None


def peak(values: Sequence[Tensor]) -> Tensor:
    """The largest absolute value in them, 0-d, on their device; NaN where there is one."""
    dense = [v.detach().coalesce().values() if v.is_sparse else v.detach() for v in values]
    largest = [torch.linalg.vector_norm(v, math.inf).float() for v in dense if v.numel()]
    return torch.stack(largest).amax() if largest else torch.zeros(())


def _read(peaks: Sequence[Tensor]) -> list[float]:
    if not peaks:
        return []
    return torch.stack([value.to(peaks[-1].device) for value in peaks]).tolist()


def _kind(value: float) -> str:
    return "NaN" if math.isnan(value) else "Inf"
