"""Config of sweeps and searches: the groups `sweep`, `search` and `hydra/launcher`."""

from __future__ import annotations

from dataclasses import dataclass, field
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


class Sampler(Enum):
    """Sampler that proposes the values of the next trial."""

    tpe = "tpe"  # tree-structured Parzen estimator: from the results of earlier trials
    random = "random"
    grid = "grid"  # every combination, in random order


class Pruner(Enum):
    """Rule that ends a trial early, by its metric at the validations so far."""

    none = "none"
    median = "median"  # its best so far is worse than the median of the trials before it
    halving = "halving"  # asynchronous successive halving: the best quarter continues


class Direction(Enum):
    """Whether a higher or a lower metric is better."""

    auto = "auto"  # by the metric's name
    maximize = "maximize"
    minimize = "minimize"


@dataclass
class SearchConfig:
    """`experiment=search`: a search over the keys that are given as intervals or choices."""

    sampler: Sampler = Sampler.tpe
    trials: int = bounded(20, min=1)  # of the study, with those of other processes and before
    parallel: int | None = bounded(None, min=1)  # trials at a time; null: hydra.launcher.jobs
    metric: str | None = None  # null: training.monitor, else the objective's own
    direction: Direction = Direction.auto
    pruner: Pruner = Pruner.median
    startup: int = bounded(5, min=0)  # median: trials that are done before the first is pruned
    warmup: int = bounded(1, min=0)  # validations of each trial before it may be pruned
    storage: str | None = None  # a file to share: *.db, *.journal; null: in the sweep's
    seed: int = bounded(0, min=0)  # of the sampler

    def __post_init__(self) -> None:
        check_bounds(self, "search")


@dataclass
class JobSweeperConfig:
    """`hydra/sweeper=jobs`: Hydra's `basic` for the isolated launcher, which composes each job."""

    _target_: str = "hydra_plugins.runner_plugins.JobSweeper"
    max_batch_size: int | None = None
    params: dict[str, str] | None = None


@dataclass
class SearchSweeperConfig:
    """`hydra/sweeper=search`; its settings are the `search` group."""

    _target_: str = "hydra_plugins.runner_plugins.SearchSweeper"
    params: dict[str, str] = field(default_factory=dict)  # keys to vary, for a recipe


@dataclass
class LauncherConfig:
    """`hydra/launcher=isolated`: a fresh process for each job."""

    _target_: str = "hydra_plugins.runner_plugins.IsolatedLauncher"
    jobs: int = bounded(1, min=1)  # at a time
    timeout_s: float | None = bounded(None, above=0)  # for one job
    retries: int = bounded(0, min=0)  # of a job that failed, was killed or timed out
    fail_fast: bool = False  # the first failure ends the sweep

    def __post_init__(self) -> None:
        check_counts({"hydra": {"launcher": vars(self)}})
        check_bounds(self, "hydra.launcher")
