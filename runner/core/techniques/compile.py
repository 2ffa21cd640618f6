"""torch.compile of the model."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from typing import Any

from torch import nn

from runner.core.device.device import Device
from runner.core.interfaces.run import Run
from runner.core.interfaces.technique import Evidence, RunBuilder
from runner.core.schemas.optimization import Compile

KEY = "optimization.compile.min_steps"
ENABLED = "optimization.compile.enabled"  # chosen false if the compiler failed in one process


def unavailable(config: Any, device: Device) -> str | None:
    """Return why nothing can be compiled for this device, or None."""
    if device.kind == "mps":
        return "torch.compile is experimental on MPS"
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if device.kind == "cpu" and not shutil.which(compiler):
        return f"no C++ compiler on PATH (install {compiler}, or name one in CXX)"
    return None


def apply(config: Compile, builder: RunBuilder) -> str | None:
    """Compile the model in place, or later if the whole step is one graph; state_dict keys stay."""
    failed = [c.reason for c in builder.choices if c.key == ENABLED and c.value is False]
    if reason := failed[0] if failed else too_short(builder, config.min_steps):
        return reason
    alone = builder.whole_step_options is None
    if alone and not config.min_steps and (reason := builder.skip_reason("compile")):
        return reason
    from runner.core.techniques import compiler
    from runner.core.techniques.probe import repeated_blocks

    parts: list[nn.Module] = repeated_blocks(builder.model) if config.regional else [builder.model]
    if not parts:
        return "the model has no repeated blocks to compile one by one"
    compiler.prepare(builder.scope)
    compiler.add_token_check(builder)
    modes = compiler.select_modes(config.mode.value, builder)
    compilation = compiler.Compilation(parts, modes, config.dynamic)
    builder.compilation, builder.drop_graphs = compilation, compiler.drop_graphs
    builder.recoveries.append(compilation.recover)
    builder.scope.callback(compilation.stop)
    whole_step_measured = any(switch.name == "whole_step" for switch in builder.switches)
    # both are measured, so each compiles
    if builder.whole_step_options is None or whole_step_measured:
        min_steps = 2 * minimum_steps(builder) if whole_step_measured else 0
        switch, discard = compilation.set_enabled, compilation.discard
        measured = builder.add_switch(
            "compile", switch, initially_on=False, min_steps=min_steps, discard=discard
        )
        if not measured and builder.whole_step_options is None:
            compilation.start()
    return None


def minimum_steps(builder: RunBuilder, min_steps: int | None = 0) -> int:
    """Return the least steps to try it: `min_steps`, by a timed step if measured, or by rule."""
    if min_steps or not (min_steps is None or builder.measure_gains or KEY in builder.recorded):
        return min_steps or 0
    from runner.core.techniques.cost import compile_break_even

    return int(builder.choose(KEY, lambda: compile_break_even(builder)))


def too_short(builder: RunBuilder, min_steps: int | None = 0) -> str | None:
    """Return why the run is too short to be compiled, or None."""
    required, steps = minimum_steps(builder, min_steps), builder.total_steps
    if steps >= required:
        return None
    return f"run too short ({steps:,} steps; tried from {required:,} on)"


def engaged(config: Compile, run: Run) -> Evidence:
    """Return the share of layers in compiled graphs, and dynamo's counters."""
    from runner.core.record.text import shorten
    from runner.core.techniques import compiler
    from runner.core.techniques.probe import compiled_layers, compiled_work

    compilation = run.compilation
    if run.step_graph is not None:
        has_run = run.step_graph.steps > 0
        reason = "" if has_run else compiler.graph_obstacle(run) or "no step ran as one graph"
        return Evidence(has_run, reason, {"part_of": "whole_step"} if has_run else {})
    reason = run.fallback_reasons.get("compile", "")
    if compilation is None or not compilation.mode:
        return Evidence(False, reason or "nothing was compiled")
    facts = {"mode": compilation.mode, **compiler.compilation_facts()}
    compiler.store_seconds(run, facts)
    graphs = run.gather(facts["graphs"])
    if not min(graphs):  # agreed by all processes, since the dry runs below need all of them
        causes = facts.get("failed") or [compiler.graph_obstacle(run, eager=True)]
        return Evidence(False, shorten("; ".join(filter(None, ["no graph", *causes])), 300), facts)
    compiled, total = compiled_layers(run)
    if (work := compiled_work(run)) is not None:
        facts["work"] = f"{work:.0%}"
    evidence = Evidence.of_share(compiled, total, "layers in compiled graphs", **facts)
    if evidence.engaged and work is not None and work <= 0.5:
        reason = f"{work:.0%} of the work (FLOP of products, other elements) in compiled graphs"
        evidence = replace(evidence, engaged=False, reason=reason)
    return replace(evidence, reason="; ".join(filter(None, (reason, evidence.reason))))
