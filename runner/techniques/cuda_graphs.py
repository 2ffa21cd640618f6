"""A step's kernels launched as one graph, for models whose kernels are shorter than a launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from runner.techniques.base import Evidence, RunBuilder, Technique
from runner.techniques.probe import operators
from runner.training.run import Run

if TYPE_CHECKING:
    from runner.device.device import Device

LAUNCH = ("cudaGraphLaunch", "hipGraphLaunch")  # what the profiler calls them


@dataclass
class CudaGraphs(Technique):
    """Helps small models on a GPU, where the host takes longer to launch than the GPU to compute.

    The compiler captures the graphs, once for each shape, and keeps their memory apart. Not by
    torch.cuda.make_graphed_callables without a compiler: that takes one shape alone, and an
    epoch's last batch or a ragged micro-batch has another.
    """

    def unavailable(self, device: Device) -> str | None:
        """Only CUDA has graphs of kernels."""
        if device.kind == "cuda":
            return None
        return f"CUDA graphs are for GPUs with CUDA, and the device is {device.kind}"

    def apply(self, draft: RunBuilder) -> str | None:
        """Tell the compile technique, which comes later."""
        draft.cuda_graphs = True
        return None

    def engaged(self, run: Run) -> Evidence:
        """Graphs launched in one step, counted by the profiler."""
        launches = sum(n for name, n in operators(run).items() if name.startswith(LAUNCH))
        if launches:
            reason = ""
        elif run.compilation is None and run.whole is None:
            reason = "needs a compiled model: optimization.compile.enabled=true"
        else:
            reason = "the compiled step launches no graph"
        return Evidence(launches > 0, reason, {"graph_launches_per_step": launches})
