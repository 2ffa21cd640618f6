"""What can be asked of the update: the `optimizer` and `schedule` groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from runner.bounds import bounded, check_bounds


@dataclass
class OptimizerConfig:
    """Any class of torch.optim by its name; decay is kept off norms and biases."""

    name: str = "AdamW"
    lr: float = bounded(1e-3, min=0)
    weight_decay: float = bounded(0.01, min=0)
    options: dict[str, Any] = field(default_factory=dict)  # further constructor arguments
    ema: float | None = bounded(None, above=0, below=1)  # decay of a running average of the weights
    _target_: str | None = None  # a class of the user's own, in place of `name`

    def __post_init__(self) -> None:
        check_bounds(self, "optimizer")


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
    warmup: float = bounded(0.0, min=0)  # updates if 1 or more, else a share of the run
    floor: float = bounded(0.0, min=0, max=1)  # the last rate as a share of the peak
    every: float = bounded(0.33, above=0)  # step: updates between drops, or a share of the run
    gamma: float = bounded(0.1, above=0)  # step: the factor at each drop

    def __post_init__(self) -> None:
        check_bounds(self, "schedule")
