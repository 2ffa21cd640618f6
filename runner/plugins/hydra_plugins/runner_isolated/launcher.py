"""hydra/launcher=isolated: a fresh process for each job. All it does is in `runner.sweep`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

from hydra.plugins.launcher import Launcher

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig


@final
class IsolatedLauncher(Launcher):
    """Hydra looks at this at every start, so what it needs is imported when it is used."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep what jobs are composed with; their task is a process's, not this function.

        Hydra's sweeper would compose all jobs once more, to check them, before the first begins.
        """
        from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

        sweeper: Any = BasicSweeper
        sweeper.validate_batch_is_legal = _is_checked_when_composed
        self.compose, self.config = hydra_context.config_loader.load_sweep_config, config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run the jobs, those that are not done yet, and say what each came to."""
        from runner.sweep.config import LauncherConfig
        from runner.sweep.launch import launch

        settings = LauncherConfig(**self.settings)
        return launch(self.config, self.compose, settings, job_overrides, initial_job_idx)


def _is_checked_when_composed(sweeper: object, batch: Any) -> None:
    """For this launcher: `runner.sweep.launch` says of each job why it cannot be composed."""
