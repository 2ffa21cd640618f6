"""How a sweep continues where it was left: the `sweep` group. How its jobs run: hydra/launcher."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from runner.bounds import bounded, check_bounds
from runner.count_limits import check_counts


class StartMethod(Enum):
    """How the process of a job starts."""

    fork = "fork"  # from one that has imported torch and the runner; Linux, elsewhere as spawn
    spawn = "spawn"  # a new interpreter


@dataclass
class SweepConfig:
    """What is done with jobs of an earlier sweep."""

    resume: str = "auto"  # the newest sweep of the same command; none: afresh; or a sweep's folder
    start: StartMethod = StartMethod.fork


@dataclass
class LauncherConfig:
    """`hydra/launcher=isolated`: a fresh process for each job."""

    _target_: str = "hydra_plugins.runner_isolated.launcher.IsolatedLauncher"
    jobs: int = bounded(1, min=1)  # at a time
    timeout_s: float | None = bounded(None, above=0)  # for one job
    retries: int = bounded(0, min=0)  # of a job that failed, was killed or timed out
    fail_fast: bool = False  # the first failure ends the sweep

    def __post_init__(self) -> None:
        check_counts({"hydra": {"launcher": vars(self)}})
        check_bounds(self, "hydra.launcher")
