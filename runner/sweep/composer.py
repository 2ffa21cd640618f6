"""Each job's config, composed once: some 0.2 s, and sweepers do it first to see that it can be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig


class Composer:
    """Stands in for the method of Hydra's loader that sweepers call, and keeps what they got."""

    def __init__(self, loader: Any) -> None:
        self.compose = loader.load_sweep_config
        self.kept: dict[tuple[str, ...], DictConfig] = {}
        loader.load_sweep_config = self.ahead

    def ahead(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """A sweeper's question."""
        found: DictConfig = self.compose(master_config, sweep_overrides)
        self.kept[tuple(sweep_overrides)] = found
        return found

    def take(self, config: DictConfig, overrides: Sequence[str]) -> DictConfig:
        """The config of the job that is to be run now."""
        found = self.kept.pop(tuple(overrides), None)
        if found is None:
            found = self.compose(config, list(overrides))
        return found
