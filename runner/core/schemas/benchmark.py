"""The `benchmark` config group: what job=benchmark measures, for how long, how precisely."""

from __future__ import annotations

from dataclasses import dataclass, field

from runner.core.bounds import bounded, check_bounds

LEVELS = ("none", "basic", "advanced", "ultra")


@dataclass
class BenchmarkConfig:
    """Settings of job=benchmark: arms, budget, and what to measure besides speed."""

    arms: list[str] = field(default_factory=lambda: list(LEVELS))  # levels or overrides to compare
    reference: str | None = None  # arm that the others are compared with; null: the first
    # seconds to measure and relaunch; the first start, compiling and parity are extra
    budget_s: float = bounded(120.0, above=0)
    processes: int = bounded(5, min=1)  # successive processes per arm; 1 if three exceed the budget
    narrow: float = bounded(0.02, above=0)  # stop once ratios are known to within this share
    block_s: float = bounded(0.25, above=0)  # seconds of steps per arm in each block
    warmup_steps: int = bounded(10, min=1)  # untimed steps at each start of an arm
    control: bool = True  # measure the reference twice, for the noise floor
    parity: bool = True  # check each arm's numerical results
    timeout_s: float = bounded(900.0, above=0)  # seconds to start an arm, and to check its parity
    attribute: bool = False  # measure the gain of each technique of the last arm's level
    attribute_budget_s: float = bounded(300.0, above=0)  # seconds for `attribute`
    baseline: str | None = None  # earlier benchmark.json or its folder to compare with; null: none
    tolerance: float = bounded(0.05, min=0)  # smaller relative changes are no regression

    def __post_init__(self) -> None:
        check_bounds(self, "benchmark")
