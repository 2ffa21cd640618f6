"""What job=benchmark measures, for how long, and when it is content: the `benchmark` group."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from runner.errors import ConfigError

LEVELS = ("none", "basic", "advanced", "ultra")


@dataclass
class BenchmarkConfig:
    """Arms, budget, and what is found out besides speed."""

    arms: list[str] = field(default_factory=lambda: list(LEVELS))
    reference: str | None = None  # the arm that the others are held against; None: the first
    budget_s: float = 120.0  # of measuring; starting, compiling and parity come on top
    narrow: float = 0.02  # a ratio known to within this share is known well enough
    block_s: float = 0.25  # of steps, of each arm in each block
    warmup_steps: int = 10  # of each arm, before anything counts
    control: bool = True  # the reference a second time: what a difference of nothing looks like
    parity: bool = True  # whether each arm's numbers are right
    timeout_s: float = 900.0  # for an arm to build, compile and make its first steps
    target_loss: float | None = None  # also: seconds of steps until the training loss is below
    metrics: list[str] = field(default_factory=list)  # your own: functions of the finished run
    attribute: bool = False  # what each technique of the last arm's level is worth
    attribute_budget_s: float = 300.0
    baseline: str | None = None  # a stored result to hold this one against
    tolerance: float = 0.05  # against a stored result: what is no regression yet
    claims: bool = False  # what people say about techniques, each measured here

    def __post_init__(self) -> None:
        for key in ("budget_s", "narrow", "block_s", "timeout_s", "attribute_budget_s"):
            value = getattr(self, key)
            if not 0 < value < math.inf:
                raise ConfigError(f"benchmark.{key}", f"{value} is not possible", "use more than 0")
        if self.warmup_steps < 1:
            raise ConfigError(
                "benchmark.warmup_steps", f"{self.warmup_steps} is too few", "use 1 or more"
            )
        if not 0 <= self.tolerance < math.inf:
            raise ConfigError("benchmark.tolerance", f"{self.tolerance} is no share", "use 0.05")
