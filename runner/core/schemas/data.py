"""The `data` config group: one dataclass per option."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from typing import Any

from omegaconf import MISSING

from runner.core.bounds import Bounded, bounded
from runner.core.errors import ConfigError

LIMIT_KEYS = ("most_columns", "most_expansion", "most_cell_mb")
"""Keys of `data` that refuse files, and have no effect on others."""
LOADING_KEYS = (
    *("workers", "prefetch", "pin_memory", "persistent_workers", "device_prefetch"),
    *("timeout_s", "worker_restarts", "validation_samples", "default_epochs", "default_steps"),
    *("changed", "validation_target", *LIMIT_KEYS),
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

TEXT_HEAD_BYTES = 8192  # of a text, by which it is judged to be one
TOKEN_BYTES = 256  # of text that are read for a token; the longest words have fewer

FIXED_SPLIT = ("stdlib_text", "stdlib_parts", "tokens")
"""Kinds of data that are split by file or at a position, not by `data.split`."""

EXAMPLE_TIME = datetime(2024, 5, 31, 13, 45, 59, tzinfo=UTC)
ENCODED_NAME = "utf8_"  # begins names of columns that Hydra cannot read, as hexadecimal UTF-8

CLASS_TARGET_FIX = "return whole numbers (int64) as targets, or use data.task=classification"

LABELS_UNKNOWN = (
    "needs the class of each sample before it is read (your own data set: attribute `targets`)"
)


class BadSamples(Enum):
    """Treatment of unusable samples."""

    stop = "stop"  # the first one is an error with its name
    drop = "drop"  # counted, named and left out


class DataChanged(Enum):
    """Treatment of data files that changed since a run was trained."""

    error = "error"  # a resumed or evaluated run stops
    accept = "accept"  # it goes on with the new files


class TargetTransform(Enum):
    """What the model predicts in place of a number; predictions are in its unit."""

    none = "none"  # the target itself
    standardise = "standardise"  # (target - mean) / standard deviation, of the training samples
    log = "log"  # the same of log(target); targets must be above 0


class Missing(Enum):
    """Treatment of missing input values in a table."""

    mean = "mean"  # number: the training rows' mean, plus an input that flags the gap …
    median = "median"  # … or their median; text: a category of its own
    category = "category"  # as mean; the flag makes the gaps a group of their own
    drop = "drop"  # leave out such rows, before the split
    error = "error"  # the first ones are an error with their names


class ColumnType(Enum):
    """The type of a table's column."""

    number = "number"
    text = "text"  # a category
    date = "date"
    id = "id"  # not an input; identifies the rows in predictions


def sign_of(word: str | None) -> str | None:
    """Return the sign that `word` names; other texts unchanged."""
    return SIGNS.get(word or "", word)


def decode_name(name: str) -> str:
    """Return the name that `runner.core.config.column_names` encoded; other names unchanged."""
    try:
        digits = name.removeprefix(ENCODED_NAME)
        return name if digits == name else bytes.fromhex(digits).decode()
    except ValueError:
        return name


class SplitRule(Enum):
    """Which samples are held out for validation."""

    random = "random"
    stratified = "stratified"  # the same share of each class
    group = "group"  # rows with equal data.split_by stay together
    time = "time"  # the last rows by data.split_by


