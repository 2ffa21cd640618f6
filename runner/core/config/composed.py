"""The config of a run that is built from Python, recorded as the command line records it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from runner.core.config.run_config import RunConfig, flatten_config
from runner.core.record import hydra_files
from runner.core.record.text import value_for_hydra
from runner.core.security.secrets import mask_hydra_files

log = logging.getLogger("runner")

ATTRIBUTE = "composed"  # of a RunConfig that `compose` made; no field, so no part of its values
CLASS_KEYS = ("kind", "_target_")


def remember(config: RunConfig, overrides: list[str]) -> RunConfig:
    """Keep with a config what it was composed of, and its values; return it."""
    vars(config)[ATTRIBUTE] = (overrides, flatten_config(config))
    return config


def record_config(config: RunConfig, folder: Path) -> None:
    """Write `.hydra` into a run's folder, so that it is loaded and resumed without typing it again.

    Values that were changed since `compose` are recorded as further overrides. Nothing is written
    for a config of the command line, which Hydra has recorded, or of another origin.
    """
    if ATTRIBUTE not in vars(config):
        return
    overrides, before = vars(config)[ATTRIBUTE]
    now = flatten_config(config)
    changed = {k: v for k, v in now.items() if k not in before or before[k] != v}
    lost = [key for key, value in before.items() if key not in now and value != {}]
    if lost or any(key.rpartition(".")[2] in CLASS_KEYS for key in changed):
        log.info("the config is not recorded: an object of another class is in it")
        return
    changes = [_as_override(key, value, key in before) for key, value in changed.items()]
    is_resumed = (folder / hydra_files.FOLDER).is_dir()  # it is replaced when training continues
    target = folder / (hydra_files.RESUMED if is_resumed else hydra_files.FOLDER)
    runtime = {"hydra": {"runtime": {"cwd": os.getcwd()}}}
    files = {
        "config.yaml": OmegaConf.structured(config),
        "hydra.yaml": OmegaConf.create(runtime),
        "overrides.yaml": OmegaConf.create([*overrides, *changes]),
    }
    for name, content in files.items():
        hydra_files.save_config(content, name, target)
    mask_hydra_files(target)


def _as_override(key: str, value: Any, exists: bool) -> str:
    return f"{'' if exists else '++'}{key}={value_for_hydra(value)}"
