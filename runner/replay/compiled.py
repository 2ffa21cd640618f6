"""Faults that only compiled code has: the traced graph is run node by node under the tracer.

Each node of the graph names the module and the line that it was traced from.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import _disable_current_modes

from runner.data.batch import Batch
from runner.debug.source_line import FRAME, Place, is_user_code
from runner.replay.findings import Cause, StepPhase
from runner.replay.statistics import stats, tensors
from runner.replay.trace import trace_step
from runner.replay.tracer import Frame, Tracer
from runner.techniques import compiler
from runner.training.run import Run


def trace_compiled(run: Run, batch: Batch) -> Cause:
    """The same as `trace_step`, for a run that computes without a compiler, and is bad with one."""
    eager = run.forward
    with ExitStack() as scope:
        compiler.prepare(scope)  # it silences torch's warnings, too
        scope.callback(torch._dynamo.reset)
        scope.callback(setattr, run, "forward", eager)
        found = trace_step(run, batch, lambda tracer: _trace_forward(run, eager, tracer))
    if found.phase is StepPhase.nowhere:
        found.cause = (
            "the graph that the compiler traces is good: the fault is in the code that it "
            "generates from it"
        )
    else:
        found.notes.append("only when the model is traced for the compiler; eager code is good")
    return found


def _trace_forward(run: Run, eager: Callable[..., Any], tracer: Tracer) -> None:
    """Let the run's forward be traced, and its graph be run node by node under the tracer."""
    names = {id(module): (name, module) for name, module in run.model.named_modules()}

    def backend(graph: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        del examples

        def interpret(*inputs: Any) -> Any:
            with tracer:
                return _Interpreter(graph, tracer, names).run(*inputs)

        return interpret

    traced = torch.compile(lambda *args, **kwargs: eager(*args, **kwargs), backend=backend)

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():  # under one of ours nothing would be traced
            return traced(*args, **kwargs)

    run.forward = forward


class _Interpreter(fx.Interpreter):
    """Runs a graph, and tells the tracer the module and line of each node."""

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


def _place(n: fx.Node) -> Place | None:
    """The innermost line of a node's trace that is the user's."""
    lines = FRAME.findall(n.meta.get("stack_trace") or "")
    shown = [(path, int(number)) for path, number in lines if is_user_code(path)]
    return shown[-1] if shown else None