@dataclass
class DataConfig(Bounded, key="data"):
    """Keys of every data set: splitting, order and loading."""

    kind: str = MISSING  # set by `data=NAME`: the built-in data set
    # your dataset class or function: map-style, or a stream (__iter__); null: a built-in one
    _target_: str | None = None
    # stream to validate on, made with the arguments of `_target_`; null: _target_ with
    # split=validation, if its constructor has `split`
    validation_target: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)  # arguments for `_target_`
    validation: float = bounded(0.2, above=0, below=1)  # share of samples held out for validation
    validation_samples: int | None = bounded(None, min=1)  # most samples to validate on; null: all
    # group, time: by split_by; null: stratified for classes of built-in data, else random
    split: SplitRule | None = None
    folds: int | None = bounded(None, min=2)  # number of cross-validation folds; null: one split
    fold: int | None = bounded(None, min=0)  # held-out fold, 0 to folds - 1; required with folds
    split_seed: int = 0  # seed of the split (synthetic: and of the data), independent of `seed`
    bad_samples: BadSamples = BadSamples.stop  # stop: an unusable sample is an error; drop: omit it
    # largest share of samples that may be dropped, and of a column's cells with another type
    most_bad: float = bounded(0.1, above=0, below=1)
    shuffle: bool = True  # training: a new random order in each epoch; false: as stored
    # balanced: equally many training samples per class, rare ones repeated; null: each sample once
    sampler: str | None = None
    drop_last: bool = False  # training: drop an epoch's incomplete last batch
    # loader processes; null: 0 for data in memory, else chosen by fetch time and cores
    workers: int | None = bounded(None, min=0)
    prefetch: int | None = bounded(None, min=1)  # batches fetched ahead per worker; null: 2
    pin_memory: bool | None = None  # batches in pinned host memory; null: with CUDA
    persistent_workers: bool | None = None  # keep workers alive across epochs; null: true
    device_prefetch: bool | None = None  # copy to the GPU on its own stream; null: with pipeline
    timeout_s: float = bounded(300.0, above=0)  # seconds until a silent worker counts as hung
    worker_restarts: int = bounded(2, min=0)  # replacements of dead or hung workers, then an error
    # epochs if neither training.steps nor training.epochs is set; null: 10
    default_epochs: float | None = bounded(None, above=0)
    default_steps: int | None = None  # likewise in steps, instead of default_epochs; null: unused

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.validation_target is not None and self._target_ is None:
            raise ConfigError("data.validation_target", "needs data._target_", "leave it out")
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
            folds = ",".join(map(str, range(min(self.folds, 5)))) + ",…" * (self.folds > 5)
            fix = f"to train with each: -m data.fold={folds}"
            raise ConfigError("data.fold", problem.replace("None", "null"), fix)

    def _check_split(self) -> None:
        rule, split_by = self.split and self.split.name, getattr(self, "split_by", None)
        kind = self.kind if self._target_ is None else "own"
        for key in ("split", "folds"):
            if kind in FIXED_SPLIT and getattr(self, key) is not None:
                problem = f"data={kind} has its own split"
                raise ConfigError(f"data.{key}", problem, "leave it out")
        if rule in ("group", "time"):
            if kind not in ("tabular", "text"):
                problem = f"{rule} needs a table with columns"
                raise ConfigError("data.split", problem, "use stratified or random")
            if not split_by:
                fix = f"data.split_by=COLUMN data.split={rule}"
                raise ConfigError("data.split_by", f"is required by data.split={rule}", fix)
            if split_by == getattr(self, "target", None):
                fix = "name another column"
                raise ConfigError("data.split_by", f"{split_by!r} is the target", fix)
        elif split_by:
            problem = f"is for data.split=group or time, got {rule or 'null'}"
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


STDLIB_PARTS = ("asyncio", "email", "importlib", "multiprocessing", "unittest", "xml")


@dataclass
class StdlibParts(DataConfig):
    """Passages of the Python standard library, labelled by their package."""

    kind: str = "stdlib_parts"
    sequence: int = bounded(128, min=1)  # bytes per passage
    parts: list[str] = field(default_factory=lambda: [*STDLIB_PARTS])  # package names: the classes


class SyntheticForm(Enum):
    """Kinds of synthetic samples."""

    images = "images"
    tokens = "tokens"
    tabular = "tabular"


@dataclass
class Synthetic(DataConfig):
    """Generated data of any size with a learnable pattern, for benchmarks."""

    kind: str = "synthetic"
    form: SyntheticForm = SyntheticForm.images  # tokens: language modelling; others: classification
    samples: int = bounded(4096, min=2)  # number of samples, training and validation together
    features: int = bounded(64, min=1)  # tabular: inputs per sample
    channels: int = bounded(3, min=1)  # images: channels
    image_size: int = bounded(32, min=1)  # images: side in pixels
    classes: int = bounded(10, min=2)  # images, tabular: number of classes
    vocab: int = bounded(256, min=2)  # tokens: number of distinct ids
    sequence: int = bounded(256, min=1)  # tokens: ids per sample


