"""The `debug` config group: the debug tools' settings."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from runner.core.bounds import Bounded, bounded, check_bounds

TOOLS = "runner.diagnose.debug"
OnAnomaly = Enum("OnAnomaly", ["record", "raise"])  # a class could have no member `raise`


def tool_field(path: str, config: Any) -> Any:
    """Return the field of a debug tool, with its class as `module:Class`, imported if enabled."""
    return field(default_factory=config, metadata={"tool": path})


@dataclass
class CaptureConfig(Bounded, key="debug.capture"):
    """Capture of bad steps for `job=replay`, in debug/captures; healthy steps cost nothing."""

    enabled: bool = True  # save bad steps for job=replay
    at_most: int = bounded(3, min=0)  # captures per run
    mb: float = bounded(512.0, above=0)  # MiB of disk for all captures


@dataclass
class AnomalyConfig(Bounded, key="debug.anomaly"):
    """Autograd's anomaly mode, which names the operation and line of a NaN gradient."""

    enabled: bool = False  # name the operation and source line of a NaN gradient
    every: int | None = bounded(None, min=1)  # steps; null: each step (debug=full: debug.every)


@dataclass
class FaultThresholds:
    """Thresholds of a gradient fault; either may be null."""

    absolute: float | None = bounded(None, min=0)  # vanishing: RMS; exploding: norm; null: off
    # vanishing: of the layers' median RMS; exploding: of the layer's own median norm; null: off
    relative: float | None = bounded(None, min=0)


@dataclass
class GradientsConfig(Bounded, key="debug.gradients"):
    """Checks of each layer's gradient, weight and update: vanishing, exploding, dead units.

    Below a root mean square of 1e-8 the `eps` of Adam (Kingma and Ba 2015) outweighs a gradient;
    Pascanu et al. (2013) clip at half to ten times the average norm.
    """

    enabled: bool = False  # report vanishing and exploding gradients and dead units
    every: int | None = bounded(None, min=1)  # steps between inspections; null: debug.every
    # of the layers' median
    vanishing: FaultThresholds = field(default_factory=lambda: FaultThresholds(1e-8, 1e-4))
    # of its own median so far
    exploding: FaultThresholds = field(default_factory=lambda: FaultThresholds(1e3, 1e2))
    # inspections with only zeros until a ReLU unit is dead; 0: off, and steps stay compiled
    dead_after: int = bounded(3, min=0)
    dead_share: float = bounded(0.25, above=0, max=1)  # share of dead units that makes a fault

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("vanishing", "exploding"):
            check_bounds(getattr(self, name), f"debug.gradients.{name}")


@dataclass
class GradcheckConfig(Bounded, key="debug.gradcheck"):
    """Comparison of backward passes with finite differences, in float64, once at the start."""

    enabled: bool = False  # compare backward passes with finite differences at the start
    skip: list[str] = field(default_factory=list)  # modules or classes not to check, by name
    budget_s: float = bounded(10.0, above=0)  # seconds for all checks, smallest module first
    tolerance: float = bounded(1e-3, above=0, below=1)  # relative tolerance of a gradient


@dataclass
class MemoryConfig(Bounded, key="debug.memory"):
    """Breakdown of memory by module, and the objects that grow."""

    enabled: bool = False  # break down memory by module, and name growing objects
    # first inspected step; each next one is twice as late; null: debug.every
    every: int | None = bounded(None, min=1)
    snapshot: bool = True  # CUDA: write an allocator snapshot for pytorch.org/memory_viz


@dataclass
class ProfileConfig(Bounded, key="debug.profile"):
    """torch.profiler over a few steps, and a report on what limits the run's speed.

    Steps outside its window are not slowed down.
    """

    enabled: bool = False  # profile a window of steps with torch.profiler
    start: int = bounded(20, min=1)  # steps before the window; fewer in a short run
    warmup: int = bounded(1, min=1)  # first steps of the window, traced and discarded
    steps: int = bounded(5, min=1)  # recorded steps of the window
    modules: bool = True  # time by module, forward and backward, and its names in the trace
    shapes: bool = False  # record the input shapes of operators
    stacks: bool = False  # record Python source lines; slows these steps considerably
    memory: bool = False  # record the allocations of operators


@dataclass
class DebugConfig(Bounded, key="debug"):
    """Debug tools, their interval and their limits."""

    every: int = bounded(50, min=1)  # steps between inspections by a tool; fewer in a short run
    # raise: end the run at a non-finite step, weight or buffer, or at a wrong gradient
    on_anomaly: OnAnomaly = OnAnomaly.record
    max_iterations: int | None = bounded(None, min=1)  # last step of the tools; null: no limit
    timeout_s: float | None = bounded(None, above=0)  # seconds until the tools stop; null: never
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    # the tools, outermost first: for a new one see runner/diagnose/README.md
    gradcheck: GradcheckConfig = tool_field(f"{TOOLS}.gradcheck:GradcheckTool", GradcheckConfig)
    memory: MemoryConfig = tool_field(f"{TOOLS}.memory:MemoryTool", MemoryConfig)
    profile: ProfileConfig = tool_field(f"{TOOLS}.profile:ProfileTool", ProfileConfig)
    gradients: GradientsConfig = tool_field(f"{TOOLS}.gradients:GradientsTool", GradientsConfig)
    anomaly: AnomalyConfig = tool_field(f"{TOOLS}.anomaly:AnomalyTool", AnomalyConfig)
    hooks: list[Any] = field(default_factory=list)  # `package.Class`, or {_target_: …, argument: …}


def enabled_tools(config: DebugConfig) -> list[str]:
    """Return the classes of the enabled tools as `module:Class`, outermost first."""
    tools = [f for f in fields(config) if "tool" in f.metadata]
    return [f.metadata["tool"] for f in tools if getattr(config, f.name).enabled]
