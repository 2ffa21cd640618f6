"""What can be asked of the update: the `optimizer`, `schedule` and `stability` groups."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from runner.errors import ConfigError


@dataclass
class OptimizerConfig:
    """Any class of torch.optim by its name; decay is kept off norms and biases."""

    name: str = "AdamW"
    lr: float = 1e-3
    weight_decay: float = 0.01
    options: dict[str, Any] = field(default_factory=dict)  # further constructor arguments
    ema: float | None = None  # decay of an exponential moving average of the weights
    _target_: str | None = None  # a class of the user's own, in place of `name`

    def __post_init__(self) -> None:
        if not 0 <= self.lr < math.inf:
            raise ConfigError("optimizer.lr", f"{self.lr} is no rate", "use 0 or more")
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError(
                "optimizer.weight_decay", f"{self.weight_decay} is no decay", "use 0 or more"
            )
        if self.ema is not None and not 0 < self.ema < 1:
            raise ConfigError("optimizer.ema", f"{self.ema} is no decay", "use e.g. 0.999")


class ScheduleKind(Enum):
    """The shape of the learning rate over the run."""

    constant = "constant"
    cosine = "cosine"
    linear = "linear"
    step = "step"
    onecycle = "onecycle"


@dataclass
class ScheduleConfig:
    """Learning rate as a function of the updates done; the optimizer's `lr` is the peak."""

    kind: ScheduleKind = ScheduleKind.constant
    warmup: float = 0.0  # updates if 1 or more, else a share of the run
    floor: float = 0.0  # the last learning rate, as a share of the peak (cosine, linear)
    every: float = 0.33  # step: updates between drops if 1 or more, else a share of the run
    gamma: float = 0.1  # step: the factor at each drop

    def __post_init__(self) -> None:
        if not 0 <= self.warmup < math.inf:  # NaN is neither
            raise ConfigError("schedule.warmup", f"{self.warmup} is no count", "use 0 or more")
        if not 0 <= self.floor <= 1:
            raise ConfigError("schedule.floor", f"{self.floor} is not a share", "use 0 to 1")
        if not 0 < self.every < math.inf:
            raise ConfigError("schedule.every", f"{self.every} never comes", "use more than 0")
