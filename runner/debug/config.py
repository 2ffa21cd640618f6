"""What can be asked of the tools that look for faults: the `debug` group."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from runner.errors import ConfigError

# `raise` is no name that a class could give: it is in debug/history.json and captured, or the run
# ends there, and says where
OnAnomaly = Enum("OnAnomaly", ["record", "raise"])


def _check_bounds(group: str, config: object, **least: float) -> None:
    """Refuse numbers below their least, or not above it for `key_above`; Inf and NaN, too."""
    for key, low in least.items():
        name, above = key.removesuffix("_above"), key.endswith("_above")
        value = getattr(config, name)
        if value is None or (low < value < math.inf if above else low <= value < math.inf):
            continue
        bound = f"{'>' if above else '≥'} {low:g}"
        raise ConfigError(f"debug.{group}{name}", f"must be {bound}, got {value}")


def tool(path: str, config: Any) -> Any:
    """The field of a debug tool: its class as `module:Class`, imported where it is enabled."""
    return field(default_factory=config, metadata={"tool": path})


@dataclass
class ToolConfig:
    """The keys of a tool that needs no others."""

    enabled: bool = False


@dataclass
class CaptureConfig:
    """Bad steps kept for `job=replay`, in debug/captures; healthy steps cost nothing."""

    enabled: bool = True
    at_most: int = 3  # captures a run
    mb: float = 512.0  # of disk for all of them

    def __post_init__(self) -> None:
        _check_bounds("capture.", self, at_most=0, mb_above=0)


@dataclass
class AnomalyConfig:
    """Autograd's anomaly mode: names the operation, and the line, whose gradient is NaN."""

    enabled: bool = False
    every: int | None = None  # steps; None: every step, or debug.every under debug=full

    def __post_init__(self) -> None:
        _check_bounds("anomaly.", self, every=1)


@dataclass
class Bounds:
    """Where a gradient is amiss; either may be null."""

    absolute: float | None = None
    relative: float | None = None


@dataclass
class GradientsConfig:
    """Each layer's gradient, weight and update: which vanish, explode, or belong to dead units.

    A gradient vanishes when its root mean square is below 1e-8, where the `eps` that Adam adds
    (Kingma and Ba 2015) outweighs it, or below 1e-4 of the median layer's; three looks in a row,
    and only of weights, since the bias before a normalisation has none by its nature. It explodes
    when its norm is above 1e3, or a hundred times its own median so far: Pascanu et al. (2013)
    clip at half to ten times the average. A unit is dead when it was 0 for every sample of
    `dead_after` looks.
    """

    enabled: bool = False
    every: int | None = None  # steps between two looks; None: debug.every
    vanishing: Bounds = field(default_factory=lambda: Bounds(1e-8, 1e-4))  # of the median layer's
    exploding: Bounds = field(default_factory=lambda: Bounds(1e3, 1e2))  # of its own median so far
    dead_after: int = 3  # looks; 0: activations are not looked at, and those steps stay compiled
    dead_share: float = 0.25  # of a layer's units, from which on that is a fault
    histograms_every: int = 10  # looks, also between two pictures; 0: none, a picture at the end

    def __post_init__(self) -> None:
        _check_bounds("gradients.", self, every=1, dead_after=0, histograms_every=0)
        for name in ("vanishing", "exploding"):
            _check_bounds(f"gradients.{name}.", getattr(self, name), absolute=0, relative=0)
        if not 0 < self.dead_share <= 1:
            problem = f"must be > 0 and ≤ 1, got {self.dead_share}"
            raise ConfigError("debug.gradients.dead_share", problem)


@dataclass
class GradcheckConfig:
    """Backward passes held against differences, in float64, once at the start."""

    enabled: bool = False
    modules: list[str] | None = None  # names (blocks.*) or classes; null: all but torch's own
    skip: list[str] = field(default_factory=list)  # what is no derivative on purpose
    samples: int = 4  # of the first batch
    length: int = 16  # tokens of each, where the model takes fewer
    budget_s: float = 10.0  # seconds for all checks, smallest first
    tolerance: float = 1e-3  # relative

    def __post_init__(self) -> None:
        _check_bounds("gradcheck.", self, samples=1, length=1, budget_s_above=0)
        if not 0 < self.tolerance < 1:
            problem = f"must be > 0 and < 1, got {self.tolerance}"
            raise ConfigError("debug.gradcheck.tolerance", problem)


