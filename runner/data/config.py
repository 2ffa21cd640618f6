"""The `data` config group: one dataclass per option."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING

from runner.bounds import bounded, check_bounds
from runner.errors import ConfigError

LOADING = (
    *("workers", "prefetch", "pin_memory", "persistent_workers", "device_prefetch"),
    *("timeout_s", "worker_restarts", "validation_samples", "default_epochs", "default_steps"),
)
"""Keys of `data` that do not change the training samples."""

SIGNS = {
    "comma": ",",
    "semicolon": ";",
    "tab": "\t",
    "pipe": "|",
    "space": " ",
    "point": ".",
    "apostrophe": "'",
    "\\t": "\t",
}
"""Words for signs that have a special meaning on a command line."""

FIXED_SPLIT = ("stdlib_text", "stdlib_parts", "tokens")
"""Kinds of data that are split by file or at a position, not by `data.split`."""

AS_CLASSES = "return whole numbers (int64) as targets, or use data.task=classification"

UNCOUNTED = (
    "needs the class of each sample before it is read (your own data set: attribute `targets`)"
)


class BadSamples(Enum):
    """What is done about samples that cannot be used."""

    stop = "stop"  # the first one is an error that names it
    drop = "drop"  # they are counted, named and left out


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


def sign_of(word: str | None) -> str | None:
    """Return the sign that `word` names; other texts unchanged."""
    return SIGNS.get(word or "", word)


class SplitRule(Enum):
    """Which samples are held out for validation."""

    random = "random"
    stratified = "stratified"  # the same share of each class
    group = "group"  # rows with one value of data.split_by stay together
    time = "time"  # the last rows by data.split_by


@dataclass
class DataConfig:
    """What every data set has: how it is split, ordered and loaded."""

    kind: str = MISSING  # which of our options this is
    _target_: str | None = None  # a map-style dataset of the user's own, in place of ours
    arguments: dict[str, Any] = field(default_factory=dict)  # what its constructor gets
    validation: float = bounded(0.2, above=0, below=1)  # share held out
    validation_samples: int | None = bounded(None, min=1)  # validate on so many; None: all
    split: SplitRule | None = None  # None: stratified where samples have a class, else random
    folds: int | None = bounded(None, min=2)  # parts of a cross-validation, in place of validation
    fold: int | None = bounded(None, min=0)  # which of them is held out: 0 to folds - 1
    split_seed: int = 0  # apart from `seed`, so that seeds are compared on the same split
    bad_samples: BadSamples = BadSamples.stop  # what becomes of samples that cannot be used
    most_bad: float = bounded(0.1, above=0, below=1)  # a larger share is an error all the same
    shuffle: bool = True
    # balanced: training draws each class equally often, rare samples repeatedly; same epoch length
    sampler: str | None = None
    drop_last: bool = False
    workers: int | None = bounded(None, min=0)  # None: chosen from where the data lies
    prefetch: int | None = bounded(None, min=1)  # batches each worker holds ready
    pin_memory: bool | None = None
    persistent_workers: bool | None = None
    device_prefetch: bool | None = None  # copy to the GPU on a stream of its own; None: pipeline's
    timeout_s: float = bounded(300.0, above=0)  # a worker that is silent for so long hangs
    worker_restarts: int = bounded(2, min=0)  # workers replaced, that died or hang; then an error
    default_epochs: float | None = bounded(None, above=0)  # when training names no length
    default_steps: int | None = None

    def __post_init__(self) -> None:
        check_bounds(self, "data")
        if self.sampler not in (None, "balanced"):
            raise ConfigError("data.sampler", f"must be balanced or null, got {self.sampler!r}")
        if self.sampler is not None and not self.shuffle:
            problem = "needs a random order, but data.shuffle=false"
            raise ConfigError("data.sampler", f"{self.sampler} {problem}", "leave one of them out")
        self._check_split()
        self._check_folds()

    @property
    def validation_fold(self) -> tuple[int, int] | None:
        """The held-out fold and the number of folds, or None."""
        return None if self.folds is None or self.fold is None else (self.fold, self.folds)

    def _check_folds(self) -> None:
        if self.folds is None and self.fold is not None:
            raise ConfigError("data.folds", f"is required by data.fold={self.fold}", "data.folds=5")
        if self.folds is not None and (self.fold is None or self.fold >= self.folds):
            problem = f"must be 0 to {self.folds - 1} with data.folds={self.folds}, got {self.fold}"
            every = ",".join(map(str, range(min(self.folds, 5)))) + ",…" * (self.folds > 5)
            fix = f"to train with each: -m data.fold={every}"
            raise ConfigError("data.fold", problem.replace("None", "null"), fix)

    def _check_split(self) -> None:
        name, by = self.split and self.split.name, getattr(self, "split_by", None)
        kind = self.kind if self._target_ is None else "own"
        for key in ("split", "folds"):
            if kind in FIXED_SPLIT and getattr(self, key) is not None:
                problem = f"data={kind} has its own split"
                raise ConfigError(f"data.{key}", problem, "leave it out")
        if name in ("group", "time"):
            if kind not in ("tabular", "text"):
                problem = f"{name} needs a table with columns"
                raise ConfigError("data.split", problem, "use stratified or random")
            if not by:
                fix = f"data.split_by=COLUMN data.split={name}"
                raise ConfigError("data.split_by", f"is required by data.split={name}", fix)
            if by == getattr(self, "target", None):
                fix = "name another column"
                raise ConfigError("data.split_by", f"{by!r} is the target", fix)
        elif by:
            problem = f"is for data.split=group or time, got {name or 'null'}"
            raise ConfigError("data.split_by", problem, "add data.split=group or data.split=time")


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
class FromFiles(DataConfig):
    """Data of the user's, in files."""

    path: str = MISSING
    validation_path: str | None = None  # validation samples; all of data.path is trained on then
    test_path: str | None = None  # evaluated once, by the best checkpoint, when training has ended

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.validation_path is not None:
            for key in ("split", "folds"):
                if getattr(self, key) is not None:
                    problem = "splits data.path, but data.validation_path is set, too"
                    raise ConfigError(f"data.{key}", problem, "leave one of them out")


