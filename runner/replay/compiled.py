"""Faults that only compiled code has: the traced graph is run node by node under the tracer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from runner.data.batch import Batch
from runner.debug.source_line import place_in_text
from runner.replay.findings import Cause, StepPhase
from runner.replay.trace import trace_step
from runner.replay.tracer import Tracer, named
from runner.techniques import compiler
from runner.training.run import Run


def trace_compiled(run: Run, batch: Batch) -> Cause:
    """The same as `trace_step`, for a run that is good uncompiled, and bad compiled."""
    cause = trace_step(run, batch, partial(_compile_forward, run))
    if cause.phase is StepPhase.nowhere:
        cause.cause = "only the code that the compiler generates is bad: its graph is good"
    else:
        cause.notes.append("only as the compiler traces the model: uncompiled, the step is good")
    return cause


@contextmanager
def _compile_forward(run: Run, tracer: Tracer) -> Iterator[None]:
    """Let the run's forward be traced by the compiler, and its graphs run under `tracer`."""
    forward = run.forward
    names = {str(id(module)): name for name, module in run.model.named_modules()}

    def backend(graph: fx.GraphModule, examples: object) -> Callable[..., Any]:
        def interpret(*inputs: Any) -> Any:
            with tracer:
                return _Interpreter(graph, tracer, names).run(*inputs)

        return interpret

    compiled = torch.compile(lambda *args, **kwargs: forward(*args, **kwargs), backend=backend)
    with ExitStack() as scope:
        compiler.prepare(scope)
        scope.callback(torch._dynamo.reset)
        scope.callback(setattr, run, "forward", forward)
        run.forward = _disable_current_modes()(compiled)  # nothing is traced under a dispatch mode
        yield


class _Interpreter(fx.Interpreter):
    """Runs a graph, and tells the tracer the module and the line that each node was traced from."""

    def __init__(self, graph: fx.GraphModule, tracer: Tracer, names: dict[str, str]) -> None:
        super().__init__(graph)
        self.tracer, self.names = tracer, names

    def run_node(self, n: fx.Node) -> Any:
        """Run one."""
        modules = [str(key).partition("@")[0] for key in n.meta.get("nn_module_stack") or {}]
        known = [self.names[module] for module in modules if module in self.names]
        inputs = named(*self.fetch_args_kwargs_from_env(n)) if known else {}
        frame = self.tracer.frame(known[-1], inputs) if known else None
        with self.tracer.at(frame, place_in_text(n.meta.get("stack_trace") or "")):
            return super().run_node(n)
