"""Opening of the data set that the config names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from runner import rooms
from runner.core.data.dataset import Dataset
from runner.core.data.preprocessing import DEFAULT_OPENING, OpenOptions
from runner.core.errors import ConfigError
from runner.core.schemas.data import DataConfig

FROM_FILES = ("tabular", "images", "text", "text_lm", "tokens", "arrays")


def open_data(
    config: DataConfig, resolve: Callable[[str, str], Any], opening: OpenOptions = DEFAULT_OPENING
) -> Dataset:
    """Open the data set that `config` names: a built-in one, or the user's by `_target_`.

    Raises ConfigError or DataError for what can be checked without reading every sample on disk,
    and SecurityError for a `_target_` that is not trusted.
    """
    if config._target_ is not None:
        from runner.core.data.stream import is_stream, open_stream, required_split
        from runner.core.data.user_dataset import UserDataset
        from runner.core.security.registry import construct, instantiate_nested

        factory = resolve(config._target_, "data._target_")
        arguments = instantiate_nested(config.arguments, resolve, "data")
        dataset = construct(factory, arguments, required_split(factory), "data")
        if is_stream(dataset):
            return open_stream(config, factory, dataset, arguments, resolve, opening)
        if config.validation_target is not None:
            problem = f"is for streams, and {config._target_} has an index to split by"
            raise ConfigError("data.validation_target", problem, "leave it out")
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
