"""torch.compile of the model."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from runner.device.device import Device
from runner.techniques.base import Evidence, RunBuilder
from runner.techniques.config import Compile
from runner.training.hook import Hook
from runner.training.run import Run

log = logging.getLogger("runner")

KEY = "optimization.compile.min_steps"


def unavailable(knobs: Any, device: Device) -> str | None:
    """Why nothing can be compiled for this device, or None."""
    if device.kind == "mps":
        return "torch.compile is experimental on MPS"
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if device.kind == "cpu" and not shutil.which(compiler):
        return f"no C++ compiler on PATH (install {compiler}, or name one in CXX)"
    return None


def apply(knobs: Compile, draft: RunBuilder) -> str | None:
    """Compile in place, so that the model's keys stay as they are.

    Where the whole step is one graph, the model's own would only be compiled twice; it waits
    for the case that the step's graph cannot be made.
    """
    reason = too_short(draft, knobs.min_steps)
    if reason is not None:
        return reason
    from runner.techniques import compiler
    from runner.techniques.probe import repeated_blocks

    parts: list[nn.Module] = repeated_blocks(draft.model) if knobs.regional else [draft.model]
    if not parts:
        return "the model has no repeated blocks to compile one by one"
    compiler.prepare(draft.scope)
    compiler.check_tokens(draft)
    modes = compiler.modes(knobs.mode.value, draft)
    draft.compilation = compilation = compiler.Compilation(parts, modes)
    draft.recoveries.append(compilation.recover)
    draft.scope.callback(compilation.stop)
    shared = any(switch.name == "whole_step" for switch in draft.switches)
    if draft.whole_step is None or shared:  # where both are measured, each compiles
        least = 2 * int(least_steps(draft) or 0) if shared else 0
        measured = draft.measure("compile", compilation.turn, first=False, least=least)
        if not measured and draft.whole_step is None:
            compilation.start()
    return None


def least_steps(draft: RunBuilder, otherwise: int | None = 0) -> int | None:
    """From how many steps on compiling is tried; a number that was asked for is taken as it is.

    Else by a timed step where a level is measured, and by a rule where `otherwise` is None.
    """
    if otherwise:
        return otherwise
    if draft.measures or otherwise is None or KEY in draft.recorded:
        from runner.techniques.cost import compile_break_even, compile_rule

        decide = compile_break_even if draft.measures else compile_rule
        return int(draft.choose(KEY, lambda: decide(draft)))
    return otherwise


def too_short(draft: RunBuilder, otherwise: int | None = 0) -> str | None:
    """Why a run of so many steps is not compiled, or None."""
    least, steps = least_steps(draft, otherwise), draft.total_steps
    if least is None or steps >= least:
        return None
    return f"run too short ({steps:,} steps; it is tried from {least:,} on)"


def engaged(knobs: Compile, run: Run) -> Evidence:
    """Graphs, graph breaks with their lines, recompiles and seconds, as dynamo counted them."""
    from runner.record.text import shorten
    from runner.techniques import compiler

    compilation = run.compilation
    if run.whole is not None:
        made = run.whole.steps > 0
        reason = "" if made else graph_obstacle(run) or "no step was made in one graph"
        return Evidence(made, reason, {"part_of": "whole_step"} if made else {})
    reason = run.fallen.get("compile", "")
    if compilation is None or not compilation.mode:
        return Evidence(False, reason or "nothing was compiled")
    facts = {"mode": compilation.mode, **compiler.compilation_facts()}
    if not facts["graphs"]:
        causes = facts.get("failed") or list(filter(None, [graph_obstacle(run, eager=True)]))
        return Evidence(False, shorten("; ".join(["no graph", *causes]), 300), facts)
    compiled, layers = _compiled_layers(run)
    shown = Evidence.of_share(compiled, layers, "layers in compiled graphs", **facts)
    return replace(shown, reason="; ".join(filter(None, (reason, shown.reason))))


def _compiled_layers(run: Run) -> tuple[int, int]:
    """How many layers of a step ran in compiled graphs, and how many ran.

    Compiled code does not call the hooks that a module was given later; a layer that the compiler
    left out, or took to pieces at a graph break, does.
    """
    from runner.techniques.probe import dry_run_step

    called: set[nn.Module] = set()
    layers = [m for m in run.model.modules() if next(m.parameters(recurse=False), None) is not None]
    hooks = [m.register_forward_pre_hook(lambda module, _: called.add(module)) for m in layers]
    try:
        dry_run_step(run)
        eager = set(called)
        with torch.compiler.set_stance("force_eager"):
            dry_run_step(run)
    finally:
        for hook in hooks:
            hook.remove()
    return len(called - eager), len(called)


def graph_obstacle(run: Run, eager: bool = False) -> str:
    """What looks at every step, so that none is made in one graph; empty where nothing does.

    With `eager`, what has every step made uncompiled.
    """
    for hook in run.hooks:
        events = ("around", "on_gradients")  # what a step in one graph has no place for
        looks = any(getattr(type(hook), event) is not getattr(Hook, event) for event in events)
        if hook.every == 1 and looks and (hook.eager or not eager):
            tool = getattr(hook, "name", "")  # a debug tool has one, which is that of its key
            name = f"debug={tool}" if tool else type(hook).__name__
            slower = f"; debug.{tool}.every=50 leaves most of it" if tool else ""
            how = "uncompiled" if hook.eager else "in more than one graph"
            return f"{name} looks at every step, which is then made {how}{slower}"
    return ""


def warn_graph_obstacle(run: Run) -> None:
    """Say at the start that a hook keeps every step from being compiled."""
    compiled = run.whole is not None or (run.compilation is not None and run.compilation.mode)
    if compiled and (reason := graph_obstacle(run, eager=run.whole is None)):
        name = "compile" if run.whole is None else "whole_step"
        log.warning("optimization.%s: %s", name, reason)
