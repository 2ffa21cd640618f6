"""hydra/sweeper=search: a search of hyper-parameters. All it does is in `runner.sweep.search`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from hydra.plugins.sweeper import Sweeper

if TYPE_CHECKING:
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig


@final
class SearchSweeper(Sweeper):
    """Hydra looks at this at every start, so what it needs is imported when it is used."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep what trials are composed with; their task is a process's, not this function."""
        self.compose, self.composed = hydra_context.config_loader.load_sweep_config, config

    def sweep(self, arguments: list[str]) -> None:
        """Run the trials; which parameters they vary was read when the command was checked."""
        from runner.sweep.search import search

        search(self.composed, self.compose)