@dataclass
class FromFiles(DataConfig):
    """Your data in files."""

    path: str = MISSING  # file or folder of the samples
    validation_path: str | None = None  # validation samples; null: found in or split off data.path
    # test samples, evaluated once by the best checkpoint; null: a test split in data.path, if any
    test_path: str | None = None
    # files changed since the resumed or evaluated run was trained: error, or accept
    changed: DataChanged = DataChanged.error

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.validation_path is not None:
            for key in ("split", "folds"):
                if getattr(self, key) is not None:
                    problem = "splits data.path, but data.validation_path is set, too"
                    raise ConfigError(f"data.{key}", problem, "leave one of them out")


@dataclass
class CsvFormat(FromFiles):
    """The format of a csv; null: detected, and listed among the automatic choices."""

    encoding: str | None = None  # text encoding; null: UTF-16 with a BOM, UTF-8, else cp1252
    separator: str | None = None  # cell separator; null: most frequent of , ; tab | in the header
    most_columns: int | None = bounded(100_000, min=1)  # most columns of a table; null: no limit
    # most bytes that a compressed csv decompresses to, per byte on disk; null: no limit
    most_expansion: float | None = bounded(100.0, min=1)
    # most MB of a cell; a text that is trained on is cut to data.sequence instead; null: no limit
    most_cell_mb: float | None = bounded(1.0, above=0)

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

    @property
    def most_cell_bytes(self) -> float | None:
        """`most_cell_mb` in bytes."""
        return None if self.most_cell_mb is None else self.most_cell_mb * 1e6


@dataclass
class Tabular(CsvFormat):
    """A table of numbers and categories, as csv or parquet."""

    kind: str = "tabular"
    target: str = MISSING  # column to predict
    task: str = "auto"  # classification, regression or auto (by the target's values)
    # of numbers: none, standardise, log (then standardise); null: standardise, none for own losses
    target_transform: TargetTransform | None = None
    ignore: list[str] = field(default_factory=list)  # columns that are not inputs
    split_by: str | None = None  # column for data.split=group or time
    # mean, median: fill and flag (text: a category); category: as mean; drop: the row; error: stop
    missing: Missing = Missing.mean
    # column types, number, text, date or id: '+data.types={age: number}'; others are detected
    types: dict[str, ColumnType] = field(default_factory=dict)
    # formats of dates in strptime's codes: '+data.date_formats={when: "%d/%b/%Y:%H:%M:%S %z"}'
    date_formats: dict[str, str] = field(default_factory=dict)
    categories: int = bounded(256, min=1)  # most categories per column; the rarest share one input
    decimal: str | None = None  # decimal sign, point or comma; null: as in training, or detected
    thousands: str | None = None  # thousands sign, e.g. comma; null: as in training, or detected

    def __post_init__(self) -> None:
        super().__post_init__()
        self.types = {decode_name(name): kind for name, kind in self.types.items()}
        self.date_formats = {decode_name(n): form for n, form in self.date_formats.items()}
        for name, form in self.date_formats.items():
            self._check_format(name, form)
        decimal, thousands = sign_of(self.decimal), sign_of(self.thousands)
        if decimal not in (None, ".", ","):
            raise ConfigError("data.decimal", f"must be point or comma, got {self.decimal!r}")
        if thousands not in (None, ",", ".", "'", "’", " ", "_"):
            problem = f"must be comma, point, apostrophe or space, got {self.thousands!r}"
            raise ConfigError("data.thousands", problem)
        if thousands is not None and thousands == decimal:
            problem = f"and data.decimal are both {self.thousands!r}"
            raise ConfigError("data.thousands", problem, "use another sign for one of them")

    def _check_format(self, name: str, form: str) -> None:
        try:
            datetime.strptime(EXAMPLE_TIME.strftime(form), form)
            is_known = "%" in form
        except ValueError:
            is_known = False
        if not is_known:
            fix = "use strptime's codes, e.g. '%d/%b/%Y %H:%M:%S %z'"
            raise ConfigError("data.date_formats", f"no format of dates: {form!r} ({name})", fix)
        if self.types.get(name, ColumnType.date) is not ColumnType.date:
            problem = f"{name!r} is a {self.types[name].name} by data.types"
            raise ConfigError("data.date_formats", problem, "leave one of them out")


