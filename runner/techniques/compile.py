"""torch.compile of the model."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from runner.run import Draft, Evidence, Run, Technique

if TYPE_CHECKING:
    from runner.device.device import Device


class CompileMode(Enum):
    """torch.compile's own modes."""

    default = "default"
    reduce_overhead = "reduce-overhead"
    max_autotune = "max-autotune"


@dataclass
class Compile(Technique):
    """One compiled graph in place of operator after operator; pays back over many steps."""

    mode: CompileMode = CompileMode.default
    dynamic: bool | None = None  # None: torch decides when a size changes
    min_steps: int = 0  # shorter runs stay eager: compiling would not pay back

    def unavailable(self, device: Device) -> str | None:
        """On a CPU the generated code needs a C++ compiler."""
        if device.kind == "cpu" and not (shutil.which("g++") or shutil.which("clang++")):
            return "no C++ compiler on PATH (install g++ or clang++)"
        if device.kind == "mps":
            return "torch.compile is experimental on MPS"
        return None

    def apply(self, draft: Draft) -> str | None:
        """Compile in place, so that the model's keys stay as they are."""
        import torch

        if draft.total_steps < self.min_steps:
            return f"{draft.total_steps} steps (min_steps={self.min_steps}) would not pay it back"
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        draft.model.compile(mode=self.mode.value, dynamic=self.dynamic)
        return None

    def engaged(self, run: Run) -> Evidence:
        """Graphs, graph breaks and recompiles, from dynamo's own counters."""
        import torch

        counters = torch._dynamo.utils.counters
        graphs = int(counters["stats"]["unique_graphs"])
        breaks = dict(counters["graph_break"])
        facts: dict[str, Any] = {"graphs": graphs, "graph_breaks": sum(breaks.values())}
        if breaks:
            facts["why_broken"] = [" ".join(str(why).split())[:200] for why in breaks]
        return Evidence(graphs > 0, "" if graphs else "nothing was compiled", facts)
