"""Batches, data sizes, table columns and row names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from numpy.typing import NDArray

Inputs = Any
"""What a model is called with: a tensor, a tuple (positional) or a dict (by keyword)."""
Batch = tuple[Inputs, Any]
"""Inputs and target; the first dimension of every tensor in them is the sample."""


LABEL_KEYS = ("labels", "label", "target", "targets", "y")
"""Keys of the target in samples that are dicts; the first that is there counts."""
PerTarget = float | tuple[float, ...]
"""A number for all targets, or one for each of several."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the data; a model's constructor gets those that its parameters name."""

    task: str  # classification | language_modelling | regression
    in_features: int | None = None  # values per sample, flattened
    in_channels: int | None = None  # images
    image_size: int | None = None  # images: height and width
    classes: int | None = None  # outputs: classes, or the number of regression targets
    vocab: int | None = None  # tokens: ids are below this
    sequence: int | None = None  # tokens per sample
    class_names: tuple[str, ...] = ()
    target_mean: PerTarget = 0.0  # regression: the objective subtracts it from the targets …
    target_deviation: PerTarget = 1.0  # … and divides by it, so that any unit can be learned
    log_target: bool = False  # regression: their logarithm is taken before
    padding: int | None = None  # id of a tokenizer's padding
    link: str = ""  # regression: exp | sigmoid of the output is in the target's unit; "": itself

    def unscaled(self) -> Sizes:
        """Return the sizes for a model that predicts targets in their own unit."""
        return replace(self, target_mean=0.0, target_deviation=1.0, log_target=False)

    def for_constructor(self) -> dict[str, int]:
        """Return the known sizes by parameter name."""
        names = ("in_features", "in_channels", "image_size", "classes", "vocab", "sequence")
        return {name: size for name in names if (size := getattr(self, name)) is not None}


class TextCodec(Protocol):
    """Turns text into the token ids of a language model, and back."""

    vocab: int  # ids are below this

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens."""

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids."""


@dataclass(frozen=True)
class NumberFormat:
    """Notation of a column's numbers; "" is that of Python."""

    decimal: str = ""  # the sign
    thousands: str = ""
    unit: str = ""  # also a currency or per-cent sign


@dataclass(frozen=True)
class Column:
    """Encoding of a table column as model input, fitted on the training rows.

    A date, or a column with missing values, has several with the same name.
    """

    name: str
    mean: float = 0.0  # subtracted from a number …
    deviation: float = 1.0  # … which is then divided by this
    values: tuple[str, ...] = ()  # the categories ("": missing); none: a number
    part: str = ""  # which number of a date, or `missing`: 1 where there is no value
    fill: float | None = None  # in place of a missing number; None: the mean
    missing: tuple[str, ...] = ()  # texts among the numbers that were read as missing
    others: int = 0  # categories of training rows that share the last input
    form: str = ""  # of a date that is not written as ISO 8601, for strptime
    gaps: int = 0  # training rows without a value
    format: NumberFormat | None = None  # of numbers that are not written as in Python
    declared: bool = False  # by data.types: texts among its numbers or dates are missing values

    @property
    def width(self) -> int:
        """The number of inputs: one per category plus one for others, or 1 for a number."""
        return len(self.values) + 1 if self.values else 1

    @property
    def title(self) -> str:
        """The name in messages, such as `bought (month)`."""
        return f"{self.name} ({self.part})" if self.part else self.name


@dataclass(frozen=True)
class ColumnUse:
    """How a table column was interpreted."""

    column: str
    taken_for: str  # number | category: … | date: … | id | left out
    missing: int | None = None  # cells of training rows; None: not counted


@dataclass(frozen=True)
class RowNames:
    """Names of samples in messages, such as `line 17` of their file."""

    word: str = "sample"
    numbers: NDArray[Any] | None = None  # by sample; None: they count from 0, as samples do
    names: Sequence[str] = ()  # of files, in place of numbers

    def __call__(self, index: int) -> str:
        """Return the name of the sample `index`."""
        if self.names:
            return self.names[index]
        number = index if self.numbers is None else int(self.numbers[index])
        return f"{self.word} {number}"


def call_model(forward: Callable[..., Any], inputs: Inputs) -> Any:
    """Call `forward` with a tensor, positional inputs (tuple) or keyword inputs (dict)."""
    if isinstance(inputs, dict):
        return forward(**inputs)
    return forward(*inputs) if isinstance(inputs, tuple | list) else forward(inputs)


def batch_size_of(target: Any) -> int:
    """Return the batch size: the first dimension of the target's first tensor."""
    while isinstance(target, dict | tuple | list):
        target = next(iter(target.values() if isinstance(target, dict) else target))
    return int(target.shape[0])


def split_batch(samples: int, most: int) -> list[slice]:
    """Split a batch into the fewest slices of at most `most` samples; sizes differ by at most 1.

    Even slices, since BatchNorm cannot train on a remainder of one sample. The first is a largest.
    """
    if not samples:
        return []
    parts = -(-samples // most)
    ends = [-(-samples * i // parts) for i in range(parts + 1)]
    return [slice(start, stop) for start, stop in pairwise(ends)]


def largest_slice(samples: int, most: int) -> int:
    """Return the size of the largest slice of `split_batch(samples, most)`."""
    return -(-samples // max(1, -(-samples // most)))


def slice_rows(value: Any, which: slice) -> Any:
    """Slice every tensor in a nest of tuples, lists and dicts by rows; returns views."""
    if isinstance(value, dict):
        return {key: slice_rows(item, which) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(slice_rows(item, which) for item in value)
    return value[which]
