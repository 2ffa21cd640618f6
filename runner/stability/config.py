"""What can be asked of the guards: the `stability` group."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from runner.errors import ConfigError


class Watch(Enum):
    """Where spikes are looked for."""

    loss = "loss"
    grad_norm = "grad_norm"
    both = "both"


class Method(Enum):
    """How it is known what is normal."""

    median = "median"  # of a window, and the median distance to it: hardly moved by a few values
    ema = "ema"  # exponential moving averages, over about `window` steps


class Kind(Enum):
    """What can be wrong with the numbers of a step."""

    any = "any"  # of those below
    non_finite = "non_finite"  # the loss, or a gradient without a loss scale
    overflow = "overflow"  # of a gradient times the loss scale of fp16
    spike = "spike"  # finite, and far above what is normal
    weights = "weights"  # they are not finite themselves
    buffers = "buffers"  # such as BatchNorm's statistics; loss and gradients are finite


class Action(Enum):
    """What can be done about it; the update of a bad step is never made."""

    skip = "skip"  # and nothing else
    lower_lr = "lower_lr"  # times `factor`, for `for_steps` steps
    lower_scale = "lower_scale"  # the loss scale of fp16, times `factor`
    rollback = "rollback"  # to the last good checkpoint, with the rate times `factor` from there on
    accept = "accept"  # it is the new normal: what a spike is, is learned anew
    stop = "stop"  # save a checkpoint and give up, exit code 4


@dataclass
class SpikeConfig:
    """What counts as a spike: a loss or a gradient norm far above what it usually is.

    A number is one when it is above three things: what is usual plus `threshold` deviations,
    `ratio` times what is usual, and `floor` times the largest of the first steps. The defaults
    are for steps that would ruin a run: of 87 healthy ones (digits, cancer, text; 11 optimizers;
    batches of 1 to 32; rates up to 30 times the usual) 85 lost no step, one with batches of one
    sample lost 1, and Rprop, which is not for mini-batches, 32. For smaller ones: ratio=3, floor=0.
    """

    enabled: bool = True
    watch: Watch = Watch.both
    method: Method = Method.median
    window: int = 100  # steps that say what is usual
    at_least: int = 30  # steps before anything is judged
    threshold: float = 20.0  # deviations: 1.48 times the median distance to the median
    ratio: float = 20.0  # times what is usual
    floor: float = 20.0  # times the largest of the first `at_least` steps; 0: no such thing

    def __post_init__(self) -> None:
        key = "stability.spike"
        if self.window < 2:
            raise ConfigError(f"{key}.window", f"{self.window} is no window", "use e.g. 100")
        if not 2 <= self.at_least <= self.window:
            raise ConfigError(
                f"{key}.at_least",
                f"{self.at_least} values do not say what is usual, or are more than the window",
                f"use 2 to {key}.window={self.window}",
            )
        if not 0 < self.threshold < math.inf:  # NaN is neither
            raise ConfigError(f"{key}.threshold", f"{self.threshold} is no distance", "use e.g. 20")
        if not 1 <= self.ratio < math.inf:
            raise ConfigError(f"{key}.ratio", f"{self.ratio} would skip half of all", "use e.g. 20")
        if not 0 <= self.floor < math.inf:
            raise ConfigError(f"{key}.floor", f"{self.floor} is no share", "use 0 or more")


@dataclass
class Rule:
    """A row of the table: what is done about what. Of those that fit, the first counts."""

    kind: Kind = Kind.any
    in_a_row: int = 1  # bad steps, of any kind, from which on it fits
    action: Action = Action.skip
    factor: float = 0.5  # lower_lr, lower_scale, rollback: what is multiplied by
    for_steps: int = 100  # lower_lr: then the rate is as before
    at_most: int | None = None  # times in a run

    def __post_init__(self) -> None:
        key = "stability.recovery"
        if self.in_a_row < 1:
            raise ConfigError(key, f"in_a_row={self.in_a_row} is no count", "use 1 or more")
        if not 0 < self.factor <= 1:
            raise ConfigError(key, f"factor={self.factor} lowers nothing", "use 0 to 1, e.g. 0.5")
        if self.for_steps < 1:
            raise ConfigError(key, f"for_steps={self.for_steps} is no count", "use 1 or more")
        if self.at_most is not None and self.at_most < 0:
            raise ConfigError(key, f"at_most={self.at_most} is negative", "use 0 or more, or null")
        if self.action is Action.accept and self.kind is not Kind.spike:
            raise ConfigError(
                key, f"what is {self.kind.name} can't be accepted", "accept is for kind: spike"
            )
        if self.action is Action.lower_scale and self.kind not in (Kind.overflow, Kind.any):
            raise ConfigError(
                key,
                f"the loss scale is not why {self.kind.name} happens",
                "lower_scale is for kind: overflow",
            )


def _simplest() -> list[Rule]:
    return [Rule(), Rule(action=Action.rollback)]


@dataclass
class WatchConfig:
    """The machine's memory, disk and GPU, looked at while a run trains; 20 µs a report."""

    enabled: bool = True
    stop_above: float | None = 0.95  # share of the memory; above it: save and stop; None: never
    disk_min_mb: float = 512.0  # free space of the run's disk, below which a word is said
    swap_mb: float = 256.0  # more swap in use than at the start, about which a word is said
    gpu_temperature: float = 87.0  # °C; most GPUs slow down at 83 to 90
    gpu: bool | None = None  # NVML's readings; None: where nvidia-ml-py and a GPU are there
    leaks: bool = True  # whether memory grows without end
    leak_mb: float = 8.0  # growth that is too little to be called a leak

    def __post_init__(self) -> None:
        key = "stability.watch"
        if self.stop_above is not None and not 0 < self.stop_above <= 1:
            raise ConfigError(
                f"{key}.stop_above",
                f"{self.stop_above} is not a share of the memory",
                "use 0 to 1, or null to leave it to the kernel",
            )
        for name in ("disk_min_mb", "swap_mb", "gpu_temperature", "leak_mb"):
            if not 0 <= getattr(self, name) < math.inf:  # NaN is neither
                raise ConfigError(f"{key}.{name}", f"{getattr(self, name)} is no size", "use >= 0")


