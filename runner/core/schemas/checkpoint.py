"""The `checkpoint` config group."""

from __future__ import annotations

from dataclasses import dataclass

from runner.core.bounds import bounded, check_bounds


@dataclass
class CheckpointConfig:
    """When to save, how many to keep, and what to continue from."""

    enabled: bool = True  # save checkpoints; false: keep one in memory, for rollbacks
    every: int | None = bounded(None, min=1)  # steps between saves; null: at each validation
    keep: int = bounded(3, min=1)  # newest checkpoints to keep, besides the best one
    grace_s: float = bounded(20.0, above=0)  # seconds for the step to end after a signal, then exit
    resume: str = "none"  # none, auto (the unfinished run of this config), or a run or step folder

    def __post_init__(self) -> None:
        check_bounds(self, "checkpoint")
