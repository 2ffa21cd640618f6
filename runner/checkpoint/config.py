"""What can be asked of checkpoints: the `checkpoint` group."""

from __future__ import annotations

from dataclasses import dataclass

from runner.errors import ConfigError


@dataclass
class CheckpointConfig:
    """When to save, how many to keep, and what to continue from."""

    enabled: bool = True
    every: int | None = None  # steps; None: at each validation
    keep: int = 3  # newest ones kept, besides the best
    resume: str = "none"  # none | auto | a run's folder or one of its step folders

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise ConfigError("checkpoint.every", f"{self.every} is not a count", "use 1 or more")
        if self.keep < 1:
            raise ConfigError(
                "checkpoint.keep", "would keep nothing to resume from", "use 1 or more"
            )
