"""Opening of the data set that the config names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from runner import rooms
from runner.core.data.dataset import Dataset
from runner.core.data.preprocessing import Preprocessing, source_of
from runner.core.errors import ConfigError
from runner.core.schemas.data import DataConfig
from runner.core.security.files.policy import FilePolicy

FROM_FILES = ("tabular", "images", "text", "text_lm", "tokens", "arrays")


@dataclass(frozen=True)
class OpenOptions:
    """Options for opening data that are not in the config."""

    policy: FilePolicy | None = None  # for array files and links; None: the default
    fitted: Preprocessing | None = None  # applied; nothing is fitted then
    evaluates: bool = False  # the data are evaluated and not trained on
    labelled: bool = True  # False: the data may lack the target
    split_rule: str | None = None  # the split of the run that is resumed
    folder: str = ""  # subfolder of data.path with the samples; "": all of it
    trains_on_all: bool = False  # all samples are trained on: validation is elsewhere

    def splits_samples(self, config: DataConfig) -> bool:
        """Whether the samples are split into training and validation."""
        return not self.trains_on_all and not self.evaluates_all(config)

    def evaluates_all(self, config: DataConfig) -> bool:
        """Whether all samples are evaluated or predicted, not only a validation split."""
        if self.fitted is None or not self.evaluates:
            return False
        return not self.labelled or self.fitted.source != source_of(config)


DEFAULT_OPENING = OpenOptions()
"""Defaults: training data, nothing fitted."""


def open_data(
    config: DataConfig, resolve: Callable[[str, str], Any], opening: OpenOptions = DEFAULT_OPENING
) -> Dataset:
    """Open the data set that `config` names: a built-in one, or the user's by `_target_`.

    Raises ConfigError or DataError for what can be checked without reading every sample on disk,
    and SecurityError for a `_target_` that is not trusted.
    """
    if config._target_ is not None:
        from runner.core.data.user_dataset import UserDataset
        from runner.core.security.registry import construct, instantiate_nested

        factory = resolve(config._target_, "data._target_")
        arguments = instantiate_nested(config.arguments, resolve, "data")
        dataset = construct(factory, arguments, {}, "data")
        return UserDataset(dataset, config._target_, config, opening)
    if missing := [field.name for field in fields(config) if getattr(config, field.name) == "???"]:
        key = f"data.{missing[0]}"
        raise ConfigError(key, f"is required by data={config.kind}", f"{key}=…")
    options = rooms.NAMES["data"]
    if config.kind not in options:
        raise ConfigError("data.kind", f"unknown data {config.kind!r}", f"use {', '.join(options)}")
    opener = rooms.find("data", config.kind, f"data={config.kind}")
    source: Dataset = opener(config, opening) if config.kind in FROM_FILES else opener(config)
    return source
