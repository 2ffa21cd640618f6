"""The files of a config that was composed in Python, as Hydra writes them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from copy import copy
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from runner.core.config.run_config import RunConfig, WrittenConfig
from runner.core.config.spelling import parse_override
from runner.core.record import hydra_files
from runner.core.record.text import value_for_hydra
from runner.core.security.secrets import mask_hydra_files

CLASS_KEYS = ("kind", "_target_")


def write_config(config: RunConfig, origin: tuple[list[str], dict[str, Any]], target: Path) -> None:
    """Write Hydra's files for a config composed of overrides and then changed.

    `origin` is the overrides and the values that they gave. Raises any error of values or the disk.
    """
    overrides, before = origin
    config = _plain(config)
    now = WrittenConfig(config).flat()
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
