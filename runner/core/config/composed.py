"""The config of a run that is built from Python, recorded as the command line records it."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from runner.core.config.run_config import RunConfig, flatten_config
from runner.core.config.spelling import parse_override
from runner.core.errors import StorageError
from runner.core.record import hydra_files
from runner.core.record.storage import remove_folder
from runner.core.record.text import value_for_hydra
from runner.core.security.secrets import mask_hydra_files

log = logging.getLogger("runner")

ATTRIBUTE = "composed"  # of a RunConfig that `compose` made; no field, so no part of its values
CLASS_KEYS = ("kind", "_target_")


def remember(config: RunConfig, overrides: list[str]) -> RunConfig:
    """Keep with a config what it was composed of, and its values; return it."""
    vars(config)[ATTRIBUTE] = (overrides, flatten_config(config))
    return config


def record_config(
    config: RunConfig, folder: Path, objects: Sequence[str], has_checkpoints: bool
) -> None:
    """Write `.hydra` into a run's folder, so that it is loaded and resumed without typing it again.

    Values that were changed since `compose` are recorded as further overrides. Nothing is written
    for a config of the command line, which Hydra has recorded, or of another origin, nor if
    `objects` replace parts of it. A config that cannot be written is a warning.
    """
    is_resumed = (folder / hydra_files.FOLDER).is_dir()  # it is replaced when training continues
    target = folder / (hydra_files.RESUMED if is_resumed else hydra_files.FOLDER)
    try:
        if _is_recordable(config, objects):
            _write(_plain(config), target)
            return
    except Exception as error:  # of any value, or of the disk: the run is built all the same
        reason = " ".join(str(error).split())
        log.warning("the config is not recorded, so load and resume need it typed: %s", reason)
        remove_folder(target, ignore_errors=True)
    # what an earlier build recorded here would be taken for this run's config
    for name in (hydra_files.RESUMED, *(() if has_checkpoints else (hydra_files.FOLDER,))):
        if _is_own(folder / name):
            remove_folder(folder / name, ignore_errors=True)


def _is_recordable(config: RunConfig, objects: Sequence[str]) -> bool:
    if ATTRIBUTE not in vars(config):
        return False
    if objects:
        log.info("the config is not recorded: %s given to build as objects", ", ".join(objects))
    return not objects


def _write(config: RunConfig, target: Path) -> None:
    """Write the files that Hydra writes. Raises ConfigError for what an override cannot be."""
    overrides, before = vars(config)[ATTRIBUTE]
    now = flatten_config(config)
    changed = {k: v for k, v in now.items() if k not in before or before[k] != v}
    lost = [key for key, value in before.items() if key not in now and value != {}]
    if lost or any(key.rpartition(".")[2] in CLASS_KEYS for key in changed):
        raise ValueError("an object of another class is in it")
    changes = [_as_override(key, value, key in before) for key, value in changed.items()]
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
    text = f"{'' if exists else '++'}{key}={value_for_hydra(value)}"
    parse_override(text)  # as load and resume will
    return text


def _plain(value: Any) -> Any:
    """Return a copy with plain values in place of tuples, paths, NumPy's numbers and arrays."""
    if is_dataclass(value):
        copied = copy(value)
        vars(copied).update({name: _plain(inner) for name, inner in vars(value).items()})
        return copied
    if isinstance(value, Mapping):
        return {_plain(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return str(value) if isinstance(value, Path) else value


def _is_own(folder: Path) -> bool:
    """Whether `record_config` has written the folder; Hydra writes more about itself."""
    try:
        settings = hydra_files.read_yaml(folder / "hydra.yaml")
        return [*settings["hydra"]] == ["runtime"] and [*settings["hydra"]["runtime"]] == ["cwd"]
    except (StorageError, KeyError, TypeError):
        return False