@dataclass
class CsvFormat(FromFiles):
    """How a csv is written; null: recognised, and named in what was chosen automatically."""

    encoding: str | None = None  # of its texts; null: UTF-16 by its mark, UTF-8, else cp1252
    separator: str | None = None  # of cells, or `tab`; null: counted in the header: , ; tab or |

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            "".encode(self.encoding or "utf-8")
        except (LookupError, ValueError):
            problem = f"unknown text encoding {self.encoding!r}"
            raise ConfigError("data.encoding", problem, "use e.g. cp1252 or utf-16") from None
        separator = sign_of(self.separator)
        if separator is not None and (len(separator) != 1 or not separator.isascii()):
            problem = f"must be one ASCII character, or {', '.join(SIGNS)}, got {separator!r}"
            raise ConfigError("data.separator", problem)
        if separator in ('"', "\r", "\n"):
            raise ConfigError("data.separator", "a quote or a line break cannot separate cells")


@dataclass
class Tabular(CsvFormat):
    """A table of numbers and categories: csv or parquet."""

    kind: str = "tabular"
    target: str = MISSING  # the column to predict
    task: str = "auto"  # classification | regression | auto (by the target's values)
    ignore: list[str] = field(default_factory=list)  # columns to leave out
    split_by: str | None = None  # column for data.split=group or time
    missing: Missing = Missing.mean  # what becomes of missing values
    types: dict[str, ColumnType] = field(default_factory=dict)  # '+data.types={age: number}'
    categories: int = bounded(256, min=1)  # most of a column; the rarest share one input
    decimal: str | None = None  # point or comma; null: as in training, a comma where certain
    thousands: str | None = None  # such as comma in 1,234; null: as in training, where certain

    def __post_init__(self) -> None:
        super().__post_init__()
        decimal, thousands = sign_of(self.decimal), sign_of(self.thousands)
        if decimal not in (None, ".", ","):
            raise ConfigError("data.decimal", f"must be point or comma, got {self.decimal!r}")
        if thousands not in (None, ",", ".", "'", "’", " ", "_"):
            problem = f"must be comma, point, apostrophe or space, got {self.thousands!r}"
            raise ConfigError("data.thousands", problem)
        if thousands is not None and thousands == decimal:
            problem = f"and data.decimal are both {self.thousands!r}"
            raise ConfigError("data.thousands", problem, "use another sign for one of them")


@dataclass
class Images(FromFiles):
    """A folder per class, images in it."""

    kind: str = "images"
    split_folders: bool = True  # train, val and test in data.path are parts, and no classes
    image_size: int = bounded(64, min=1)  # each image is resized and centre-cropped to this square
    channels: int = 3  # 3: colour, 1: grey
    augment: bool = False  # random crop and horizontal flip, on training samples
    randaugment: int = bounded(0, min=0)  # further random operations on each training sample …
    magnitude: float = bounded(9.0, min=0, max=30)  # … and how strong these are
    # blend each training sample with another one, and their classes: the parameter of the beta
    # distribution that the shares are drawn from; of both, one or the other
    mixup: float = bounded(0.0, min=0)
    cutmix: float = bounded(0.0, min=0)
    cache_mb: int = bounded(512, min=0)  # of decoded images that are kept in memory

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.channels not in (1, 3):
            raise ConfigError("data.channels", f"must be 1 (grey) or 3, got {self.channels}")


@dataclass
class Text(CsvFormat):
    """Labelled text: a csv with a text and a label column, or a folder per class."""

    kind: str = "text"
    split_folders: bool = True  # train, val and test in data.path are parts, and no classes
    text: str = "text"  # csv column
    target: str = "label"  # csv column
    split_by: str | None = None  # column for data.split=group or time
    sequence: int = bounded(256, min=1)  # bytes per sample; tokens, with a tokenizer
    tokenizer: str | None = None  # a Hugging Face folder; null: bytes. model=hf names its own


@dataclass
class Tokens(FromFiles):
    """Token ids in `.bin` files (memory-mapped), as nanoGPT writes them.

    `path` is one file, or a folder with train.bin and val.bin; with a tokenizer also text: one .txt
    file, or train.txt and val.txt.
    """

    kind: str = "tokens"
    vocab: int | None = None  # ids are below this; null: the tokenizer's
    tokenizer: str | None = None  # a Hugging Face folder; model=hf names its own
    dtype: str = "uint16"
    sequence: int = bounded(256, min=1)


@dataclass
class Arrays(FromFiles):
    """An `.npz` with the inputs and the targets as arrays."""

    kind: str = "arrays"
    inputs: str = "x"  # names inside the file
    target: str = "y"
    task: str = "auto"


_ALL = (Digits, Cancer, StdlibText, StdlibParts, Synthetic, Tabular, Images, Text, Tokens, Arrays)
OPTIONS: dict[str, type[DataConfig]] = {cls.kind: cls for cls in _ALL}
