"""torch.compile of the model."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from typing import Any

from torch import nn

from runner.device.device import Device
from runner.techniques.base import Evidence, RunBuilder
from runner.techniques.config import Compile
from runner.training.run import Run

KEY = "optimization.compile.min_steps"
ENABLED = "optimization.compile.enabled"  # chosen false if the compiler failed in one process


def unavailable(knobs: Any, device: Device) -> str | None:
    """Return why nothing can be compiled for this device, or None."""
    if device.kind == "mps":
        return "torch.compile is experimental on MPS"
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if device.kind == "cpu" and not shutil.which(compiler):
        return f"no C++ compiler on PATH (install {compiler}, or name one in CXX)"
    return None


def apply(knobs: Compile, draft: RunBuilder) -> str | None:
    """Compile the model in place, so that state_dict keys do not change.

    If the whole step is one graph, compiling the model is deferred: it is needed only if that
    graph fails.
    """
    failed = [c.reason for c in draft.choices if c.key == ENABLED and c.value is False]
    if reason := failed[0] if failed else too_short(draft, knobs.min_steps):
        return reason
    from runner.techniques import compiler
    from runner.techniques.probe import repeated_blocks

    parts: list[nn.Module] = repeated_blocks(draft.model) if knobs.regional else [draft.model]
    if not parts:
        return "the model has no repeated blocks to compile one by one"
    compiler.prepare(draft.scope)
    compiler.check_tokens(draft)
    compilation = compiler.Compilation(parts, compiler.modes(knobs.mode.value, draft))
    draft.compilation = compilation
    draft.recoveries.append(compilation.recover)
    draft.scope.callback(compilation.stop)
    shared = any(switch.name == "whole_step" for switch in draft.switches)
    if draft.whole_step is None or shared:  # both are measured, so each compiles
        least = 2 * least_steps(draft) if shared else 0
        measured = draft.measure("compile", compilation.turn, first=False, least=least)
        if not measured and draft.whole_step is None:
            compilation.start()
    return None


def least_steps(draft: RunBuilder, asked: int | None = 0) -> int:
    """Return the least steps to try it: `asked`, by a timed step if measured, or by rule."""
    if asked or not (asked is None or draft.measures or KEY in draft.recorded):
        return asked or 0
    from runner.techniques.cost import compile_break_even

    return int(draft.choose(KEY, lambda: compile_break_even(draft)))


def too_short(draft: RunBuilder, asked: int | None = 0) -> str | None:
    """Return why the run is too short to be compiled, or None."""
    least, steps = least_steps(draft, asked), draft.total_steps
    if steps >= least:
        return None
    return f"run too short ({steps:,} steps; tried from {least:,} on)"


def engaged(knobs: Compile, run: Run) -> Evidence:
    """Return the share of layers in compiled graphs, and dynamo's counters."""
    from runner.record.text import shorten
    from runner.techniques import compiler
    from runner.techniques.layer_evidence import compiled_layers

    compilation = run.compilation
    if run.whole is not None:
        made = run.whole.steps > 0
        reason = "" if made else compiler.graph_obstacle(run) or "no step ran as one graph"
        return Evidence(made, reason, {"part_of": "whole_step"} if made else {})
    reason = run.fallen.get("compile", "")
    if compilation is None or not compilation.mode:
        return Evidence(False, reason or "nothing was compiled")
    facts = {"mode": compilation.mode, **compiler.compilation_facts()}
    graphs = [facts["graphs"]] if run.world is None else run.world.gather(facts["graphs"])
    if not min(graphs):  # agreed by all processes, since the dry runs below need all of them
        causes = facts.get("failed") or [compiler.graph_obstacle(run, eager=True)]
        return Evidence(False, shorten("; ".join(filter(None, ["no graph", *causes])), 300), facts)
    compiled, layers = compiled_layers(run)
    shown = Evidence.of_share(compiled, layers, "layers in compiled graphs", **facts)
    return replace(shown, reason="; ".join(filter(None, (reason, shown.reason))))
