"""The `debug` config group: the debug tools' settings."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from runner.bounds import bounded, check_bounds

OnAnomaly = Enum("OnAnomaly", ["record", "raise"])  # a class could have no member `raise`


def tool(path: str, config: Any) -> Any:
    """Return the field of a debug tool, with its class as `module:Class`, imported if enabled."""
    return field(default_factory=config, metadata={"tool": path})


@dataclass
class CaptureConfig:
    """Capture of bad steps for `job=replay`, in debug/captures; healthy steps cost nothing."""

    enabled: bool = True
    at_most: int = bounded(3, min=0)  # captures a run
    mb: float = bounded(512.0, above=0)  # of disk for all of them

    def __post_init__(self) -> None:
        check_bounds(self, "debug.capture")


@dataclass
class AnomalyConfig:
    """Autograd's anomaly mode: names the operation, and the line, whose gradient is NaN."""

    enabled: bool = False
    every: int | None = bounded(None, min=1)  # None: every step; debug=full: debug.every

    def __post_init__(self) -> None:
        check_bounds(self, "debug.anomaly")


@dataclass
class Bounds:
    """Thresholds of a gradient fault; either may be null."""

    absolute: float | None = bounded(None, min=0)
    relative: float | None = bounded(None, min=0)


@dataclass
class GradientsConfig:
    """Checks of each layer's gradient, weight and update: vanishing, exploding, dead units.

    Below a root mean square of 1e-8 the `eps` of Adam (Kingma and Ba 2015) outweighs a gradient;
    Pascanu et al. (2013) clip at half to ten times the average norm.
    """

    enabled: bool = False
    every: int | None = bounded(None, min=1)  # steps between two looks; None: debug.every
    vanishing: Bounds = field(default_factory=lambda: Bounds(1e-8, 1e-4))  # of the median layer's
    exploding: Bounds = field(default_factory=lambda: Bounds(1e3, 1e2))  # of its own median so far
    dead_after: int = bounded(3, min=0)  # looks; 0: no activations, and those steps stay compiled
    dead_share: float = bounded(0.25, above=0, max=1)  # of a layer's units: a fault from there on

    def __post_init__(self) -> None:
        check_bounds(self, "debug.gradients")
        for name in ("vanishing", "exploding"):
            check_bounds(getattr(self, name), f"debug.gradients.{name}")


@dataclass
class GradcheckConfig:
    """Comparison of backward passes with finite differences, in float64, once at the start."""

    enabled: bool = False
    skip: list[str] = field(default_factory=list)  # names or classes: no derivative on purpose
    budget_s: float = bounded(10.0, above=0)  # seconds for all checks, smallest first
    tolerance: float = bounded(1e-3, above=0, below=1)  # relative

    def __post_init__(self) -> None:
        check_bounds(self, "debug.gradcheck")


@dataclass
class MemoryConfig:
    """Breakdown of memory by module, and the objects that grow."""

    enabled: bool = False
    every: int | None = bounded(None, min=1)  # steps between two looks; None: debug.every
    snapshot: bool = True  # what CUDA's allocator did, for pytorch.org/memory_viz

    def __post_init__(self) -> None:
        check_bounds(self, "debug.memory")


@dataclass
class ProfileConfig:
    """torch.profiler over a few steps, and a report on what limits the run's speed.

    Steps outside its window are not slowed down.
    """

    enabled: bool = False
    start: int = bounded(20, min=1)  # steps before the window: the first ones are slow
    warmup: int = bounded(1, min=1)  # steps of the window that are traced and thrown away
    steps: int = bounded(5, min=1)  # steps of the window that are kept
    shapes: bool = False  # the sizes of the operators' inputs, in the trace
    stacks: bool = False  # the lines of Python in the trace; those steps are much slower
    memory: bool = False  # what each operator allocates, in the trace

    def __post_init__(self) -> None:
        check_bounds(self, "debug.profile")


@dataclass
class DebugConfig:
    """Debug tools, and the interval and limits of the expensive ones."""

    every: int = bounded(50, min=1)  # steps between two looks of tools; fewer in a short run
    on_anomaly: OnAnomaly = OnAnomaly.record
    max_iterations: int | None = bounded(None, min=1)  # steps after which the tools rest
    timeout_s: float | None = bounded(None, above=0)  # seconds after which the tools rest
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    # the tools, outermost first: a new one is a file and a line here
    gradcheck: GradcheckConfig = tool("runner.debug.gradcheck:Gradcheck", GradcheckConfig)
    memory: MemoryConfig = tool("runner.debug.memory:MemoryTool", MemoryConfig)
    profile: ProfileConfig = tool("runner.debug.profile:ProfileTool", ProfileConfig)
    gradients: GradientsConfig = tool("runner.debug.gradients:Gradients", GradientsConfig)
    anomaly: AnomalyConfig = tool("runner.debug.anomaly:AnomalyTool", AnomalyConfig)
    hooks: list[Any] = field(default_factory=list)  # `package.Class`, or {_target_: …, argument: …}

    def __post_init__(self) -> None:
        check_bounds(self, "debug")


def enabled_tools(config: DebugConfig) -> list[str]:
    """Return the classes of the enabled tools as `module:Class`, outermost first."""
    tools = [f for f in fields(config) if "tool" in f.metadata]
    return [f.metadata["tool"] for f in tools if getattr(config, f.name).enabled]
