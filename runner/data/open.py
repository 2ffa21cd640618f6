"""From what the config asks for to a source of samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

from runner.data.config import DataConfig
from runner.data.dataset import Dataset
from runner.data.preprocessing import Preprocessing, source_of
from runner.errors import ConfigError
from runner.security.files.policy import FilePolicy

# kind -> module and function; imported when asked for, so that none costs a run that has another
OPENERS = {
    "digits": ("embedded", "digits"),
    "cancer": ("embedded", "cancer"),
    "stdlib_text": ("stdlib", "stdlib_text"),
    "stdlib_parts": ("stdlib", "stdlib_parts"),
    "synthetic": ("embedded", "synthetic"),
    "tabular": ("tabular", "tabular"),
    "images": ("images", "ImageFolder"),
    "text": ("text", "text"),
    "tokens": ("tokens", "tokens"),
    "arrays": ("arrays", "arrays"),
}
FROM_FILES = ("tabular", "images", "text", "tokens", "arrays")


@dataclass(frozen=True)
class Opening:
    """How data are opened, beyond what the config says."""

    policy: FilePolicy | None = None  # about files of arrays and links; None: the standard one
    fitted: Preprocessing | None = None  # is applied, and nothing is fitted
    evaluates: bool = False  # the data are evaluated and not trained on
    labelled: bool = True  # False: the data may lack what is to be predicted
    rule: str | None = None  # the split of the run that is resumed
    folder: str = ""  # in data.path, of the samples; "": all of it
    trains: bool = False  # all samples are trained on: those of validation lie elsewhere

    def divides(self, config: DataConfig) -> bool:
        """Whether the samples become training and validation."""
        return not self.trains and not self.whole(config)

    def whole(self, config: DataConfig) -> bool:
        """Whether all samples are evaluated: those that the model was not trained on."""
        if self.fitted is None or not self.evaluates:
            return False
        return not self.labelled or self.fitted.source != source_of(config)


PLAIN = Opening()
"""Data that are trained on, with nothing fitted."""


def open_data(
    config: DataConfig, resolve: Callable[[str, str], Any], opening: Opening = PLAIN
) -> Dataset:
    """The data set that `config` names: one of ours, or the user's own by `_target_`.

    Raises ConfigError or DataError for what can be checked without reading every sample on disk,
    and SecurityError for a `_target_` that is not trusted.
    """
    if config._target_ is not None:
        from runner.data.user_dataset import UserDataset
        from runner.security.registry import assembled, construct

        factory = resolve(config._target_, "data._target_")
        dataset = construct(factory, assembled(config.arguments, resolve, "data"), {}, "data")
        return UserDataset(dataset, config._target_, config, opening)
    if missing := [field.name for field in fields(config) if getattr(config, field.name) == "???"]:
        key = f"data.{missing[0]}"
        raise ConfigError(key, f"data={config.kind} needs it", f"{key}=…")
    if config.kind not in OPENERS:
        raise ConfigError("data.kind", f"no data {config.kind!r}", f"one of {', '.join(OPENERS)}")
    module, function = OPENERS[config.kind]
    opener = getattr(import_module(f"runner.data.{module}"), function)
    source: Dataset = opener(config, opening) if config.kind in FROM_FILES else opener(config)
    return source
