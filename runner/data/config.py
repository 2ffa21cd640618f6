"""What can be asked of the data: the `data` group, one dataclass per option."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from omegaconf import MISSING

from runner.errors import ConfigError

LOADING = (
    *("workers", "prefetch", "pin_memory", "persistent_workers", "device_prefetch"),
    *("timeout_s", "validation_samples", "default_epochs", "default_steps"),
)
"""Keys of `data` that leave the samples that are trained on as they are."""

AS_INTEGERS = "return each target as a whole number (an int, int64)"


class BadSamples(Enum):
    """What is done about samples that cannot be used."""

    stop = "stop"  # the first one is an error that names it
    drop = "drop"  # they are counted, named and left out, before the split


@dataclass
class DataConfig:
    """What every data set has: how it is split, ordered and loaded."""

    kind: str = MISSING  # which of our options this is
    _target_: str | None = None  # a map-style dataset of the user's own, in place of ours
    arguments: dict[str, Any] = field(default_factory=dict)  # what its constructor gets
    validation: float = 0.2  # share held out
    validation_samples: int | None = None  # look at so many of them; None: all
    split_seed: int = 0  # apart from `seed`, so that seeds are compared on the same split
    bad_samples: BadSamples = BadSamples.stop  # cells that are no number, files that are no image
    most_bad: float = 0.1  # a larger share than this is an error all the same
    shuffle: bool = True
    drop_last: bool = False
    workers: int | None = None  # None: chosen from where the data lies, with a reason
    prefetch: int | None = None  # batches each worker holds ready
    pin_memory: bool | None = None
    persistent_workers: bool | None = None
    device_prefetch: bool | None = None  # copy to the GPU on a stream of its own; None: pipeline's
    timeout_s: float = 300.0  # a worker that says nothing for so long is hung
    default_epochs: float | None = None  # what a first look takes, when training names no length
    default_steps: int | None = None

    asks_task: ClassVar[bool] = False  # there is a key `task`

    @property
    def as_classes(self) -> str:
        """What to do where targets that are taken for quantities are classes."""
        if self.asks_task and self._target_ is None:
            return "use data.task=classification"
        return AS_INTEGERS

    def __post_init__(self) -> None:
        if not 0 < self.validation < 1:
            raise ConfigError(
                "data.validation", f"{self.validation} is not a share", "use a value in (0, 1)"
            )
        if not 0 < self.most_bad < 1:
            raise ConfigError(
                "data.most_bad", f"{self.most_bad} is not a share", "use a value in (0, 1)"
            )
        if self.validation_samples is not None and self.validation_samples < 1:
            raise ConfigError("data.validation_samples", "would validate nothing", "use 1 or more")
        if self.workers is not None and self.workers < 0:
            raise ConfigError("data.workers", f"{self.workers} is not a count", "use 0 or more")
        if self.prefetch is not None and self.prefetch < 1:
            raise ConfigError("data.prefetch", f"{self.prefetch} is not a count", "use 1 or more")
        if self.default_epochs is not None and not 0 < self.default_epochs < math.inf:
            raise ConfigError("data.default_epochs", f"{self.default_epochs} is no length")
        if not self.timeout_s > 0:
            raise ConfigError("data.timeout_s", "a hung worker would hang the run", "use > 0")


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
    sequence: int = 128  # bytes per sample


@dataclass
class StdlibParts(DataConfig):
    """Passages of the standard library, labelled by the package each one is from."""

    kind: str = "stdlib_parts"
    sequence: int = 128
    parts: list[str] = field(
        default_factory=lambda: [
            "asyncio",
            "email",
            "importlib",
            "multiprocessing",
            "unittest",
            "xml",
        ]
    )


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
    samples: int = 4096
    features: int = 64  # tabular
    channels: int = 3  # images
    image_size: int = 32  # images
    classes: int = 10  # images and tabular
    vocab: int = 256  # tokens
    sequence: int = 256  # tokens


@dataclass
class Tabular(DataConfig):
    """A table of numbers and categories: csv or parquet."""

    kind: str = "tabular"
    path: str = MISSING
    target: str = MISSING  # the column to predict
    task: str = "auto"  # classification | regression | auto (by the target's values)
    ignore: list[str] = field(default_factory=list)  # columns to leave out, such as an id

    asks_task: ClassVar[bool] = True


@dataclass
class Images(DataConfig):
    """A folder per class, images in it."""

    kind: str = "images"
    path: str = MISSING
    image_size: int = 64  # each image is resized and centre-cropped to this square
    channels: int = 3
    augment: bool = False  # random crop and horizontal flip, on training samples


@dataclass
class Text(DataConfig):
    """Labelled text: a csv with a text and a label column, or a folder per class."""

    kind: str = "text"
    path: str = MISSING
    text: str = "text"  # csv column
    target: str = "label"  # csv column
    sequence: int = 256  # bytes per sample


@dataclass
class Tokens(DataConfig):
    """Token ids in `.bin` files (memory-mapped), as nanoGPT writes them."""

    kind: str = "tokens"
    path: str = MISSING  # one file, or a folder with train.bin and val.bin
    vocab: int = MISSING
    dtype: str = "uint16"
    sequence: int = 256


@dataclass
class Arrays(DataConfig):
    """An `.npz` with the inputs and the targets as arrays."""

    kind: str = "arrays"
    path: str = MISSING
    inputs: str = "x"  # names inside the file
    target: str = "y"
    task: str = "auto"

    asks_task: ClassVar[bool] = True


_ALL = (Digits, Cancer, StdlibText, StdlibParts, Synthetic, Tabular, Images, Text, Tokens, Arrays)
OPTIONS: dict[str, type[DataConfig]] = {cls.kind: cls for cls in _ALL}
