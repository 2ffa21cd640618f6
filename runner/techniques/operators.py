"""Operators as they are dispatched, below autocast and autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class OperatorObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls `note` with each operator and its output, within the context."""

    def __init__(self, note: Callable[[Any, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.note(func, output)
        return output
