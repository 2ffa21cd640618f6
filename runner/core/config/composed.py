"""The config of a run that is built from Python, recorded as the command line records it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from runner.core.config.run_config import RunConfig, WrittenConfig
from runner.core.errors import StorageError
from runner.core.record import hydra_files
from runner.core.record.storage import remove_folder

log = logging.getLogger("runner")

ATTRIBUTE = "composed"  # of a RunConfig that `compose` made; no field, so no part of its values


def remember(config: RunConfig, overrides: list[str]) -> RunConfig:
    """Keep with a config what it was composed of, and its values; return it."""
    vars(config)[ATTRIBUTE] = (overrides, WrittenConfig(config).flat())
    return config


def record_config(
    config: RunConfig, folder: Path, objects: Sequence[str], has_checkpoints: bool
) -> None:
    """Write `.hydra` into a run's folder, so that it is loaded and resumed without typing it again.

    Changes since `compose` are further overrides. Nothing is written for a config of Hydra's, or if
    `objects` replace parts of it. A config that cannot be written is a warning.
    """
    is_resumed = (folder / hydra_files.FOLDER).is_dir()  # it is replaced when training continues
    if is_resumed and not _is_own(folder / hydra_files.FOLDER):
        return  # the command line's, or of a program with Hydra whose output folder it is
    target = folder / (hydra_files.RESUMED if is_resumed else hydra_files.FOLDER)
    try:
        if _is_recordable(config, objects):
            from runner.core.config.composed_files import write_config  # not by the command line

            write_config(config, vars(config)[ATTRIBUTE], target)
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


def _is_own(folder: Path) -> bool:
    """Whether `record_config` has written the folder; Hydra writes more about itself."""
    try:
        settings = hydra_files.read_yaml(folder / "hydra.yaml")
        return [*settings["hydra"]] == ["runtime"] and [*settings["hydra"]["runtime"]] == ["cwd"]
    except (StorageError, KeyError, TypeError):
        return False
