"""Variants of a config: without techniques, with some of them, or without side effects."""

from __future__ import annotations

from collections.abc import Collection
from copy import copy, deepcopy

from runner.core.config.run_config import RunConfig
from runner.core.schemas.debug import DebugConfig
from runner.core.schemas.optimization import Optimization


def without_techniques(config: RunConfig) -> RunConfig:
    """Return the config with all techniques off: `optimization=none`."""
    config = copy(config)
    config.optimization = Optimization(level="none")
    return config


def keep_techniques(config: RunConfig, names: Collection[str]) -> RunConfig:
    """Return the config with only these techniques enabled."""
    config = deepcopy(config)
    for name, technique in config.optimization.techniques():
        technique.enabled = technique.enabled and name in names
    extra = config.optimization.extra
    config.optimization.extra = [one for one in extra if one.rpartition(".")[2] in names]
    config.optimization.strict = False
    return config


def without_side_effects(config: RunConfig) -> RunConfig:
    """Return the config with progress, checkpoints and debug tools off."""
    config = deepcopy(config)
    config.monitoring.progress = config.checkpoint.enabled = False
    config.debug = DebugConfig()
    config.optimization.measure = False  # use all requested techniques, as when it was measured
    if config.checkpoint.resume == "auto":
        config.checkpoint.resume = "none"
    return config


def with_micro_batch(config: RunConfig, micro_batch: int | None) -> RunConfig:
    """Return the config with that micro-batch size; None: unchanged."""
    config = deepcopy(config)
    if micro_batch is not None:
        config.training.micro_batch = micro_batch
    return config
