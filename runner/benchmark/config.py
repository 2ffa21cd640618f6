"""The `benchmark` config group: what job=benchmark measures, for how long, how precisely."""

from __future__ import annotations

from dataclasses import dataclass, field

from runner.bounds import bounded, check_bounds

LEVELS = ("none", "basic", "advanced", "ultra")


@dataclass
class BenchmarkConfig:
    """Settings of job=benchmark: arms, budget, and what to measure besides speed."""

    arms: list[str] = field(default_factory=lambda: list(LEVELS))
    reference: str | None = None  # the arm that the others are compared with; None: the first
    # of measuring and of starting arms again; the first start, compiling and parity on top
    budget_s: float = bounded(120.0, above=0)
    processes: int = bounded(5, min=1)  # of each arm, one after another, if the budget allows three
    narrow: float = bounded(0.02, above=0)  # a ratio known to within this share is precise enough
    block_s: float = bounded(0.25, above=0)  # of steps, of each arm in each block
    warmup_steps: int = bounded(10, min=1)  # of each arm, before anything counts
    control: bool = True  # the reference a second time: what a difference of nothing looks like
    parity: bool = True  # whether each arm's numbers are right
    timeout_s: float = bounded(900.0, above=0)  # for an arm to make its first steps
    attribute: bool = False  # what each technique of the last arm's level is worth
    attribute_budget_s: float = bounded(300.0, above=0)
    baseline: str | None = None  # a stored result to compare this one with
    tolerance: float = bounded(0.05, min=0)  # against a stored result: what is no regression yet
    claims: bool = False  # what people say about techniques, each measured here

    def __post_init__(self) -> None:
        check_bounds(self, "benchmark")
