"""What can be asked of the device: the `device` group."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from runner.errors import ConfigError


class DeviceKind(Enum):
    """Where the run computes; `auto` takes the fastest that is there."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
    mps = "mps"


@dataclass
class DeviceConfig:
    """Device, process and determinism knobs; `None` leaves a knob as the system has it."""

    kind: DeviceKind = DeviceKind.auto
    index: int | None = None  # which one of several; None: the current one
    memory_fraction: float | None = None  # of the accelerator's memory, 0 to 1
    clean_above: float | None = 0.9  # share of memory held, above which it is cleaned; None: never
    tf32: bool | None = None  # None: the tf32 technique decides
    cudnn_benchmark: bool = False
    deterministic: bool = False
    threads: int | None = None  # intra-op threads; None: torch's own choice
    interop_threads: int | None = None
    affinity: list[int] | None = None  # CPU cores this process may use
    priority: int | None = None  # niceness, -20 to 19

    def __post_init__(self) -> None:
        if self.memory_fraction is not None and not 0 < self.memory_fraction <= 1:
            raise ConfigError(
                "device.memory_fraction", f"{self.memory_fraction} is not a share", "use 0 to 1"
            )
        if self.clean_above is not None and not 0 < self.clean_above <= 1:
            raise ConfigError(
                "device.clean_above",
                f"{self.clean_above} is not a share of the memory",
                "use 0 to 1, or null to leave memory alone",
            )
        for key in ("threads", "interop_threads"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(f"device.{key}", f"{value} is not a count", "use 1 or more")
        if self.priority is not None and not -20 <= self.priority <= 19:
            raise ConfigError("device.priority", f"{self.priority} is no niceness", "-20 to 19")
        if self.deterministic and self.cudnn_benchmark:
            raise ConfigError(
                "device.cudnn_benchmark",
                "picks kernels by timing, so a deterministic run cannot have it",
                "switch one of the two off",
            )
