"""What is fitted on training data; it is saved with the model and applied to all other data."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from runner.data.batch import Column, ColumnUse, Sizes
from runner.errors import ConfigError
from runner.security.files.policy import FilePolicy
from runner.techniques.base import Choice

if TYPE_CHECKING:
    from runner.data.config import DataConfig
    from runner.data.dataset import Dataset

NAME = "preprocessing.json"
FORMAT = 1
PREDICTED = ("classification", "regression")


@dataclass(frozen=True)
class Preprocessing:
    """Columns, categories, scales, class names and sizes, as fitted on the training rows.

    Part of every checkpoint. What evaluates, predicts, exports or resumes applies it and fits
    nothing.
    """

    kind: str  # the option of `data` that it was fitted on
    source: str  # where those data lie; "" for what has no path
    sizes: Sizes
    columns: tuple[Column, ...] = ()  # of a table, in the order of the model's inputs
    target: str = ""  # the name of what is predicted, where it has one
    ids: tuple[str, ...] = ()  # columns that name the rows and are no inputs
    split: str = "random"  # the rule, which a resumed run follows, too
    folds: int = 0  # of a cross-validation
    fold: int = 0  # the one that is held out
    decimal: str = ""  # sign of the numbers in a csv, as data.decimal names it; "": a point
    thousands: str = ""  # likewise, as data.thousands
    tokenizer: str = ""  # sha256 of its vocabulary
    format: int = FORMAT

    @classmethod
    def of(cls, config: DataConfig, data: Dataset) -> Preprocessing:
        """That of a data set that was opened with `config`."""
        columns = getattr(data, "columns", ())
        target = getattr(config, "target", "")
        chosen = [choice.value for choice in data.choices if choice.key == "data.split"]
        rule = config.split.name if config.split else next(iter(chosen), "random")
        known = (data.sizes, columns, target, tuple(data.ids), rule, config.folds or 0)
        signs = _number_signs(config, data.choices)
        tokenizer = getattr(data, "tokenizer", "")
        return cls(kind_of(config), source_of(config), *known, config.fold or 0, *signs, tokenizer)

    def describe_columns(self, choices: Iterable[Choice] = ()) -> list[ColumnUse]:
        """What each column of a table was taken for, and its missing cells in training rows.

        The `choices` of its opening say which texts were left out of the inputs.
        """
        described = list[ColumnUse]()
        for name, columns in groupby(self.columns, key=lambda column: column.name):
            first, *_ = parts = [*columns]
            dates = [part.part for part in parts if part.part not in ("", "missing")]
            taken = f"date: {', '.join(dates)}" if dates else "number"
            if first.values:
                taken = f"category: {len(first.values):,} values"
            described.append(ColumnUse(name, taken, first.gaps))
        left_out = {choice.value for choice in choices if choice.key == "data.types"}
        for name in self.ids:
            taken = "left out" if f"{name}: left out" in left_out else "id"
            described.append(ColumnUse(name, taken))
        return described

    def dump(self) -> bytes:
        """As JSON."""
        text = json.dumps(asdict(self), indent=1, allow_nan=False, ensure_ascii=False)
        return (text + "\n").encode()

    def check_kind(self, config: DataConfig) -> None:
        """Raise ConfigError for data of another kind, to which it cannot be applied."""
        if self.kind != kind_of(config):
            problem = f"the model was trained on data={self.kind}, and this is {kind_of(config)}"
            raise ConfigError("data", problem, "name data of that kind")


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

    def split(
        self,
        samples: int,
        config: DataConfig,
        what: str,
        labels: np.ndarray | None = None,  # of classes
        by: np.ndarray | None = None,  # the column of data.split=group or time, as numbers
    ) -> tuple[np.ndarray, np.ndarray, tuple[Choice, ...]]:
        """Training and validation samples; data that were not trained on are evaluated whole."""
        from runner.data import split as rules  # embedded data do without

        if self.whole(config):
            return rules.take_all(samples, self, what)
        if self.trains:
            return np.arange(samples), np.arange(0), ()
        rule, choices = rules.choose_rule(config, self.rule, labels)
        config, folds = rules.choose_fold(config, self.fitted)
        parts = rules.divide(rule, samples, config, what, labels, by)
        return *parts, (*choices, *folds, *rules.describe_window(rule, config, samples, parts))

    def divides(self, config: DataConfig) -> bool:
        """Whether the samples become training and validation."""
        return not self.trains and not self.whole(config)

    def root(self, config: Any) -> Path:
        """The file or folder of the samples; ConfigError where there is none."""
        from runner.data.paths import existing

        return existing(config.path) / self.folder

    def whole(self, config: DataConfig) -> bool:
        """Whether all samples are evaluated: those that the model was not trained on."""
        if self.fitted is None or not self.evaluates:
            return False
        return not self.labelled or self.fitted.source != source_of(config)


PLAIN = Opening()
"""Data that are trained on, with nothing fitted."""


def check_predicts(fitted: Preprocessing | None) -> None:
    """Raise ConfigError where there is no model, or its answers are not one for each sample."""
    if fitted is None:
        problem = "predict needs a trained model with its preprocessing"
        raise ConfigError("job", problem, "name a run: checkpoint.resume=RUN")
    if fitted.sizes.task not in PREDICTED:
        problem = f"predict is for {' and '.join(PREDICTED)}, and this is {fitted.sizes.task}"
        raise ConfigError("job", problem, "use job=evaluate")


def _number_signs(config: DataConfig, choices: Iterable[Choice]) -> tuple[str, str]:
    """The words for the decimal sign and the one between thousands: stated ones or recognised."""
    recognised = {choice.key: str(choice.value) for choice in choices if choice.value != "none"}
    decimal, thousands = (
        getattr(config, key, None) or recognised.get(f"data.{key}", "")
        for key in ("decimal", "thousands")
    )
    return decimal or ("comma" if thousands in ("point", ".") else ""), thousands


def kind_of(config: DataConfig) -> str:
    """Which option of `data` it is, or `own` for a class of the user's."""
    return config.kind if config._target_ is None else "own"


def source_of(config: DataConfig) -> str:
    """Where the data lie, as an absolute path; a class of the user's own with its arguments."""
    if config._target_ is not None:
        arguments = ", ".join(f"{key}={value!r}" for key, value in sorted(config.arguments.items()))
        return f"{config._target_}({arguments})"
    path = getattr(config, "path", "")
    return str(Path(path).expanduser().resolve()) if path else ""
