"""Forward, backward, clip, guard and optimizer as one compiled graph.

For full batches only; an epoch's smaller last batch, and steps in which a hook reads gradients,
run in separate parts, with the same weights and optimizer state.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runner.techniques import compile as compile_technique
from runner.techniques import compiler, probe
from runner.techniques.base import Evidence, RunBuilder
from runner.techniques.config import WholeStep
from runner.techniques.fused_optimizer import fastest
from runner.training.run import Run

if TYPE_CHECKING:
    from runner.optim.whole_step import StepGraph


unavailable = compile_technique.unavailable


def apply(knobs: WholeStep, draft: RunBuilder) -> str | None:
    """Store compile options in the draft; the graph is made once there is an optimizer."""
    if draft.micro_batch < draft.batch_size:
        return f"micro-batches of {draft.micro_batch}: the step is several backward passes"
    if draft.world is not None:
        return "gradients go to other processes in the middle of the step"
    if draft.recompute is not None:
        return "recompute needs separate forward and backward graphs"
    fused, reason = fastest(draft.optimizer_class, draft.model)
    reason = reason or compile_technique.too_short(draft)
    if reason is not None:
        return reason
    import torch._dynamo.config as tracer  # takes two seconds, so imported only if used

    if not hasattr(tracer, "trace_autograd_ops"):
        return f"torch {torch.__version__} cannot put a backward pass into a graph"
    if draft.device.kind == "cpu" and draft.objective.indices is None:
        draft.index_limit = _index_limit(draft)  # before the draft is changed
    compiler.prepare(draft.scope)
    compiler.check_tokens(draft)
    _allow_gradients_in_graphs(draft.scope, tracer)
    draft.whole_step = {"cpp_wrapper": knobs.cpp_wrapper}
    if draft.device.kind != "cpu":
        draft.whole_step = dict(torch._inductor.list_mode_options(compiler.modes("auto", draft)[0]))
    # the graph uses this optimizer's state, and the optimizer runs steps outside of the graph
    draft.optimizer_options.update(fused)
    draft.measure("whole_step", Graph().turn, first=False)
    return None


class Graph:
    """Keeps the run's graph while the technique is switched off."""

    made: StepGraph | None = None

    def turn(self, run: Run, on: bool) -> None:
        """Give the graph back to the run, or take it; a graph that failed stays None."""
        if on:
            run.whole, self.made = self.made or run.whole, None
        else:
            run.whole, self.made = None, run.whole or self.made


def _allow_gradients_in_graphs(scope: ExitStack, tracer: Any) -> None:
    # without it a Python float that changes between steps would be a constant (torch 2.13)
    for name in ("trace_autograd_ops", "specialize_float"):
        scope.callback(setattr, tracer, name, getattr(tracer, name))
        setattr(tracer, name, True)


def engaged(knobs: WholeStep, run: Run) -> Evidence:
    """Return the share of steps that ran in one graph."""
    whole = run.whole
    if whole is None:
        return Evidence(False, run.fallen.get("whole_step", "no step ran as one graph"))
    made = max(run.watch.count, whole.steps)  # a user's own loop is not timed
    facts: dict[str, Any] = {"steps_in_one_graph": whole.steps, **compiler.compilation_facts()}
    if not whole.steps:
        return Evidence(False, compiler.graph_obstacle(run) or "no full batch seen", facts)
    return Evidence.of_share(whole.steps, made, "steps run as one graph", **facts)


def _index_limit(draft: RunBuilder) -> int | None:
    """Return the number of classes that a user's loss indexes, from the shapes, or None.

    On a CPU compiled code ends the process if an index is out of range.
    """
    inputs, target = probe.sample_batch(draft, draft.micro_batch)
    if not isinstance(target, Tensor) or target.is_floating_point():
        return None
    with probe.untouched(draft), torch.no_grad():
        output = probe.forward(draft, inputs)
    output = getattr(output, "logits", output)
    shape = list(output.shape) if isinstance(output, Tensor) else []
    for classes, rest in ((shape[-1:], shape[:-1]), (shape[1:2], shape[:1] + shape[2:])):
        if classes and rest == list(target.shape):
            return int(classes[0])
    return None
