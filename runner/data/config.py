"""What can be asked of the data: the `data` group, one dataclass per option."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING

from runner.bounds import bounded, check_bounds
from runner.errors import ConfigError

LOADING = (
    *("workers", "prefetch", "pin_memory", "persistent_workers", "device_prefetch"),
    *("timeout_s", "validation_samples", "default_epochs", "default_steps"),
)
"""Keys of `data` that leave the samples that are trained on as they are."""

AS_CLASSES = "return whole numbers (int64) as targets, or use data.task=classification"


class BadSamples(Enum):
    """What is done about samples that cannot be used."""

    stop = "stop"  # the first one is an error that names it
    drop = "drop"  # they are counted, named and left out, before the split


class Missing(Enum):
    """What is done about missing values among the inputs of a table."""

    mean = "mean"  # a number becomes the mean of the training rows, and one more input tells so …
    median = "median"  # … or their median; a missing text is a category of its own
    category = "category"  # as mean: the input that tells so makes it a group of its own
    drop = "drop"  # such rows are left out, before the split
    error = "error"  # the first ones are an error that names them


class ColumnType(Enum):
    """What a column of a table is read as."""

    number = "number"
    text = "text"  # a category
    date = "date"
    id = "id"  # no input; names the rows in predictions


@dataclass
class DataConfig:
    """What every data set has: how it is split, ordered and loaded."""

    kind: str = MISSING  # which of our options this is
    _target_: str | None = None  # a map-style dataset of the user's own, in place of ours
    arguments: dict[str, Any] = field(default_factory=dict)  # what its constructor gets
    validation: float = bounded(0.2, above=0, below=1)  # share held out
    validation_samples: int | None = bounded(None, min=1)  # validate on so many; None: all
    split_seed: int = 0  # apart from `seed`, so that seeds are compared on the same split
    bad_samples: BadSamples = BadSamples.stop  # rows of a table that cannot be used
    most_bad: float = bounded(0.1, above=0, below=1)  # a larger share is an error all the same
    shuffle: bool = True
    drop_last: bool = False
    workers: int | None = bounded(None, min=0)  # None: chosen from where the data lies
    prefetch: int | None = bounded(None, min=1)  # batches each worker holds ready
    pin_memory: bool | None = None
    persistent_workers: bool | None = None
    device_prefetch: bool | None = None  # copy to the GPU on a stream of its own; None: pipeline's
    timeout_s: float = bounded(300.0, above=0)  # a worker that is silent for so long hangs
    default_epochs: float | None = bounded(None, above=0)  # when training names no length
    default_steps: int | None = None

    def __post_init__(self) -> None:
        check_bounds(self, "data")
        table = self.kind in ("tabular", "text") and self._target_ is None
        if self.bad_samples is BadSamples.drop and not table:
            problem = "drop is for tables, whose rows are all read beforehand"
            raise ConfigError("data.bad_samples", problem, "use stop, and mend what it names")


@dataclass
class Digits(DataConfig):
    """1,797 handwritten digits, 8 by 8 pixels, shipped in the package."""

    kind: str = "digits"


@dataclass
class Cancer(DataConfig):
    """569 breast-cancer biopsies, 30 measurements each, shipped in the package."""

    kind: str = "cancer"


@dataclass
class StdlibText(DataConfig):
    """The Python standard library's own source as bytes, for language modelling."""

    kind: str = "stdlib_text"
    sequence: int = bounded(128, min=1)  # bytes per sample


PARTS = ("asyncio", "email", "importlib", "multiprocessing", "unittest", "xml")


@dataclass
class StdlibParts(DataConfig):
    """Passages of the standard library, labelled by the package each one is from."""

    kind: str = "stdlib_parts"
    sequence: int = bounded(128, min=1)
    parts: list[str] = field(default_factory=lambda: [*PARTS])


class SyntheticForm(Enum):
    """What synthetic data looks like."""

    images = "images"
    tokens = "tokens"
    tabular = "tabular"


@dataclass
class Synthetic(DataConfig):
    """Made-up data of any size that can be learned, for benchmarks."""

    kind: str = "synthetic"
    form: SyntheticForm = SyntheticForm.images
    samples: int = bounded(4096, min=2)
    features: int = bounded(64, min=1)  # tabular
    channels: int = bounded(3, min=1)  # images
    image_size: int = bounded(32, min=1)  # images
    classes: int = bounded(10, min=2)  # images and tabular
    vocab: int = bounded(256, min=2)  # tokens
    sequence: int = bounded(256, min=1)  # tokens


@dataclass
class Tabular(DataConfig):
    """A table of numbers and categories: csv or parquet."""

    kind: str = "tabular"
    path: str = MISSING
    target: str = MISSING  # the column to predict
    task: str = "auto"  # classification | regression | auto (by the target's values)
    ignore: list[str] = field(default_factory=list)  # columns to leave out
    missing: Missing = Missing.mean  # what becomes of missing values
    types: dict[str, ColumnType] = field(
        default_factory=dict
    )  # '+data.types={age: number}'; else recognised
    categories: int = bounded(256, min=1)  # most of a column; the rarest share one input


@dataclass
class Images(DataConfig):
    """A folder per class, images in it."""

    kind: str = "images"
    path: str = MISSING
    image_size: int = bounded(64, min=1)  # each image is resized and centre-cropped to this square
    channels: int = 3  # 3: colour, 1: grey
    augment: bool = False  # random crop and horizontal flip, on training samples

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.channels not in (1, 3):
            raise ConfigError("data.channels", f"must be 1 (grey) or 3, got {self.channels}")


@dataclass
class Text(DataConfig):
    """Labelled text: a csv with a text and a label column, or a folder per class."""

    kind: str = "text"
    path: str = MISSING
    text: str = "text"  # csv column
    target: str = "label"  # csv column
    sequence: int = bounded(256, min=1)  # bytes per sample


@dataclass
class Tokens(DataConfig):
    """Token ids in `.bin` files (memory-mapped), as nanoGPT writes them."""

    kind: str = "tokens"
    path: str = MISSING  # one file, or a folder with train.bin and val.bin
    vocab: int = MISSING
    dtype: str = "uint16"
    sequence: int = bounded(256, min=1)


@dataclass
class Arrays(DataConfig):
    """An `.npz` with the inputs and the targets as arrays."""

    kind: str = "arrays"
    path: str = MISSING
    inputs: str = "x"  # names inside the file
    target: str = "y"
    task: str = "auto"


_ALL = (Digits, Cancer, StdlibText, StdlibParts, Synthetic, Tabular, Images, Text, Tokens, Arrays)
OPTIONS: dict[str, type[DataConfig]] = {cls.kind: cls for cls in _ALL}
