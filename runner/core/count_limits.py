"""Upper limits of counts in a config.

A config from someone else may request any number of threads, processes or tensor elements. The
limits are far above useful values on the largest machines, and the same on every machine, so that a
config that is valid on one is valid on all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.core.errors import ConfigError

MAX_STEPS = 50_000_000  # learning rates are in a table: 32 bytes a step
DEFAULT_LIMIT = 1_000_000_000  # for counts that are only compared
LIMITS = {
    "device.threads": 1024,
    "device.interop_threads": 1024,
    "device.index": 1024,
    "distributed.processes": 1024,
    "data.workers": 256,  # processes
    "data.prefetch": 1024,  # batches per worker
    "data.samples": 100_000_000,
    "data.features": 1_000_000,
    "data.channels": 4096,
    "data.image_size": 16_384,
    "data.classes": 1_000_000,
    "data.vocab": 10_000_000,
    "data.sequence": 10_000_000,
    "data.randaugment": 100,
    "data.cache_mb": 10_000_000,
    "data.default_steps": MAX_STEPS,
    "model.width": 65_536,
    "model.depth": 1024,
    "model.heads": 4096,
    "model.stages": 10,  # each doubles the width
    "model.blocks": 1024,
    "training.steps": MAX_STEPS,
    "training.batch_size": 10_000_000,
    "training.micro_batch": 10_000_000,
    "verify.steps": 100_000,
    "stability.spike.window": 1_000_000,
    "checks.inputs.schema.classes": 1_000_000,
    "checkpoint.keep": 100_000,
    "debug.capture.at_most": 10_000,
    "debug.profile.warmup": 10_000,
    "debug.profile.steps": 10_000,
    "scan.rows": 1_000_000,
    "hydra.launcher.jobs": 256,  # processes
    "hydra.launcher.retries": 1000,
}
SEED_KEYS = ("seed", "data.split_seed")
USER_KEYS = ("arguments", "options", "hooks")  # with keys of the user's code below them


def check_counts(values: Mapping[str, Any], prefix: str = "") -> None:
    """Raise ConfigError for an integer, at any depth, above its key's limit."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and name not in USER_KEYS:
            check_counts(value, f"{key}.")
        for number in value if isinstance(value, list) else [value]:
            check_count(key, number)


def check_count(key: str, value: Any) -> None:
    """Raise ConfigError if `value` is an integer above the limit of `key`."""
    limit = LIMITS.get(key, DEFAULT_LIMIT)
    if isinstance(value, int) and value > limit and key not in SEED_KEYS:
        raise ConfigError(key, f"{value:,} is too many", f"use {limit:,} or less")
