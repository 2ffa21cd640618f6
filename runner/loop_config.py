"""What can be asked of the loop: the `training` group."""

from __future__ import annotations

import math
from dataclasses import dataclass

from runner.errors import ConfigError


@dataclass
class TrainingConfig:
    """How long to train, in what portions, and how often to look at the validation set."""

    steps: int | None = None  # batches tried; None: see epochs
    epochs: float | None = None  # None with steps None: the data's own suggestion
    batch_size: int = 32  # samples per update
    micro_batch: int | None = None  # samples per backward; None: the accumulation technique decides
    validate_every: int | None = None  # steps; None: once an epoch, at least five times a run
    patience: int | None = None  # validations without improvement before stopping early
    monitor: str | None = None  # metric that decides `best`; None: the objective's own

    def __post_init__(self) -> None:
        for key in ("steps", "epochs", "batch_size", "micro_batch", "validate_every", "patience"):
            value = getattr(self, key)
            if value is not None and not 0 < value < math.inf:  # NaN is neither
                fix = "use more than 0; 0.5 is half of one" if key == "epochs" else "use 1 or more"
                raise ConfigError(f"training.{key}", f"{value} is not positive", fix)
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(
                "training.steps", "is given together with training.epochs", "name one"
            )
        if self.micro_batch is not None and self.micro_batch > self.batch_size:
            raise ConfigError(
                "training.micro_batch",
                f"{self.micro_batch} is more than training.batch_size={self.batch_size}",
                "use a part of it",
            )
