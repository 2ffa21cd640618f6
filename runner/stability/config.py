"""What can be asked of the guards: the `stability` group."""

from __future__ import annotations

from dataclasses import dataclass

from runner.errors import ConfigError


@dataclass
class StabilityConfig:
    """What keeps a bad step from ruining the run."""

    clip_norm: float | None = 1.0  # largest gradient norm; None: no clipping
    guard: bool = True  # skip steps whose loss or gradients are not finite
    max_consecutive_skips: int = 10  # then roll back to the last good checkpoint
    max_rollbacks: int = 2  # then give up, exit code 4
    backoff: float = 0.5  # the learning rate's factor at each roll-back

    def __post_init__(self) -> None:
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError("stability.clip_norm", "would stop learning", "use > 0 or null")
        if self.max_consecutive_skips < 0:
            raise ConfigError("stability.max_consecutive_skips", "is negative", "use 0 or more")
        if self.max_rollbacks < 0:
            raise ConfigError("stability.max_rollbacks", "is negative", "use 0 or more")
        if not 0 < self.backoff <= 1:
            raise ConfigError("stability.backoff", f"{self.backoff} is not a share", "0 to 1")
