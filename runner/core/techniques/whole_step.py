"""Forward, backward, clip, guard and optimizer as one compiled graph.

For full batches only; an epoch's smaller last batch, and steps in which a hook reads gradients,
run in separate parts, with the same weights and optimizer state.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runner.core.interfaces.run import Run
from runner.core.interfaces.technique import Evidence, RunBuilder
from runner.core.schemas.optimization import WholeStep
from runner.core.techniques import compile as compile_technique
from runner.core.techniques import compiler, model_calls
from runner.core.techniques.fused_optimizer import fastest_implementation

if TYPE_CHECKING:
    from runner.core.optim.whole_step import StepGraph


unavailable = compile_technique.unavailable


def apply(config: WholeStep, builder: RunBuilder) -> str | None:
    """Store compile options in the builder; the graph is made once there is an optimizer."""
    if several := compiler.several_backwards(builder):
        return several
    if builder.is_shared:
        return "gradients go to other processes in the middle of the step"
    if builder.recompute is not None:
        return "recompute needs separate forward and backward graphs"
    fused, reason = fastest_implementation(builder.optimizer_class, builder.model)
    reason = reason or compile_technique.too_short(builder) or builder.skip_reason("whole_step")
    if reason is not None:
        return reason
    import torch._dynamo.config as dynamo_config  # takes two seconds, so imported only if used

    if not hasattr(dynamo_config, "trace_autograd_ops"):
        return f"torch {torch.__version__} cannot put a backward pass into a graph"
    if builder.device.kind == "cpu" and builder.objective.indices is None:
        builder.index_limit = _infer_index_limit(builder)  # before the builder is changed
    compiler.prepare(builder.scope)
    compiler.add_token_check(builder)
    builder.drop_graphs = compiler.drop_graphs
    _allow_gradients_in_graphs(builder.scope, dynamo_config)
    builder.whole_step_options = {"cpp_wrapper": config.cpp_wrapper}
    if builder.device.kind != "cpu":
        mode = compiler.select_modes("auto", builder)[0]
        builder.whole_step_options = dict(torch._inductor.list_mode_options(mode))
    # the graph uses this optimizer's state, and the optimizer runs steps outside of the graph
    builder.optimizer_options.update(fused)
    holder = GraphHolder()
    builder.add_switch("whole_step", holder.set_enabled, initially_on=False, discard=holder.discard)
    return None


class GraphHolder:
    """Keeps the run's graph while the technique is switched off."""

    graph: StepGraph | None = None

    def set_enabled(self, run: Run, on: bool) -> None:
        """Give the graph back to the run, or take it; one that was given up is dropped."""
        if "whole_step" in run.fallback_reasons:
            run.step_graph = self.graph = None
        elif on:
            run.step_graph, self.graph = self.graph or run.step_graph, None
        else:
            run.step_graph, self.graph = None, run.step_graph or self.graph

    def discard(self, run: Run) -> None:
        """Forget the graph of a technique that was rejected, and free its memory."""
        self.graph = None
        compiler.free_graphs(run)


def _allow_gradients_in_graphs(scope: ExitStack, dynamo_config: Any) -> None:
    # without it a Python float that changes between steps would be a constant (torch 2.13)
    for name in ("trace_autograd_ops", "specialize_float"):
        scope.callback(setattr, dynamo_config, name, getattr(dynamo_config, name))
        setattr(dynamo_config, name, True)
    # the graph leaves autocast before its backward: cached all the same, by the call's arguments
    calls = [f"torch.amp.autocast_mode._{end}_autocast" for end in ("enter", "exit")]
    inductor_config: Any = torch._inductor.config
    cacheable = inductor_config.unsafe_marked_cacheable_functions | dict.fromkeys(calls, "1")
    scope.enter_context(inductor_config.patch(unsafe_marked_cacheable_functions=cacheable))


def engaged(config: WholeStep, run: Run) -> Evidence:
    """Return the share of steps that ran in one graph."""
    graph = run.step_graph
    if graph is None:
        return Evidence(False, run.fallback_reasons.get("whole_step", "no step ran as one graph"))
    total_steps = max(run.stopwatch.count, graph.steps)  # a user's own loop is not timed
    facts: dict[str, Any] = {"steps_in_one_graph": graph.steps, **compiler.compilation_facts()}
    compiler.store_seconds(run, facts)
    if not graph.steps:
        return Evidence(False, compiler.graph_obstacle(run) or "no full batch seen", facts)
    return Evidence.of_share(graph.steps, total_steps, "steps run as one graph", **facts)


def _infer_index_limit(builder: RunBuilder) -> int | None:
    """Return the number of classes that a user's loss indexes, from the shapes, or None.

    On a CPU compiled code ends the process if an index is out of range.
    """
    inputs, target = model_calls.sample_batch(builder, builder.micro_batch)
    if not isinstance(target, Tensor) or target.is_floating_point():
        return None
    with model_calls.preserve_builder_state(builder), torch.no_grad():
        output = model_calls.forward(builder, inputs)
    output = getattr(output, "logits", output)
    shape = list(output.shape) if isinstance(output, Tensor) else []
    for classes, other_dims in ((shape[-1:], shape[:-1]), (shape[1:2], shape[:1] + shape[2:])):
        if classes and other_dims == list(target.shape):
            return int(classes[0])
    return None
