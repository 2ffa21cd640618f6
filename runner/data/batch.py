"""What data are to a run: batches, where they come from, and what is known of their sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

Inputs = Any
"""What a model is called with: a tensor, a tuple (positional) or a dict (by keyword)."""
Batch = tuple[Inputs, Any]
"""Inputs and target; the first dimension of every tensor in them is the sample."""


@dataclass(frozen=True)
class Sizes:
    """What the data states about itself; a model's constructor gets those that it names."""

    task: str  # classification | language_modelling | regression
    in_features: int | None = None  # values per sample, flattened
    in_channels: int | None = None  # images
    image_size: int | None = None  # images: height and width
    classes: int | None = None  # outputs: classes, or the number of regression targets
    vocab: int | None = None  # tokens: ids are below this
    sequence: int | None = None  # tokens per sample
    class_names: tuple[str, ...] = ()
    target_mean: float = 0.0  # regression: what the objective takes off the targets …
    target_deviation: float = 1.0  # … and divides them by, so that any unit can be learned
    padding: int | None = None  # the id that fills up texts of a tokenizer

    def for_constructor(self) -> dict[str, int]:
        """The sizes that are known, by the names a constructor may ask for."""
        names = ("in_features", "in_channels", "image_size", "classes", "vocab", "sequence")
        return {name: size for name in names if (size := getattr(self, name)) is not None}


@dataclass(frozen=True)
class Column:
    """What the model gets of a table's column, as fitted on the training rows.

    A date, or a column with missing values, has several of the same name.
    """

    name: str
    mean: float = 0.0  # taken off a number …
    deviation: float = 1.0  # … which is then divided by this
    values: tuple[str, ...] = ()  # the categories ("": missing); none: a number
    part: str = ""  # which number of a date, or `missing`: 1 where there is no value
    fill: float | None = None  # in place of a missing number; None: the mean
    missing: tuple[str, ...] = ()  # texts among the numbers that were read as missing
    others: int = 0  # categories of training rows that share the last input
    form: str = ""  # of a date that is not written as ISO 8601, for strptime
    gaps: int = 0  # training rows without a value

    @property
    def width(self) -> int:
        """How many of the inputs: one for each category and one for any other, or the number."""
        return len(self.values) + 1 if self.values else 1

    @property
    def title(self) -> str:
        """What a message calls it: `bought (month)`."""
        return f"{self.name} ({self.part})" if self.part else self.name


@dataclass(frozen=True)
class ColumnUse:
    """What a table's column was taken for."""

    column: str
    taken_for: str  # number | category: … | date: … | id | left out
    missing: int | None = None  # cells of training rows; None: not counted


@dataclass(frozen=True)
class RowNames:
    """What a message calls a sample: `line 17` of the file that it was read from."""

    word: str = "sample"
    numbers: NDArray[Any] | None = None  # by sample; None: they count from 0, as samples do
    names: Sequence[str] = ()  # of files, in place of numbers

    def __call__(self, index: int) -> str:
        """The name of that sample."""
        if self.names:
            return self.names[index]
        number = index if self.numbers is None else int(self.numbers[index])
        return f"{self.word} {number}"


def call(forward: Callable[..., Any], inputs: Inputs) -> Any:
    """The model's output: inputs go in as one tensor, by position (tuple) or by name (dict)."""
    if isinstance(inputs, dict):
        return forward(**inputs)
    return forward(*inputs) if isinstance(inputs, tuple | list) else forward(inputs)


def count(target: Any) -> int:
    """Samples in a batch, from its target."""
    while isinstance(target, dict | tuple | list):
        target = next(iter(target.values() if isinstance(target, dict) else target))
    return int(target.shape[0])


def split(samples: int, most: int) -> list[slice]:
    """The fewest parts of at most `most` samples, in order; their sizes differ by one at most.

    Even parts, since BatchNorm cannot train on a remainder of one sample. The first is a largest.
    """
    if not samples:
        return []
    parts = -(-samples // most)
    ends = [-(-samples * i // parts) for i in range(parts + 1)]
    return [slice(start, stop) for start, stop in pairwise(ends)]


def largest_part(samples: int, most: int) -> int:
    """Samples in the largest part of so many that are split into parts of at most `most`."""
    return -(-samples // max(1, -(-samples // most)))


def rows(value: Any, which: slice) -> Any:
    """The same rows of every tensor in a nest of tuples, lists and dicts; views, not copies."""
    if isinstance(value, dict):
        return {key: rows(item, which) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(rows(item, which) for item in value)
    return value[which]