@dataclass
class MemoryConfig:
    """Where the memory is, module by module, how it goes over the run, and what grows."""

    enabled: bool = False
    every: int | None = None  # steps between two looks; None: debug.every
    rows: int = 30  # of the table of modules, the largest ones
    census: bool = True  # count objects and tensors, so that a leak can be named; 50 ms, twice
    snapshot: bool = True  # what CUDA's allocator did, for pytorch.org/memory_viz
    snapshot_entries: int = 100_000  # events kept for it

    def __post_init__(self) -> None:
        _check_bounds("memory.", self, every=1, rows=1, snapshot_entries=1)


ProfileHandler = Enum("ProfileHandler", ["trace", "table", "both"])


@dataclass
class ProfileConfig:
    """torch.profiler over a few steps, and in words what keeps the run from being faster.

    Outside its windows no step is slower.
    """

    enabled: bool = False
    start: int = 20  # steps before the first window: the first ones are like no others
    warmup: int = 1  # steps of a window that are traced and thrown away
    steps: int = 5  # steps of a window that are kept
    repeat_every: int | None = 1000  # steps from one window to the next; null: there is only one
    at_most: int = 3  # windows a run
    handler: ProfileHandler = ProfileHandler.both  # a trace for Perfetto, tables, or both
    traces_mb: float = 256.0  # of disk for debug/traces; the oldest go
    shapes: bool = False  # operators told apart by the sizes of their inputs
    stacks: bool = False  # the lines of Python in the trace; those steps are much slower
    memory: bool = False  # what each operator allocates
    modules: bool = True  # time by module; of a compiled model, in a window of uncompiled steps
    cuda_synchronize: bool = False  # sections wait for the device at both ends: honest, slower

    def __post_init__(self) -> None:
        _check_bounds("profile.", self, start=1, warmup=1, steps=1, at_most=0, traces_mb_above=0)
        window = self.warmup + self.steps
        if self.repeat_every is not None and self.repeat_every <= window:
            problem = f"must be > {window}, the steps of a window, or null, got {self.repeat_every}"
            raise ConfigError("debug.profile.repeat_every", problem)


@dataclass
class DebugConfig:
    """Tools that look for faults, and how often those that take time do."""

    every: int = 50  # steps between two looks of tools that take time; fewer in a short run
    on_anomaly: OnAnomaly = OnAnomaly.record
    max_iterations: int | None = None  # steps after which the tools rest; the run goes on
    timeout_s: float | None = None  # seconds after which the tools rest; the run goes on
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    # the tools, outermost first: a new one is a file and a line here
    gradcheck: GradcheckConfig = tool("runner.debug.gradcheck:Gradcheck", GradcheckConfig)
    memory: MemoryConfig = tool("runner.debug.memory:MemoryTool", MemoryConfig)
    profile: ProfileConfig = tool("runner.debug.profile:Profile", ProfileConfig)
    gradients: GradientsConfig = tool("runner.debug.gradients:Gradients", GradientsConfig)
    anomaly: AnomalyConfig = tool("runner.debug.anomaly:Anomaly", AnomalyConfig)
    hooks: list[Any] = field(default_factory=list)  # `package.Class`, or {_target_: …, argument: …}

    def __post_init__(self) -> None:
        _check_bounds("", self, every=1, max_iterations=1, timeout_s_above=0)


def enabled_tools(config: DebugConfig) -> list[str]:
    """The classes of the tools that are switched on, as `module:Class`, outermost first."""
    tools = [f for f in fields(config) if "tool" in f.metadata]
    return [f.metadata["tool"] for f in tools if getattr(config, f.name).enabled]
