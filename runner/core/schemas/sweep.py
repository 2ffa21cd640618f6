"""The config groups of sweeps: `sweep` (resuming), hydra/launcher (running jobs), and `search`
(hyper-parameter search)."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import Enum

from runner.core.bounds import Bounded, bounded, check_counts
from runner.core.errors import ConfigError

JOB_VARIABLE = "RUNNER_JOB"
"""Set in the environment of a sweep's job, which reads its context from stdin."""


class StartMethod(Enum):
    """How a job's process is started."""

    fork = "fork"  # from a process that has imported torch; Linux only, elsewhere spawn
    spawn = "spawn"  # a new interpreter


@dataclass
class SweepConfig(Bounded, key="sweep"):
    """How a sweep continues an earlier one, and how its jobs start."""

    resume: str = "auto"  # auto: newest sweep of the same command; none: a new one; or a folder
    start: StartMethod = StartMethod.fork  # fork: from a process with torch loaded; spawn: new
    # seconds to measure swept optimization, techniques or debug in turns, after the sweep; null: a
    # fifth of the sweep's time, 10 to 60; 0: off
    benchmark_s: float | None = bounded(None, min=0)


def storage_path(text: str) -> str:
    """Return the file that a text names as a path or a sqlite URL."""
    return os.path.expanduser(text.removeprefix("sqlite:///").removeprefix("file://"))


class Sampler(Enum):
    """The algorithm that proposes the next trial's values."""

    tpe = "tpe"  # tree-structured Parzen estimator: from the results of earlier trials
    random = "random"
    grid = "grid"  # every combination, in random order


class Pruner(Enum):
    """The rule that ends a trial early, by its metric at validations."""

    none = "none"
    median = "median"  # its best so far is worse than the median of the trials before it
    halving = "halving"  # asynchronous successive halving: the best quarter continues


class Direction(Enum):
    """Whether the metric is to be maximised or minimised."""

    auto = "auto"  # training.monitor_mode, or by the metric's name
    maximize = "maximize"
    minimize = "minimize"


@dataclass
class SearchConfig(Bounded, key="search"):
    """`experiment=search`: a search over the keys given as intervals or choices."""

    sampler: Sampler = Sampler.tpe  # tpe: from earlier results; grid: every combination
    trials: int = bounded(20, min=1)  # total of the study, earlier and other processes included
    parallel: int | None = bounded(None, min=1)  # trials at a time; null: hydra.launcher.jobs
    metric: str | None = None  # metric to optimise; null: training.monitor or the objective's
    direction: Direction = Direction.auto  # auto: training.monitor_mode, or by the metric's name
    # ends trials early; median: worse than earlier trials; halving: not in the best quarter
    pruner: Pruner = Pruner.median
    startup: int = bounded(5, min=0)  # median: completed trials before the first may be pruned
    warmup: int = bounded(1, min=0)  # validations of a trial before it may be pruned
    # shared file, *.db or *.journal, or its sqlite URL; null: search.db in the sweep's
    storage: str | None = None
    seed: int = bounded(0, min=0)  # seed of the sampler

    def __post_init__(self) -> None:
        super().__post_init__()
        path = None if self.storage is None else storage_path(self.storage)
        if path and ("://" in path or set("?{}") & set(path)) or path == "" != self.storage:
            problem = f"must be a file, got {self.storage!r}"
            raise ConfigError("search.storage", problem, "use a path, such as outputs/study.db")


@dataclass
class JobSweeperConfig:
    """`hydra/sweeper=jobs`: like Hydra's `basic`, for a launcher that composes each job."""

    _target_: str = "hydra_plugins.runner_plugins.JobSweeper"
    max_batch_size: int | None = None
    params: dict[str, str] | None = None


@dataclass
class SearchSweeperConfig:
    """`hydra/sweeper=search`; its settings are the `search` group."""

    _target_: str = "hydra_plugins.runner_plugins.SearchSweeper"
    params: dict[str, str] = field(default_factory=dict)  # keys to vary, for a recipe


@dataclass
class LauncherConfig(Bounded, key="hydra.launcher"):
    """`hydra/launcher=isolated`: a new process for each job."""

    _target_: str = "hydra_plugins.runner_plugins.IsolatedLauncher"  # set by the option
    jobs: int = bounded(1, min=1)  # jobs at a time; if several, they take the GPUs in turn
    timeout_s: float | None = bounded(None, above=0)  # seconds per job; null: no limit
    retries: int = bounded(0, min=0)  # retries of a job that failed, was killed or timed out
    fail_fast: bool = False  # end the sweep, and its running jobs, at the first failure

    def __post_init__(self) -> None:
        check_counts({"hydra": {"launcher": vars(self)}})
        super().__post_init__()
