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
    module: str  # in whose forward it was made; empty for the model itself
    incoming: Tensor  # largest absolute value of the gradients, 0-d
    outgoing: Tensor


class ModuleTrace:
    """While `watching`, keeps the largest value of each module's output, on the device.

    With `operations_too` it keeps those of each operation of the backward pass as well, which
    belongs to the innermost module in whose forward its node was made. Nothing is read before it
    is asked for.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.inputs: list[Tensor] = []  # of each micro-batch: which samples are not finite
        self.outputs: list[tuple[str, Tensor]] = []  # largest absolute value, in order
        self.operations_too = False
        self.operations: list[TracedOperation] = []  # in the order of backward
        self.inside: list[str] = []  # modules whose forward is under way
        self.nodes: set[Any] = {None}  # of the graph, that belong to a module

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hooks on every module; the records stay afterwards."""
        self.forget()
        self.operations_too = False
        with ExitStack() as stack:
            for name, module in modes.hookable(self.model):
                stack.callback(module.register_forward_pre_hook(self._before(name)).remove)
                stack.callback(module.register_forward_hook(self._after(name)).remove)
            hook = self.model.register_forward_pre_hook(self._record_inputs, with_kwargs=True)
            stack.callback(hook.remove)
            yield
        self.nodes = {None}

    def forget(self) -> None:
        """Drop the records of a step that is made again."""
        self.inputs, self.outputs, self.operations = [], [], []

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
        for operation, before, after in zip(self.operations, incoming, outgoing, strict=True):
            if not math.isfinite(before):
                return None  # it is from the loss
            if not math.isfinite(after):
                return operation, _kind(after)
        return None

    def _before(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any) -> None:
            if module is self.model:
                self.inside, self.nodes = [], {None}
            elif self.operations_too:  # what led here is of the module around
                self._record_operations(inputs, self.inside[-1] if self.inside else "")
            self.inside.append(name)

        return hook

    def _after(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            for tensor in tensors(output):
                if tensor.is_floating_point() or tensor.is_complex():
                    self.outputs.append((name, peak([tensor])))
            if self.operations_too:
                self._record_operations(output, name)
            if name in self.inside:  # a forward that raised is left where it was
                del self.inside[self.inside.index(name) :]

        return hook

    def _record_inputs(self, module: nn.Module, inputs: Any, by_name: dict[str, Any]) -> None:
        bad = _bad_rows((inputs, by_name))
        if bad is not None:
            self.inputs.append(bad)

    def _record_operations(self, values: Any, module: str) -> None:
        """Watch the operations that lead to the values and belong to no module so far."""
        waiting: list[Any] = [tensor.grad_fn for tensor in tensors(values)]
        while waiting:
            node = waiting.pop()
            if node not in self.nodes:
                self.nodes.add(node)
                node.register_hook(self._recorder(node, module))
                waiting.extend(next_ for next_, _ in node.next_functions)

    def _recorder(self, node: Any, module: str) -> Any:
        name, trace = node.name(), "".join(node.metadata.get("traceback_", ()))  # of anomaly mode

        def hook(outgoing: Any, incoming: Any) -> None:
            peaks = peak(tensors(incoming)), peak(tensors(outgoing))
            self.operations.append(TracedOperation(name, trace, module, *peaks))

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
    few = sum(int(rows.sum()) for rows in bad)  # waits
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