@dataclass
class Images(FromFiles):
    """Images in one folder per class."""

    kind: str = "images"
    split_folders: bool = True  # folders train, val, test in data.path are splits, not classes
    image_size: int = bounded(64, min=1)  # side in pixels, after a centre crop to a square
    channels: int = 3  # 3: RGB, 1: greyscale
    augment: bool = False  # training: random crop and horizontal flip
    randaugment: int = bounded(0, min=0)  # training: RandAugment operations per image; 0: none
    magnitude: float = bounded(9.0, min=0, max=30)  # strength of RandAugment's operations, of 30
    # training: blend each image with another one (mixup): alpha of the Beta distribution of the
    # shares, 0: off; if cutmix is on, too, one of both is drawn per image
    mixup: float = bounded(0.0, min=0)
    cutmix: float = bounded(0.0, min=0)  # training: paste a patch of another image; alpha, 0: off
    cache_mb: int = bounded(512, min=0)  # MiB of decoded images in memory, ≤ 1/4 of what is free

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.channels not in (1, 3):
            raise ConfigError("data.channels", f"must be 1 (grey) or 3, got {self.channels}")


@dataclass
class Text(CsvFormat):
    """Labelled text: a csv with a text and a label column, or a folder per class."""

    kind: str = "text"
    split_folders: bool = True  # folders train, val, test in data.path are splits, not classes
    text: str = "text"  # csv column of the text
    target: str = "label"  # csv column of the label
    split_by: str | None = None  # column for data.split=group or time
    sequence: int = bounded(256, min=1)  # most bytes per text, or tokens with a tokenizer
    tokenizer: str | None = None  # Hugging Face folder; null: bytes; model=hf sets its own

    @property
    def text_bytes(self) -> int:
        """How much of a text is read: enough for `sequence` bytes or tokens, and to judge it."""
        if self.tokenizer is None:
            return max(TEXT_HEAD_BYTES, self.sequence)
        return max(8 * TEXT_HEAD_BYTES, TOKEN_BYTES * self.sequence)


@dataclass
class Tokens(FromFiles):
    """Token ids in `.bin` files (memory-mapped), as nanoGPT writes them, or text with a tokenizer.

    `path` is one file, or a folder with train.bin and val.bin, or train.txt and val.txt.
    """

    kind: str = "tokens"
    vocab: int | None = None  # ids are below this; null: the tokenizer's size
    tokenizer: str | None = None  # Hugging Face folder, for text files; model=hf sets its own
    dtype: str = "uint16"  # dtype of the ids in .bin files: uint8, … uint64, int8, … int64
    sequence: int = bounded(256, min=1)  # ids per sample


@dataclass
class TextLM(FromFiles):
    """Your own text for a language model.

    `path` is a text file or a folder of .txt files; with a train.txt in it, val.txt and test.txt
    are the other splits.
    """

    kind: str = "text_lm"
    # Hugging Face folder or tokenizer.json; null: bytes; model=hf sets its own
    tokenizer: str | None = None
    sequence: int = bounded(128, min=1)  # bytes per sample, or tokens with a tokenizer


@dataclass
class Arrays(FromFiles):
    """An `.npz` file with an array of inputs and an array of targets."""

    kind: str = "arrays"
    inputs: str = "x"  # name of the input array
    target: str = "y"  # name of the target array
    task: str = "auto"  # classification, language_modelling, regression or auto (by the arrays)
    # of numbers: none, standardise, log (then standardise); null: standardise, none for own losses
    target_transform: TargetTransform | None = None


_ALL = (
    *(Digits, Cancer, StdlibText, StdlibParts, Synthetic),
    *(Tabular, Images, Text, TextLM, Tokens, Arrays),
)
OPTIONS: dict[str, type[DataConfig]] = {cls.kind: cls for cls in _ALL}
