"""The `training` and `checkpoint` config groups."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from runner.core.bounds import Bounded, bounded
from runner.core.errors import ConfigError

MICRO_BATCH = "training.micro_batch"  # the key of choices


class MonitorMode(Enum):
    """Which values of the monitored metric are better."""

    min = "min"  # lower ones
    max = "max"  # higher ones


@dataclass
class TrainingConfig(Bounded, key="training"):
    """Length of the training, batch size, validation and early stopping."""

    steps: int | None = bounded(None, min=1)  # training steps, skipped ones included; null: epochs
    # instead of steps; both null: data.default_steps or data.default_epochs
    epochs: float | None = bounded(None, above=0)
    batch_size: int = bounded(32, min=1)  # samples per update, over all processes
    # samples per backward pass of a process; null: the whole batch, or chosen by accumulation
    micro_batch: int | None = bounded(None, min=1)
    # steps; null: each epoch, at least 5 times; 0: no validation, the last weights are the result
    validate_every: int | None = bounded(None, min=0)
    # stop after this many validations without improvement of `monitor`; null: never
    patience: int | None = bounded(None, min=1)
    monitor: str | None = None  # metric of the best checkpoint, e.g. val/loss; null: objective's
    # whether lower or higher values of `monitor` are better; null: as the metric declares
    monitor_mode: MonitorMode | None = None
    sanity: bool = True  # validate one batch before step 1, without a trace; not when resuming

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None and self.epochs is not None:
            raise ConfigError("training.steps", "and training.epochs are both given", "name one")
        if self.micro_batch is not None and self.micro_batch > self.batch_size:
            problem = f"must be ≤ training.batch_size={self.batch_size}, got {self.micro_batch}"
            raise ConfigError("training.micro_batch", problem)
        for key in ("patience", "monitor", "monitor_mode"):
            if self.validate_every == 0 and getattr(self, key) is not None:
                problem = "needs validations, and training.validate_every=0 has none"
                raise ConfigError(f"training.{key}", problem, "leave one of them out")
        if (self.monitor or "").startswith("user/") and self.monitor_mode is None:
            fix = "use min if lower values are better, max if higher ones"
            raise ConfigError("training.monitor_mode", f"must be set for {self.monitor}", fix)


@dataclass
class CheckpointConfig(Bounded, key="checkpoint"):
    """When to save, how many to keep, and what to continue from."""

    enabled: bool = True  # save checkpoints; false: keep one in memory, for rollbacks
    every: int | None = bounded(None, min=1)  # steps between saves; null: at each validation
    keep: int = bounded(3, min=1)  # newest checkpoints to keep, besides the best one
    grace_s: float = bounded(20.0, above=0)  # seconds for the step to end after a signal, then exit
    resume: str = "none"  # none, auto (the unfinished run of this config), or a run or step folder
