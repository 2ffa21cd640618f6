"""What can be asked of the tools that look for faults: the `debug` group."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from runner.errors import ConfigError

# `raise` is no name that a class could give: it is in debug/history.json and captured, or the run
# ends there, and says where
OnAnomaly = Enum("OnAnomaly", ["record", "raise"])


@dataclass
class CaptureConfig:
    """Bad steps kept for `job=replay`, in debug/captures; healthy steps cost nothing."""

    enabled: bool = True
    at_most: int = 3  # captures a run
    mb: float = 512.0  # of disk for all of them

    def __post_init__(self) -> None:
        if self.at_most < 0:
            raise ConfigError("debug.capture.at_most", "is negative", "use 0 or more")
        if not 0 < self.mb < math.inf:
            raise ConfigError("debug.capture.mb", f"{self.mb} is no size", "use more than 0")


@dataclass
class AnomalyConfig:
    """Autograd's anomaly mode: names the operation, and the line, whose gradient is NaN."""

    enabled: bool = False
    every: int | None = None  # steps; None: every step, or debug.every under debug=full


@dataclass
class GradientsConfig:
    """Statistics of each layer's gradient and weight."""

    enabled: bool = False


@dataclass
class GradcheckConfig:
    """Backward passes held against differences, in float64, once at the start."""

    enabled: bool = False


@dataclass
class MemoryConfig:
    """Where the memory is, and whether it leaks."""

    enabled: bool = False


@dataclass
class ProfileConfig:
    """torch.profiler over a few steps."""

    enabled: bool = False


@dataclass
class DebugConfig:
    """Tools that look for faults, and how often those that take time do."""

    every: int = 50  # steps between two looks of tools that take time
    on_anomaly: OnAnomaly = OnAnomaly.record
    max_iterations: int | None = None  # steps after which the tools rest; the run goes on
    timeout_s: float | None = None  # seconds after which the tools rest; the run goes on
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    anomaly: AnomalyConfig = field(default_factory=AnomalyConfig)
    gradients: GradientsConfig = field(default_factory=GradientsConfig)
    gradcheck: GradcheckConfig = field(default_factory=GradcheckConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    hooks: list[str] = field(default_factory=list)  # classes of your own, `runner.Hook`s

    def __post_init__(self) -> None:
        for key in ("every", "max_iterations", "timeout_s"):
            value = getattr(self, key)
            if value is not None and not 0 < value < math.inf:  # NaN is neither
                raise ConfigError(f"debug.{key}", f"{value} is not positive", "use 1 or more")