@dataclass
class StabilityConfig:
    """What keeps a bad step from ruining the run."""

    clip_norm: float | None = 1.0  # largest gradient norm; None: no clipping
    clip_value: float | None = None  # largest gradient of a single weight, before clip_norm
    clip_adaptive: float | None = None  # AGC: largest gradient, as a share of each unit's weights
    clip_per_group: bool = False  # clip_norm is for each parameter group of the optimizer by itself
    guard: bool = True  # skip steps that are not finite, or a spike; without, nothing below counts
    spike: SpikeConfig = field(default_factory=SpikeConfig)
    recovery: list[Rule] = field(default_factory=_simplest)  # what is done about a bad step
    max_consecutive_skips: int = 10  # beyond, rows that skip or lower something fit no more
    max_rollbacks: int = 2  # beyond, rows that roll back fit no more
    watch: WatchConfig = field(default_factory=WatchConfig)

    def __post_init__(self) -> None:
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError("stability.clip_norm", "would stop learning", "use > 0 or null")
        for key in ("clip_value", "clip_adaptive"):
            limit = getattr(self, key)
            if limit is not None and not 0 < limit < math.inf:  # NaN is neither
                raise ConfigError(f"stability.{key}", f"{limit} is no limit", "use > 0 or null")
        if self.clip_per_group and self.clip_norm is None:
            raise ConfigError(
                "stability.clip_per_group", "there is no norm to clip to", "set stability.clip_norm"
            )
        if self.max_consecutive_skips < 0:
            raise ConfigError("stability.max_consecutive_skips", "is negative", "use 0 or more")
        if self.max_rollbacks < 0:
            raise ConfigError("stability.max_rollbacks", "is negative", "use 0 or more")
