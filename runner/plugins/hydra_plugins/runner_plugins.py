"""Hydra's plugins for sweeps, at which it looks at every start. What they do is in `runner.sweep`,
which is imported when it is used.
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
        """Keep what jobs are composed with; their task is a process's, not this function."""
        self.compose, self.config = hydra_context.config_loader.load_sweep_config, config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run the jobs that are not done yet; returns the result of each."""
        from runner.sweep.config import LauncherConfig
        from runner.sweep.launch import launch

        settings = LauncherConfig(**self.settings)
        return launch(self.config, self.compose, settings, job_overrides, initial_job_idx)


@final
class JobSweeper(BasicSweeper):
    """hydra/sweeper=jobs: Hydra's own, but a job is checked when it is composed for its run."""

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Nothing to do; Hydra's would compose all jobs once more before the first begins."""


@final
class SearchSweeper(Sweeper):
    """hydra/sweeper=search: a search of hyper-parameters."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep what trials are composed with; their task is a process's, not this function."""
        self.compose, self.composed = hydra_context.config_loader.load_sweep_config, config

    def sweep(self, arguments: list[str]) -> None:
        """Run the trials; which parameters they vary was read when the command was checked."""
        from runner.sweep.search import run_search

        run_search(self.composed, self.compose)
