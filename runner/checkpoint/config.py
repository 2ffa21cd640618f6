"""The `checkpoint` group."""

from __future__ import annotations

from dataclasses import dataclass

from runner.bounds import bounded, check_bounds


@dataclass
class CheckpointConfig:
    """When to save, how many to keep, and what to continue from."""

    enabled: bool = True
    every: int | None = bounded(None, min=1)  # steps; None: at each validation
    keep: int = bounded(3, min=1)  # newest ones kept, besides the best
    grace_s: float = bounded(20.0, above=0)  # for a step to end after a signal; then it is left
    resume: str = "none"  # none | auto | a run's folder or one of its step folders

    def __post_init__(self) -> None:
        check_bounds(self, "checkpoint")
