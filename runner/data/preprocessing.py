"""What is fitted on training data; it is saved with the model and applied to all other data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from runner.data.batch import Column, Sizes
from runner.data.order import split
from runner.errors import CheckpointError, ConfigError, DataError
from runner.security.files.policy import FilePolicy
from runner.techniques.base import Choice

if TYPE_CHECKING:
    import numpy as np

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
    format: int = FORMAT

    @classmethod
    def of(cls, config: DataConfig, data: Dataset) -> Preprocessing:
        """That of a data set that was opened with `config`."""
        columns = getattr(data, "columns", ())
        target = getattr(config, "target", "")
        return cls(kind_of(config), source_of(config), data.sizes, columns, target, tuple(data.ids))

    def dump(self) -> bytes:
        """As JSON."""
        text = json.dumps(asdict(self), indent=1, allow_nan=False, ensure_ascii=False)
        return (text + "\n").encode()

    def check_kind(self, config: DataConfig) -> None:
        """Raise ConfigError for data of another kind, to which it cannot be applied."""
        if self.kind != kind_of(config):
            problem = f"the model was trained on data={self.kind}, and this is {kind_of(config)}"
            raise ConfigError("data", problem, "name data of that kind")

    @classmethod
    def parse(cls, data: bytes, where: Path) -> Preprocessing:
        """From what `dump` made; CheckpointError names `where` and what is wrong with it."""
        try:
            content = json.loads(data)
            if content.get("format") != FORMAT:
                wrong = f"has format {content.get('format')!r}, and {FORMAT} is read"
                raise ValueError(wrong)
            preprocessing: Preprocessing = _typed(cls, content, "it")
        except (ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{where}: is no preprocessing: {error}") from None
        return preprocessing


@dataclass(frozen=True)
class Opening:
    """How data are opened, beyond what the config says."""

    policy: FilePolicy | None = None  # about files of arrays and links; None: the standard one
    fitted: Preprocessing | None = None  # is applied, and nothing is fitted
    evaluates: bool = False  # the data are evaluated and not trained on
    labelled: bool = True  # False: the data may lack what is to be predicted

    def split(
        self, samples: int, config: DataConfig, what: str
    ) -> tuple[np.ndarray, np.ndarray, tuple[Choice, ...]]:
        """Training and validation samples; data that were not trained on are evaluated whole."""
        import numpy as np

        if not self.whole(config):
            return *split(samples, config.validation, config.split_seed, what), ()
        if not samples:
            raise DataError(f"{what}: has no samples")
        every = np.arange(samples)
        verb = "evaluated" if self.labelled else "predicted"
        source = "" if self.fitted is None else f"; the model was trained on {self.fitted.source}"
        reason = f"all {samples:,} are {verb}{source}"
        return every, every, (Choice("data.validation", "all", reason),)

    def whole(self, config: DataConfig) -> bool:
        """Whether all samples are evaluated: those that the model was not trained on."""
        if self.fitted is None or not self.evaluates:
            return False
        return not self.labelled or self.fitted.source != source_of(config)


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


def trained_labels(
    names: Sequence[str], labels: np.ndarray, trained: Sequence[str], what: str
) -> np.ndarray:
    """Labels that count in `names`, as places in the `trained` names.

    DataError names the classes that the model was not trained on, and how many samples have them.
    """
    import numpy as np

    places = {name: place for place, name in enumerate(trained)}
    unknown = [name for name in names if name not in places]
    if unknown:
        at = np.isin(labels, [names.index(name) for name in unknown])
        listed = ", ".join(repr(name[:40]) for name in unknown[:5])
        more = f", … ({len(unknown)} in all)" if len(unknown) > 5 else ""
        classes = ", ".join(name[:40] for name in trained[:10])
        raise DataError(
            f"{what}: {int(at.sum()):,} of {len(labels):,} samples have a class that the model was "
            f"not trained on: {listed}{more}; its classes are {classes}; leave them out, or train "
            "on them"
        )
    trained_places: np.ndarray = np.array([places[name] for name in names], np.int64)[labels]
    return trained_places


def _typed(kind: Any, value: Any, where: str) -> Any:
    """`value` as that type: a dataclass from a dict, a tuple from a list; else a ValueError."""
    if get_origin(kind) is UnionType:
        return None if value is None else _typed(get_args(kind)[0], value, where)
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where} must be a list")
        return tuple(_typed(get_args(kind)[0], item, where) for item in value)
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        # a field that came later has a default
        needed = {f.name for f in fields(kind) if f.default is MISSING}
        if not isinstance(value, dict) or not needed <= value.keys() <= hints.keys():
            raise ValueError(f"{where} must have the keys {sorted(hints)}")
        return kind(**{n: _typed(hints[n], item, f"{where}.{n}") for n, item in value.items()})
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise ValueError(f"{where} must be {kind.__name__}, got {type(value).__name__}")
    return kind(value)
