"""What is fitted on training data; it is saved with the model and applied to all other data."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from runner.data.batch import Column, ColumnUse, Sizes
from runner.errors import CheckpointError, ConfigError
from runner.record.text import dataclass_from_json
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
        chosen = {c.key: str(c.value) for c in data.choices if c.value != "none"}
        decimal, thousands = (
            getattr(config, sign, None) or chosen.get(f"data.{sign}", "")
            for sign in ("decimal", "thousands")
        )
        if not decimal and thousands in ("point", "."):
            decimal = "comma"
        rule = config.split.name if config.split else chosen.get("data.split", "random")
        known = data.sizes, data.columns, getattr(config, "target", ""), tuple(data.ids)
        split = rule, config.folds or 0, config.fold or 0
        signs = decimal, thousands, getattr(data, "tokenizer", "")
        return cls(kind_of(config), source_of(config), *known, *split, *signs)

    def describe_columns(self, choices: Iterable[Choice] = ()) -> list[ColumnUse]:
        """What each column of a table was taken for, and its missing cells in training rows.

        The `choices` of its opening say which texts were left out of the inputs.
        """
        described = list[ColumnUse]()
        for name, columns in groupby(self.columns, key=lambda column: column.name):
            first, *_ = parts = [*columns]
            dates = [part.part for part in parts if part.part not in ("", "missing")]
            use = f"date: {', '.join(dates)}" if dates else "number"
            if first.values:
                use = f"category: {len(first.values):,} values"
            described.append(ColumnUse(name, use, first.gaps))
        left_out = {choice.value for choice in choices if choice.key == "data.types"}
        for name in self.ids:
            use = "left out" if f"{name}: left out" in left_out else "id"
            described.append(ColumnUse(name, use))
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


def parse_preprocessing(data: bytes, where: Path) -> Preprocessing:
    """From what `Preprocessing.dump` made; CheckpointError names `where` and what is wrong."""
    try:
        content = json.loads(data)
        if content.get("format") != FORMAT:
            raise ValueError(f"has format {content.get('format')!r}, and {FORMAT} is read")
        return dataclass_from_json(Preprocessing, content)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{where}: is no preprocessing: {error}") from None


def check_predicts(fitted: Preprocessing | None) -> None:
    """Raise ConfigError where there is no model, or its answers are not one for each sample."""
    if fitted is None:
        problem = "predict needs a trained model with its preprocessing"
        raise ConfigError("job", problem, "name a run: checkpoint.resume=RUN")
    if fitted.sizes.task not in PREDICTED:
        problem = f"predict is for {' and '.join(PREDICTED)}, and this is {fitted.sizes.task}"
        raise ConfigError("job", problem, "use job=evaluate")


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
