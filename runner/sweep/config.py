"""How a sweep goes on where it was left: the `sweep` group. How its jobs run: hydra/launcher."""

from __future__ import annotations

import math
from dataclasses import dataclass

from runner.count_limits import check_counts
from runner.errors import ConfigError


@dataclass
class SweepConfig:
    """What is done with jobs of an earlier sweep."""

    resume: str = "auto"  # the newest sweep of the same command; none: afresh; or a sweep's folder


@dataclass
class LauncherConfig:
    """`hydra/launcher=isolated`: a fresh process for each job."""

    _target_: str = "hydra_plugins.runner_isolated.launcher.IsolatedLauncher"
    jobs: int = 1  # at a time
    timeout_s: float | None = None  # for one job
    retries: int = 0  # of a job that failed, was killed or timed out
    fail_fast: bool = False  # the first failure ends the sweep

    def __post_init__(self) -> None:
        check_counts({"hydra": {"launcher": vars(self)}})
        if self.jobs < 1:
            raise ConfigError("hydra.launcher.jobs", f"{self.jobs} is too few", "use 1 or more")
        if self.retries < 0:
            raise ConfigError("hydra.launcher.retries", f"{self.retries} is too few", "use 0")
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            raise ConfigError(
                "hydra.launcher.timeout_s", f"{self.timeout_s} is no time", "use null for none"
            )
