"""A sweeper that learns: what it is told of one round decides the next."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig


@dataclass
class Settings:
    _target_: str = "hydra_plugins.two_rounds.sweeper.TwoRounds"


ConfigStore.instance().store(group="hydra/sweeper", name="two_rounds", node=Settings)


class TwoRounds(Sweeper):
    def setup(self, *, hydra_context: Any, task_function: Any, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        (first,) = self.launcher.launch([[*arguments, "seed=0"]], initial_job_idx=0)
        seen = [f"{first.return_value:.9f}"]
        (second,) = self.launcher.launch([[*arguments, "+model.how=fail"]], initial_job_idx=1)
        try:
            seen.append(str(second.return_value))
        except Exception as error:
            seen.append(f"learned: {error}")
        Path(self.config.hydra.sweep.dir, "seen.txt").write_text("\n".join(seen))
