"""A step's kernels launched as one graph, for models whose kernels are shorter than a launch."""

from __future__ import annotations

from runner.core.device.device import Device
from runner.core.interfaces.run import Run
from runner.core.interfaces.technique import Evidence, RunBuilder
from runner.core.schemas.optimization import CudaGraphs
from runner.core.techniques.compiler import several_backwards
from runner.core.techniques.probe import count_operators

LAUNCH_EVENTS = ("cudaGraphLaunch", "hipGraphLaunch")  # names in the profiler


def unavailable(config: CudaGraphs, device: Device) -> str | None:
    """Return a reason on devices other than CUDA."""
    if device.kind == "cuda":
        return None
    return f"CUDA graphs need a CUDA GPU, but the device is {device.kind}"


def apply(config: CudaGraphs, builder: RunBuilder) -> str | None:
    """Set a flag for the techniques that compile: their compiler captures the graphs.

    torch.cuda.make_graphed_callables is not used: it takes one shape only, and an epoch's last
    batch or micro-batch may have another.
    """
    if reason := several_backwards(builder):
        return reason
    builder.cuda_graphs = True
    return None


def engaged(config: CudaGraphs, run: Run) -> Evidence:
    """Return the number of graphs launched in one step, from the profiler."""
    launches = sum(n for name, n in count_operators(run).items() if name.startswith(LAUNCH_EVENTS))
    reason = "" if launches else "the compiled step launches no graph"
    reason = run.fallback_reasons.get("cuda_graphs", reason)
    if not launches and run.compilation is None and run.step_graph is None:
        reason = "needs a compiled model: optimization.compile.enabled=true"
    return Evidence(launches > 0, reason, {"graph_launches_per_step": launches})
