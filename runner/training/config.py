"""What can be asked of the loop: the `training` group."""

from __future__ import annotations

from dataclasses import dataclass

from runner.bounds import bounded, check_bounds
from runner.errors import ConfigError


@dataclass
class TrainingConfig:
    """How long to train, in what portions, and how often to look at the validation set."""

    steps: int | None = bounded(None, min=1)  # batches tried; None: see epochs
    epochs: float | None = bounded(None, above=0)  # None with steps None: the data's own suggestion
    batch_size: int = bounded(32, min=1)  # samples per update
    micro_batch: int | None = bounded(None, min=1)  # samples per backward of one process
    validate_every: int | None = bounded(None, min=1)  # steps; None: each epoch, five at least
    patience: int | None = bounded(None, min=1)  # validations without improvement, then stop
    monitor: str | None = None  # metric that decides `best`; None: the objective's own

    def __post_init__(self) -> None:
        check_bounds(self, "training")
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(
                "training.steps", "is given together with training.epochs", "name one"
            )
        if self.micro_batch is not None and self.micro_batch > self.batch_size:
            raise ConfigError(
                "training.micro_batch",
                f"must be ≤ training.batch_size={self.batch_size}, got {self.micro_batch}",
            )
