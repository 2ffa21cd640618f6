"""A step's kernels launched as one graph, for models whose kernels are shorter than a launch."""

from __future__ import annotations

from runner.device.device import Device
from runner.techniques.base import Evidence, RunBuilder
from runner.techniques.config import CudaGraphs
from runner.techniques.probe import operators
from runner.training.run import Run

LAUNCH = ("cudaGraphLaunch", "hipGraphLaunch")  # what the profiler calls them


def unavailable(knobs: CudaGraphs, device: Device) -> str | None:
    """Only CUDA has graphs of kernels."""
    if device.kind == "cuda":
        return None
    return f"CUDA graphs are for GPUs with CUDA, and the device is {device.kind}"


def apply(knobs: CudaGraphs, draft: RunBuilder) -> None:
    """Tell the techniques that compile, which come later: their compiler captures the graphs.

    Not by torch.cuda.make_graphed_callables: that takes one shape alone, and an epoch's last batch
    or a ragged micro-batch has another.
    """
    draft.cuda_graphs = True


def engaged(knobs: CudaGraphs, run: Run) -> Evidence:
    """Graphs launched in one step, counted by the profiler."""
    launches = sum(n for name, n in operators(run).items() if name.startswith(LAUNCH))
    reason = "" if launches else "the compiled step launches no graph"
    if not launches and run.compilation is None and run.whole is None:
        reason = "needs a compiled model: optimization.compile.enabled=true"
    return Evidence(launches > 0, reason, {"graph_launches_per_step": launches})
