"""torch.compile of the model."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from runner.errors import ConfigError
from runner.record.text import shorten
from runner.techniques import compiler
from runner.techniques.base import Evidence, RunBuilder, Technique
from runner.techniques.cost import compile_break_even
from runner.techniques.probe import dry_run_step, repeated_blocks
from runner.techniques.whole_step import kept_out
from runner.training.run import Run

if TYPE_CHECKING:
    from torch import nn

    from runner.device.device import Device

log = logging.getLogger("runner")


class CompileMode(Enum):
    """torch.compile's own modes; `auto` is max-autotune on a GPU, and default on a CPU.

    On a CPU max-autotune was measured 2 to 15 % slower than default.
    """

    auto = "auto"
    default = "default"
    reduce_overhead = "reduce-overhead"
    max_autotune = "max-autotune"


@dataclass
class Compile(Technique):
    """Compiled graphs in place of operator after operator; pays back over many steps.

    Compiling takes from seconds to half a minute, a second run about a tenth of that: what was
    compiled is kept in `$XDG_CACHE_HOME/runner` (or where TORCHINDUCTOR_CACHE_DIR says).
    """

    mode: CompileMode = CompileMode.auto
    regional: bool = False  # each repeated block alone: compiles in a fraction of the time
    dynamic: bool | None = None  # sizes that change; None: once one has changed
    min_steps: int | None = 0  # shorter runs stay eager; null: below the break-even, from timing

    def __post_init__(self) -> None:
        if self.min_steps is not None and self.min_steps < 0:
            raise ConfigError("optimization.compile.min_steps", "is negative", "use 0 or more")

    def unavailable(self, device: Device) -> str | None:
        """On a CPU the generated code needs a C++ compiler."""
        return compiler.missing(device.kind)

    def apply(self, draft: RunBuilder) -> str | None:
        """Compile in place, so that the model's keys stay as they are.

        Where the whole step is one graph, the model's own would only be compiled twice; it waits
        for the case that the step's graph cannot be made.
        """
        reason = compile_break_even(self.min_steps, draft)
        if reason is not None:
            return reason
        parts: list[nn.Module] = [draft.model]
        if self.regional:
            parts = repeated_blocks(draft.model)
            if not parts:
                return "the model has no repeated blocks to compile one by one"
        compiler.prepare(draft.scope)
        compiler.check_tokens(draft)
        modes = compiler.modes(self.mode.value, draft)
        draft.compilation = compilation = Compilation(parts, modes, self.dynamic)
        draft.recoveries.append(compilation.recover)
        draft.scope.callback(compilation.stop)
        if draft.whole_step is None:
            compilation.start()
        return None

    def engaged(self, run: Run) -> Evidence:
        """Graphs, graph breaks with their lines, recompiles and seconds, as dynamo counted them."""
        compilation = run.compilation
        if run.whole is not None:
            made = run.whole.steps > 0
            reason = "" if made else kept_out(run) or "no step was made in one graph"
            return Evidence(made, reason, {"part_of": "whole_step"} if made else {})
        if compilation is None or not compilation.mode:
            return Evidence(False, run.fallen.get("compile", "nothing was compiled"))
        facts = {"mode": compilation.mode, **compiler.compilation_facts()}
        reason = run.fallen.get("compile", "")
        if not facts["graphs"]:
            why = facts.get("failed") or [told for told in [kept_out(run, eager=True)] if told]
            return Evidence(False, shorten("; ".join(["no graph", *why]), 300), facts)
        compiled, layers = _compiled_layers(run)
        shown = Evidence.of_share(compiled, layers, "layers in compiled graphs", **facts)
        return replace(shown, reason="; ".join(filter(None, (reason, shown.reason))))


def _compiled_layers(run: Run) -> tuple[int, int]:
    """How many layers of a step ran in compiled graphs, and how many ran.

    Compiled code does not call the hooks that a module was given later; a layer that the compiler
    left out, or took to pieces at a graph break, does.
    """
    import torch

    called: set[nn.Module] = set()

    def note(module: nn.Module, inputs: Any) -> None:
        called.add(module)

    with ExitStack() as stack:
        for module in run.model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                stack.callback(module.register_forward_pre_hook(note).remove)
        dry_run_step(run)
        eager, called = called, set()
        with torch.compiler.set_stance("force_eager"):
            dry_run_step(run)
    return len(called - eager), len(called)


class Compilation:
    """The model's parts, compiled; goes down the modes and at last to eager where one fails."""

    def __init__(self, parts: list[nn.Module], modes: list[str], dynamic: bool | None) -> None:
        self.parts, self.modes, self.dynamic = parts, modes, dynamic
        self.mode = ""  # eager

    def start(self) -> None:
        """Compile at the next call, in the first mode that is left."""
        compiler.reset_counters()
        self.mode = self.modes.pop(0) if self.modes else ""
        for part in self.parts:
            part._compiled_call_impl = None
            if self.mode:
                _compile(part, mode=self.mode, dynamic=self.dynamic)

    def stop(self) -> None:
        """Back to eager."""
        self.mode = ""
        for part in self.parts:
            part._compiled_call_impl = None

    def recover(self, run: Run, error: Exception) -> bool:
        """Go down a mode, if it is the compiler that failed."""
        if not self.mode or not compiler.is_at_fault(error):
            return False
        failed = self.mode
        self.start()
        why = compiler.summarize_error(error)
        reason = f"mode {failed} failed, {self.mode or 'eager'} instead: {why}"
        run.fallen["compile"] = reason
        log.warning("optimization.compile: %s", reason)
        return True


def _compile(part: nn.Module, **options: Any) -> None:
    """`part.compile()`, also for a class of torch's own, whose files the tracer does not look into.

    A bare nn.Sequential would stay eager without a word (torch 2.13); here it is inlined.
    """
    import torch

    if not type(part).forward.__module__.startswith("torch."):
        part.compile(**options)
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        return part._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    part._compiled_call_impl = torch.compile(call, **options)
