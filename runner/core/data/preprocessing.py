"""Preprocessing fitted on training data, saved with the model and applied to other data."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.core.errors import CheckpointError, ConfigError
from runner.core.findings import Choice
from runner.core.interfaces.batch import Column, ColumnUse, Sizes
from runner.core.record.text import dataclass_from_json
from runner.core.security.files.policy import FilePolicy

if TYPE_CHECKING:
    from runner.core.data.dataset import Dataset
    from runner.core.schemas.data import DataConfig

NAME = "preprocessing.json"
FORMAT = 1
PREDICTABLE_TASKS = ("classification", "regression")


@dataclass(frozen=True)
class Preprocessing:
    """Columns, categories, scales, class names and sizes, as fitted on the training rows.

    Part of every checkpoint. Evaluate, predict, export and resume apply it and fit nothing.
    """

    kind: str  # the option of `data` that it was fitted on
    source: str  # absolute path of those data; "": no path
    sizes: Sizes
    columns: tuple[Column, ...] = ()  # of a table, in the order of the model's inputs
    target: str = ""  # name of the predicted column or array, if any
    ids: tuple[str, ...] = ()  # columns that name the rows and are no inputs
    split: str = "random"  # the rule, which a resumed run keeps
    folds: int = 0  # of a cross-validation
    fold: int = 0  # the one that is held out
    decimal: str = ""  # sign of the numbers in a csv, as data.decimal names it; "": a point
    thousands: str = ""  # likewise, as data.thousands
    target_columns: tuple[Column, ...] = ()  # how the cells of the target are read, if not plainly
    tokenizer: str = ""  # sha256 of its vocabulary
    pixel_range: tuple[float, ...] = ()  # of images of more than 8 bits: lowest and highest value
    files: dict[str, Any] = field(default_factory=dict)  # `DataFiles.describe`; {}: no files
    format: int = FORMAT

    @classmethod
    def of(cls, config: DataConfig, data: Dataset) -> Preprocessing:
        """Return the preprocessing of a data set opened with `config`."""
        choices = {c.key: str(c.value) for c in data.choices}
        decimal = getattr(config, "decimal", None) or ""
        thousands = getattr(config, "thousands", None) or ""
        if not decimal and thousands in ("point", "."):
            decimal = "comma"
        rule = config.split.name if config.split else choices.get("data.split", "random")
        fitted = data.sizes, data.columns, getattr(config, "target", ""), tuple(data.ids)
        split = rule, config.folds or 0, config.fold or 0
        signs = decimal, thousands, data.target_columns
        pixels = getattr(data, "tokenizer", ""), getattr(data, "pixel_range", ())
        return cls(kind_of(config), source_of(config), *fitted, *split, *signs, *pixels)

    def describe_columns(self, choices: Iterable[Choice] = ()) -> list[ColumnUse]:
        """Return how columns were read; `choices` tell left-out text columns from ids."""
        described = list[ColumnUse]()
        for name, columns in groupby(self.columns, key=lambda column: column.name):
            first, *_ = parts = [*columns]
            dates = [part.part for part in parts if part.part not in ("", "missing")]
            use = f"date: {', '.join(dates)}" if dates else "number"
            if first.values:
                blank = ", one for missing cells" if "" in first.values else ""
                use = f"category: {len(first.values):,} values{blank}"
            described.append(ColumnUse(name, use, first.gaps))
        left_out = {choice.value for choice in choices if choice.key == "data.types"}
        for name in self.ids:
            use = "left out" if f"{name}: left out" in left_out else "id"
            described.append(ColumnUse(name, use))
        return described

    def dump(self) -> bytes:
        """Serialize to JSON, UTF-8; a path may have bytes that are not."""
        text = json.dumps(asdict(self), indent=1, allow_nan=False, ensure_ascii=False)
        return (text + "\n").encode("utf-8", "surrogatepass")

    def check_kind(self, config: DataConfig) -> None:
        """Raise ConfigError for data of another kind than the fitted one."""
        if self.kind != kind_of(config):
            problem = f"the model was trained on data={self.kind}, got {kind_of(config)}"
            fix = "use the same kind; a run built with objects of yours is built with them again"
            raise ConfigError("data", problem, fix)


def parse_preprocessing(data: bytes, where: Path) -> Preprocessing:
    """Parse the output of `Preprocessing.dump`; CheckpointError names `where` and the problem."""
    try:
        content = json.loads(data)
        if content.get("format") != FORMAT:
            raise ValueError(f"has format {content.get('format')!r}, expected {FORMAT}")
        return dataclass_from_json(Preprocessing, content)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{where}: not a preprocessing file: {error}") from None


def check_predicts(fitted: Preprocessing | None) -> None:
    """Raise ConfigError without a trained model, or if its task has no prediction per sample."""
    if fitted is None:
        problem = "predict needs a trained model with its preprocessing"
        raise ConfigError("job", problem, "name a run: checkpoint.resume=RUN")
    if fitted.sizes.task not in PREDICTABLE_TASKS:
        problem = f"predict needs {' or '.join(PREDICTABLE_TASKS)}, got {fitted.sizes.task}"
        is_text = fitted.sizes.task == "language_modelling"
        fix = "give it a text to continue: predict.prompt=…" if is_text else "use job=evaluate"
        raise ConfigError("job", problem, fix)


def kind_of(config: DataConfig) -> str:
    """Return the option of `data`, or `own` for a user's class."""
    return config.kind if config._target_ is None else "own"


def source_of(config: DataConfig) -> str:
    """Return the absolute path of the data (or ""), or a user's class with its arguments."""
    if config._target_ is not None:
        arguments = ", ".join(f"{key}={value!r}" for key, value in sorted(config.arguments.items()))
        return f"{config._target_}({arguments})"
    path = getattr(config, "path", "")
    return str(Path(os.path.expanduser(path)).resolve()) if path else ""


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
    targets: str = "inferred"  # what they are; see `objectives.build.meaning_of_targets`

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
