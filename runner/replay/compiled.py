"""Faults that only compiled code has: the traced graph looked at node by node, or piece by piece.

What a model does differently under a compiler shows in the graph that the tracer makes of it, which
names for each node the module and the line. What the compiler makes of a right graph has no lines;
there each module is compiled alone, from the whole model down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import _disable_current_modes

from runner.data.batch import Batch
from runner.debug.source_line import FRAME, Place, is_shown
from runner.replay.findings import Cause, Phase
from runner.replay.statistics import level, state_of, stats, tensors
from runner.replay.trace import label, leave, trace_step
from runner.replay.tracer import Frame, Tracer
from runner.techniques import compiler
from runner.training.run import Run
from runner.training.step import forward_backward

MOST = 8  # modules compiled alone


def trace_compiled(run: Run, batch: Batch, most: int = MOST) -> Cause:
    """The same as `trace_step`, for a run that computes without a compiler, and is bad with one.

    Compiles up to `most` modules where the traced graph is good.
    """
    with ExitStack() as scope:
        compiler.prepare(scope)  # also what torch warns of itself is not said
        scope.callback(torch._dynamo.reset)
        return _trace_compiled(run, batch, most)


def _trace_compiled(run: Run, batch: Batch, most: int) -> Cause:
    eager = run.forward
    try:
        found = trace_step(run, batch, lambda tracer: _watched(run, eager, tracer))
    finally:
        run.forward = eager
    if found.phase is not Phase.nowhere:
        found.notes.append("only when the model is traced for the compiler; eager code is good")
        return found
    return _piece_by_piece(run, batch, most)


def _watched(run: Run, eager: Callable[..., Any], tracer: Tracer) -> None:
    """Let the run's forward be traced, and its graph be run node by node under the tracer."""
    names = {id(module): (name, module) for name, module in run.model.named_modules()}

    def backend(graph: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        del examples

        def walk(*inputs: Any) -> Any:
            with tracer:
                return _Nodes(graph, tracer, names).run(*inputs)

        return walk

    traced = torch.compile(lambda *args, **kwargs: eager(*args, **kwargs), backend=backend)

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():  # under one of ours nothing would be traced
            return traced(*args, **kwargs)

    run.forward = forward


class _Nodes(fx.Interpreter):
    """Runs a graph, and tells the tracer whose node it is at."""

    def __init__(
        self, graph: fx.GraphModule, tracer: Tracer, names: dict[int, tuple[str, nn.Module]]
    ) -> None:
        super().__init__(graph)
        self.tracer, self.names = tracer, names

    def run_node(self, n: fx.Node) -> Any:
        """Run one."""
        values = fx.node.map_arg((n.args, n.kwargs), lambda used: self.env.get(used))
        with self.tracer.at(self._frame(n, values), _place(n)):
            return super().run_node(n)

    def _frame(self, n: fx.Node, values: Any) -> Frame | None:
        for key in reversed(list(n.meta.get("nn_module_stack") or {})):
            number = str(key).partition("@")[0]
            if number.isdigit() and int(number) in self.names:
                name, module = self.names[int(number)]
                self.tracer.resting = True
                inputs = [stats(f"operand {i + 1}", t) for i, (_, t) in enumerate(tensors(values))]
                self.tracer.resting = False
                return Frame(name, module, inputs)
        return None


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Those that are called; what only holds others is looked through."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from ((f"{name}.{inner}", part) for inner, part in _children(child))
        else:
            yield name, child


def _place(n: fx.Node) -> Place | None:
    """The innermost line of a node's trace that may be the culprit."""
    lines = FRAME.findall(n.meta.get("stack_trace") or "")
    shown = [(path, int(number)) for path, number in lines if is_shown(path)]
    return shown[-1] if shown else None


def _piece_by_piece(run: Run, batch: Batch, most: int) -> Cause:
    """Down from the model to the smallest module that is bad when it alone is compiled."""
    left = most

    def is_bad(module: nn.Module) -> bool:
        nonlocal left
        left -= 1
        before = module._compiled_call_impl
        module._compiled_call_impl = torch.compile(
            lambda *args, **kwargs: module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        )
        try:
            step = forward_backward(run, batch)
            return bool(level(step.loss) or level(step.grad_norm))
        finally:
            module._compiled_call_impl = before
            leave(run)

    name, module = "", run.model
    if not is_bad(module):
        return Cause(
            Phase.nowhere,
            "the model compiled alone is good: it is in what the compiler made of loss, backward "
            "and update together",
        )
    descending = True
    while descending:
        descending = False
        for child, inner in _children(module):
            if left > 0 and is_bad(inner):
                name, module, descending = f"{name}.{child}".lstrip("."), inner, True
                break
    found = Cause(
        Phase.forward,
        f"{label(name, module)} is bad when it alone is compiled, and good when it is not",
        name,
        type(module).__name__,
        state=state_of(module),
    )
    if left <= 0:
        found.notes.append(f"after {most} modules compiled alone; the fault may lie deeper in it")
    return found
