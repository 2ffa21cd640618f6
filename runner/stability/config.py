"""The `stability` group: guard, clipping, spike limits and the recovery table."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from runner.bounds import bounded, check_bounds
from runner.errors import ConfigError


class Watch(Enum):
    """The quantities in which spikes are detected."""

    loss = "loss"
    grad_norm = "grad_norm"
    both = "both"


class BadStepKind(Enum):
    """Kinds of bad steps."""

    any = "any"  # of those below
    non_finite = "non_finite"  # the loss, or a gradient without a loss scale
    overflow = "overflow"  # of a gradient times the loss scale of fp16
    spike = "spike"  # finite, and far above what is normal
    weights = "weights"  # they are not finite themselves
    buffers = "buffers"  # such as BatchNorm's statistics; loss and gradients are finite


class Action(Enum):
    """Remedies for a bad step; its update is never applied."""

    skip = "skip"  # and nothing else
    lower_lr = "lower_lr"  # times `factor`, for `for_steps` steps
    lower_scale = "lower_scale"  # the loss scale of fp16, times `factor`
    rollback = "rollback"  # to the last good checkpoint, with the rate times `factor` from there on
    accept = "accept"  # the new normal: limits are learned from here on
    stop = "stop"  # save a checkpoint and give up, exit code 4


@dataclass
class SpikeConfig:
    """A spike is a loss or gradient norm far above the median of the last `window` steps.

    It exceeds all three: the median plus `threshold` deviations, `ratio` times the median, and
    `floor` times the largest of the first steps. The defaults are for steps that would ruin a run:
    of 87 healthy runs 85 lost no step to them. For smaller spikes: ratio=3, floor=0.
    """

    enabled: bool = True
    watch: Watch = Watch.both
    window: int = bounded(100, min=2)  # steps of the median
    at_least: int = bounded(30, min=2)  # steps before anything is judged; at most `window`
    threshold: float = bounded(20.0, above=0)  # in 1.48 times the median distance to the median
    ratio: float = bounded(20.0, min=1)  # times the median
    floor: float = bounded(20.0, min=0)  # times the largest of the first `at_least` steps; 0: off

    def __post_init__(self) -> None:
        check_bounds(self, "stability.spike")
        if self.at_least > self.window:
            raise ConfigError(
                "stability.spike.at_least",
                f"must be ≤ stability.spike.window={self.window}, got {self.at_least}",
            )


@dataclass
class RecoveryRule:
    """A row of the recovery table; the first that fits counts."""

    kind: BadStepKind = BadStepKind.any
    in_a_row: int = bounded(1, min=1)  # bad steps, of any kind, from which on it fits
    action: Action = Action.skip
    factor: float = bounded(0.5, above=0, max=1)  # of lower_lr, lower_scale, rollback
    for_steps: int = bounded(100, min=1)  # lower_lr: then the rate is as before
    at_most: int | None = bounded(None, min=0)  # times in a run

    def __post_init__(self) -> None:
        key = "stability.recovery"
        check_bounds(self, key)
        if self.action is Action.accept and self.kind is not BadStepKind.spike:
            raise ConfigError(key, f"accept is for kind: spike, got {self.kind.name}")
        scaled = self.kind in (BadStepKind.overflow, BadStepKind.any)
        if self.action is Action.lower_scale and not scaled:
            raise ConfigError(key, f"lower_scale is for kind: overflow, got {self.kind.name}")


@dataclass
class WatchConfig:
    """The machine's memory, disk and GPU, looked at while a run trains; 20 µs a report."""

    enabled: bool = True
    # share of the memory, above which the run is saved and stops; null: never
    stop_above: float | None = bounded(0.95, above=0, max=1)
    disk_min_mb: float = bounded(512.0, min=0)  # free space of the disk, below which it warns
    swap_mb: float = bounded(256.0, min=0)  # more swap than at the start, above which it warns
    gpu_temperature: float = bounded(87.0, min=0)  # °C; most GPUs slow down at 83 to 90
    gpu: bool | None = None  # NVML's readings; None: where nvidia-ml-py and a GPU are there
    leaks: bool = True  # whether memory grows without end
    leak_mb: float = bounded(8.0, min=0)  # growth that is too little to be called a leak

    def __post_init__(self) -> None:
        check_bounds(self, "stability.watch")


@dataclass
class StabilityConfig:
    """Guard, clipping and recovery."""

    clip_norm: float | None = 1.0  # largest gradient norm; None: no clipping
    clip_value: float | None = bounded(None, above=0)  # of a single weight, before clip_norm
    clip_adaptive: float | None = bounded(None, above=0)  # AGC: as a share of each unit's weights
    clip_per_group: bool = False  # clip_norm is for each parameter group of the optimizer by itself
    guard: bool = True  # skip steps that are not finite, or a spike; without, nothing below counts
    spike: SpikeConfig = field(default_factory=SpikeConfig)
    recovery: list[RecoveryRule] = field(  # remedies of bad steps
        default_factory=lambda: [RecoveryRule(), RecoveryRule(action=Action.rollback)]
    )
    max_consecutive_skips: int = bounded(10, min=0)  # beyond, rows that skip or lower fit no more
    max_rollbacks: int = bounded(2, min=0)  # beyond, rows that roll back fit no more
    watch: WatchConfig = field(default_factory=WatchConfig)

    def __post_init__(self) -> None:
        check_bounds(self, "stability")
        if self.clip_norm is not None and not self.clip_norm > 0:  # Inf: measured, not clipped
            raise ConfigError("stability.clip_norm", f"must be > 0 or null, got {self.clip_norm}")
        if self.clip_per_group and self.clip_norm is None:
            raise ConfigError("stability.clip_per_group", "needs stability.clip_norm")
