"""The `stability` group: guard, clipping, spike limits, rollbacks and monitoring."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from runner.core.bounds import Bounded, bounded
from runner.core.errors import ConfigError


class SpikeQuantity(Enum):
    """The quantities in which spikes are detected."""

    loss = "loss"
    grad_norm = "grad_norm"
    both = "both"


@dataclass
class SpikeConfig(Bounded, key="stability.spike"):
    """A spike is a loss or gradient norm far above the median of the last `window` steps.

    It exceeds all three: the median plus `threshold` deviations, `ratio` times the median, and
    `floor` times the largest of the first steps. The defaults are for steps that would ruin a run:
    of 87 healthy runs 85 lost no step to them. For smaller spikes: ratio=3, floor=0.
    """

    enabled: bool = True  # detect spikes
    watch: SpikeQuantity = SpikeQuantity.both  # quantities in which spikes are detected
    window: int = bounded(100, min=2)  # steps of the rolling median
    at_least: int = bounded(30, min=2)  # steps before spikes are detected; at most `window`
    # a spike exceeds this and the next two: median + threshold × 1.48 median absolute deviations
    threshold: float = bounded(20.0, above=0)
    ratio: float = bounded(20.0, min=1)  # ratio × median
    floor: float = bounded(20.0, min=0)  # floor × largest of the first `at_least` steps; 0: off

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.at_least > self.window:
            problem = f"must be ≤ stability.spike.window={self.window}, got {self.at_least}"
            raise ConfigError("stability.spike.at_least", problem)


@dataclass
class WatchConfig(Bounded, key="stability.watch"):
    """Monitoring of memory, disk, swap, GPU and speed during training; 20 µs per report."""

    enabled: bool = True  # monitor memory, disk, swap, GPU and speed
    # share of memory in use above which the run saves and stops; null: never
    stop_above: float | None = bounded(0.95, above=0, max=1)
    disk_min_mb: float = bounded(512.0, min=0)  # MB of free disk space below which it warns
    swap_mb: float = bounded(256.0, min=0)  # MB swapped out since the start above which it warns
    gpu_temperature: float = bounded(87.0, min=0)  # warns above this °C; GPUs slow down at 83 to 90
    gpu: bool | None = None  # NVML readings; null: if nvidia-ml-py and a GPU are present
    leaks: bool = True  # detect steady growth of memory
    leak_mb: float = bounded(8.0, min=0)  # MiB of growth below which nothing is reported
    # steps that take this many times as long as the first ones are reported; null: never. Medians
    # are compared, of a tenth of the run each, or of 50 steps and 10 s if that is less
    slower: float | None = bounded(1.5, above=1)
    # share of the CPUs that other processes use, above which it is reported; null: never
    cpu_above: float | None = bounded(0.9, min=0, max=1)

    @property
    def watches_speed(self) -> bool:
        """Whether slower steps or busy CPUs are reported."""
        return (self.slower, self.cpu_above) != (None, None)


@dataclass
class StabilityConfig(Bounded, key="stability"):
    """Gradient clipping, guard, spike detection, rollbacks and monitoring."""

    clip_norm: float | None = 1.0  # largest gradient norm; null: no clipping
    clip_value: float | None = bounded(None, above=0)  # limit of each gradient element; null: off
    # AGC: largest ratio of a unit's gradient norm to its weight norm; null: off
    clip_adaptive: float | None = bounded(None, above=0)
    clip_per_group: bool = False  # clip_norm applies to each optimizer parameter group separately
    guard: bool = True  # skip non-finite steps and spikes; false: no spike detection, no rollback
    spike: SpikeConfig = field(default_factory=SpikeConfig)
    # bad steps in a row that are skipped; more roll back, of spikes the limits are learned again
    max_consecutive_skips: int = bounded(10, min=0)
    # rollbacks per run, also of weights or buffers that are not finite; then the run gives up
    max_rollbacks: int = bounded(2, min=0)
    rollback_lr_factor: float = bounded(0.5, above=0, max=1)  # of the learning rate, per rollback
    watch: WatchConfig = field(default_factory=WatchConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip_norm is not None and not self.clip_norm > 0:  # Inf: measured, not clipped
            raise ConfigError("stability.clip_norm", f"must be > 0 or null, got {self.clip_norm}")
        if self.clip_per_group and self.clip_norm is None:
            raise ConfigError("stability.clip_per_group", "needs stability.clip_norm")
