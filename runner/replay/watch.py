"""Which module of a model is the first to make something not finite, forward or backward.

Needs torch and nothing else: `job=replay` copies this file beside the script that it writes.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn


class Watch:
    """Hooks on every module; `verdict` after forward and backward."""

    def __init__(self, model: nn.Module) -> None:
        self.forward: list[str] = []  # modules whose output is not finite, though their input is
        self.backward: list[str] = []
        self.parameters: list[str] = []  # whose gradient is not finite
        self.raised: str | None = None
        self.sound: dict[str, bool] = {}  # whether a module's inputs are finite
        self.upstream: dict[str, bool] = {}  # whether the gradient of its output is, once it came
        self.awaited: set[str] = set()  # modules to whose output one will come
        self.kinds = {name: type(module).__name__ for name, module in model.named_modules()}
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):  # takes no hooks from outside
                continue
            module.register_forward_pre_hook(self._before(name), with_kwargs=True)
            module.register_forward_hook(self._after(name), with_kwargs=True, always_call=True)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._gradient(name))  # type: ignore[no-untyped-call]

    def verdict(self, inputs: Any, loss: float = 0.0) -> str:
        """In words, such as `forward: part (Cancels)`; empty where all is finite."""
        if self.raised is not None:
            return f"raised in: {self._label(self.raised)}"
        if not all(finite(tensor) for tensor in tensors(inputs)):
            return "input: it is not finite"
        if self.forward:
            return f"forward: {self._label(self.forward[0])}"
        if loss - loss != 0.0:
            return "loss: what the model returns is finite"
        if self.backward:
            first = self.backward[0]
            for name in self.backward[1:]:  # what has the same input: the innermost is meant
                if not (name.startswith(f"{first}.") or not first):
                    break
                first = name
            return f"backward: {self._label(first)}"
        if self.parameters:
            owner = self.parameters[0].rpartition(".")[0]
            return f"backward: {self._label(owner)}, {self.parameters[0]}"
        return ""

    def _label(self, name: str) -> str:
        return f"{name or 'the model itself'} ({self.kinds[name]})"

    def _before(self, name: str) -> Any:
        def look(module: nn.Module, args: Any, kwargs: Any) -> None:
            inputs = tensors((args, kwargs))
            self.sound[name] = all(finite(t) for t in inputs)
            for tensor in inputs:
                if tensor.requires_grad:
                    tensor.register_hook(self._slope(name))  # type: ignore[no-untyped-call]

        return look

    def _after(self, name: str) -> Any:
        def look(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if sys.exc_info()[1] is not None:
                self.raised = name if self.raised is None else self.raised
                return
            outputs = tensors(output)
            if self.sound.get(name, True) and not all(finite(t) for t in outputs):
                self.forward.append(name)
            for tensor in outputs:
                if tensor.requires_grad:
                    self.awaited.add(name)
                    tensor.register_hook(self._upstream(name))  # type: ignore[no-untyped-call]

        return look

    def _upstream(self, name: str) -> Any:
        def look(gradient: Tensor) -> None:
            self.upstream[name] = self.upstream.get(name, True) and finite(gradient)

        return look

    def _slope(self, name: str) -> Any:
        def look(gradient: Tensor) -> None:
            came = self.upstream.get(name, name not in self.awaited)
            if came and not finite(gradient):
                self.backward.append(name)

        return look

    def _gradient(self, name: str) -> Any:
        def look(parameter: Tensor) -> None:
            if parameter.grad is not None and not finite(parameter.grad):
                self.parameters.append(name)

        return look


def finite(tensor: Tensor) -> bool:
    """Whether there is no NaN and no Inf in it."""
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    return bool(torch.isfinite(tensor).all())


def tensors(value: Any) -> list[Tensor]:
    """The tensors in a nest of tuples, lists and dicts; here, since no runner is beside it."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in tensors(item)] if isinstance(value, list | tuple) else []
