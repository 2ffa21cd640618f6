"""Name the operation, module and line that made a gradient NaN, in a loop of the user's own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from runner.diagnose.replay.results import location_in_trace, read_source_line
from runner.diagnose.replay.tracer import NodeOwners

TRACE_KEY = "traceback_"  # of a node's metadata, where autograd's anomaly mode stores its stack
Report = Callable[[str], None]

_active = threading.local()  # `.search`: owners of nodes and the report of this thread's context
_lock = threading.Lock()
_entered: list[ExitStack] = []  # one for each context of any thread; the first has the patches


@contextmanager
def check_backwards(report: Report) -> Iterator[None]:
    """Within, call `report` after each backward in which a NaN arose; it may raise.

    Nested contexts of a thread search once. Each node's gradients are read, so an accelerator is
    waited for. Forwards inside are recorded by autograd's anomaly mode, for the lines.
    """
    if getattr(_active, "search", None) is not None:
        yield
        return
    with _lock:
        _entered.append(_entered[0] if _entered else _patch())
    _active.search = ModuleLabels(), report
    try:
        yield
    finally:
        _active.search = None
        with _lock:
            patches = _entered.pop()
            if not _entered:  # of all threads, whatever their order
                patches.close()


def _patch() -> ExitStack:
    """Switch on what the whole process shares, until the returned stack is closed."""
    scope = ExitStack()
    scope.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=False))
    for handle in (
        register_module_forward_pre_hook(_enter_module),
        register_module_forward_hook(_leave_module, always_call=True),
    ):
        scope.callback(handle.remove)
    for name in ("backward", "grad"):
        function = getattr(torch.autograd, name)
        setattr(torch.autograd, name, partial(_search, function))
        scope.callback(setattr, torch.autograd, name, function)
    return scope


def _enter_module(module: nn.Module, inputs: Any) -> None:
    if (search := getattr(_active, "search", None)) is not None:
        search[0].enter(module, inputs)


def _leave_module(module: nn.Module, inputs: Any, output: Any) -> None:
    if (search := getattr(_active, "search", None)) is not None:
        search[0].leave(module, inputs, output)


class ModuleLabels:
    """Which module made which autograd nodes."""

    def __init__(self) -> None:
        self.nodes = NodeOwners("")
        self.threads = threading.local()

    def enter(self, module: nn.Module, inputs: Any) -> None:
        """Assign nodes from now on to this module."""
        state = self.threads.__dict__
        if not state.get("open"):  # names are those in the outermost module
            state["names"] = {id(m): name for name, m in module.named_modules()}
        name = state["names"].get(id(module), "")
        kind = type(module).__name__
        state.setdefault("open", []).append(f"{name} ({kind})" if name else kind)
        self.nodes.assign(state["open"][-1])

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Assign nodes from now on to the module around this one."""
        if open_modules := self.threads.__dict__.get("open"):  # else it was entered before
            open_modules.pop()
            self.nodes.assign(open_modules[-1] if open_modules else "")


def _search(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `torch.autograd.backward` or `grad`, and report the first NaN that it made."""
    search: tuple[ModuleLabels, Report] | None = getattr(_active, "search", None)
    if search is None:  # another thread has the context
        return function(*args, **kwargs)
    modules, report = search
    culprits: list[str] = []  # the node that made the first NaN, after that of an earlier Inf
    has_inf = False
    roots = args[0] if args else kwargs.get("tensors", kwargs.get("outputs", ()))

    def check(node: Any, results: Any, upstream: Any) -> None:
        nonlocal has_inf
        values = [value for value in results if isinstance(value, Tensor)]
        if culprits and culprits[-1].startswith("NaN"):
            return
        if any(value.isnan().any() for value in values):
            culprits.append(f"NaN in the backward, by {_describe(node, modules)}")
        elif not has_inf and any(value.isinf().any() for value in values):
            has_inf = True
            culprits.append(f"Inf first, by {_describe(node, modules)}")

    with ExitStack() as scope:
        for node in _nodes(roots):
            if not hasattr(node, "variable"):  # a parameter's own node passes its gradient on
                scope.callback(node.register_hook(partial(check, node)).remove)
        result = function(*args, **kwargs)
    if culprits and culprits[-1].startswith("NaN"):
        report("; ".join(reversed(culprits)))
    return result


def _nodes(roots: Any) -> list[Any]:
    tensors = [roots] if isinstance(roots, Tensor) else list(roots)
    waiting: list[Any] = [t.grad_fn for t in tensors if getattr(t, "grad_fn", None) is not None]
    nodes = dict.fromkeys(waiting)
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in nodes:
                nodes[node] = None
                waiting.append(node)
    return list(nodes)


def _describe(node: Any, modules: ModuleLabels) -> str:
    """Return the node's operation, module and line, as far as they are known."""
    location = location_in_trace("".join(node.metadata.get(TRACE_KEY, ())))
    line = "" if location is None else read_source_line(location).short
    module = modules.nodes.of(node)
    return ", ".join(filter(None, (node.name(), module and f"module {module}", line)))
