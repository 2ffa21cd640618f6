"""Hydra plugins for sweeps. Hydra imports this module at every start, so `runner.scale.sweep`,
which does the work, is imported only when a sweep runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig


@final
class IsolatedLauncher(Launcher):
    """hydra/launcher=isolated: a fresh process for each job."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Store what composes jobs. Each job runs in its own process, not by `task_function`."""
        self.compose, self.config = hydra_context.config_loader.load_sweep_config, config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run the jobs that are not done yet; return the results of all jobs."""
        from runner.core.schemas.sweep import LauncherConfig
        from runner.scale.sweep.launch import launch_jobs

        settings = LauncherConfig(**self.settings)
        return launch_jobs(self.config, self.compose, settings, job_overrides, initial_job_idx)


@final
class JobSweeper(BasicSweeper):
    """hydra/sweeper=jobs: Hydra's basic sweeper, without its check that composes all jobs first."""

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """No-op: the launcher checks each job when it composes it."""


@final
class SearchSweeper(Sweeper):
    """hydra/sweeper=search: a search of hyper-parameters."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Store what composes trials. Each one runs in its own process, not by `task_function`."""
        self.compose, self.composed = hydra_context.config_loader.load_sweep_config, config

    def sweep(self, arguments: list[str]) -> None:
        """Run the trials; the search space was read when the command was checked."""
        from runner.scale.sweep.search import run_search

        run_search(self.composed, self.compose)
