"""One row of numbers that says of a batch all that is looked at, computed where the batch lies."""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from runner.batch import Batch
from runner.nest import placed

LARGEST = torch.finfo(torch.float32).max
MOST_LEAVES = 8  # tensors of a batch of which more than the ends is taken
MOST_FEATURES = 4096  # of a sample that its projection is of
MOST_CLASSES = 256  # that are counted
TINY = 1e-30
ROUNDED = 1e-4  # of the mean square: a variance below it is lost in rounding
MARKS = 8  # order statistics of a batch's projections
STATS = ("low", "high", "mean", "deviation")
LEAF = re.compile(  # of a key, in its text
    r"""\(('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"), torch\.(\w+), ([0-9]{1,3})\)"""
)

Key = tuple[tuple[str, torch.dtype, int], ...]
"""Name, type and dimensions of each leaf: what batches of one plan have in common."""


@dataclass(frozen=True)
class Labels:
    """What is known of labels and tokens."""

    classes: int | None = None  # labels are below it
    ignored: int | None = None  # a label that stands for none
    vocab: int | None = None  # token ids are below it


@dataclass(frozen=True)
class Entry:
    """What one number of a row is."""

    leaf: str
    stat: str  # one of STATS


@dataclass
class Plan:
    """Which numbers are taken of batches of one form."""

    key: Key
    form: str  # the same as text, for checkpoints
    entries: list[Entry] = field(default_factory=list)
    values: list[str] = field(default_factory=list)  # leaves of which STATS or the ends are taken
    brief: set[str] = field(default_factory=set)  # those of which the ends alone are
    learned: list[str] = field(default_factory=list)  # those that have a usual: no masks, no types
    labels: str | None = None  # leaf of classes
    tokens: str | None = None  # leaf of token ids below a known number of words
    text: str | None = None  # leaf of token ids [samples, length]
    main: str | None = None  # leaf that the batch is known again by
    shares: int = 0  # classes that are counted

    @property
    def width(self) -> int:
        """Numbers before the counts and the marks."""
        return len(self.entries)

    @property
    def length(self) -> int:
        """All numbers of a row: with the counts, the marks and how many samples differ."""
        return self.width + self.shares + (MARKS + 1 if self.main in self.values else 0)


def leaves(batch: Batch) -> dict[str, Tensor]:
    """The dense tensors of a batch by name: inputs, inputs.key, inputs[1], target."""
    return {n: t for n, t in _named(batch) if is_dense(t) and t.ndim and t.numel()}


def passed_over(batch: Batch) -> list[str]:
    """The tensors of a batch that are not looked at: sparse, nested and quantized ones."""
    return [name for name, tensor in _named(batch) if not is_dense(tensor)]


def _named(batch: Batch) -> Iterator[tuple[str, Tensor]]:
    yield from placed(batch[0], "inputs")
    yield from placed(batch[1], "target")


def is_dense(tensor: Tensor) -> bool:
    """Whether all of torch can compute with it."""
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)


def as_real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs, [..., 2]; others as they are."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def mapped(value: Any, change: dict[str, Tensor], name: str) -> Any:
    """The same nest with the leaves that `change` names replaced."""
    if isinstance(value, dict):
        return {key: mapped(item, change, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(mapped(item, change, f"{name}[{i}]") for i, item in enumerate(value))
    return change.get(name, value)


def exchanged(batch: Batch, change: dict[str, Tensor]) -> Batch:
    """The batch with the leaves that `change` names replaced."""
    return mapped(batch[0], change, "inputs"), mapped(batch[1], change, "target")


def key_of(found: dict[str, Tensor]) -> Key:
    """What is told of a batch without its lengths and its values."""
    return tuple((name, tensor.dtype, tensor.ndim) for name, tensor in found.items())


def key_in(form: str) -> Key | None:
    """The key that has this text; None: it is the text of none."""
    try:
        key: Key = tuple(
            (literal_eval(name), getattr(torch, dtype, torch.bool), int(ndim))
            for name, dtype, ndim in LEAF.findall(form)
        )
    except (SyntaxError, ValueError):  # of a name
        return None
    return key if key and str(key) == form else None


def is_index(dtype: torch.dtype) -> bool:
    """Whether integers are of that type."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def plan_of(key: Key, known: Labels) -> Plan:
    """Which numbers are worth taking of batches like this one.

    Lengths tell nothing here: a run that goes on with a short batch has the same plan.
    """
    plan = Plan(key, str(key))
    inputs = [name for name, _, _ in key if name.startswith("inputs")]
    if inputs:
        plan.main = "inputs.input_ids" if "inputs.input_ids" in inputs else inputs[0]
    for place, (name, dtype, ndim) in enumerate(key):
        if dtype is torch.bool:
            continue
        if name == "target" and is_index(dtype):
            if known.classes:
                plan.labels = name
                plan.entries += [Entry(name, "low"), Entry(name, "high")]
            if known.classes and known.classes <= MOST_CLASSES and ndim == 1:
                plan.shares = known.classes
            continue
        if place >= MOST_LEAVES and name != plan.main:
            if not is_index(dtype):  # a whole number is finite
                plan.values.append(name)
                plan.brief.add(name)
                plan.entries += [Entry(name, "low"), Entry(name, "high")]
            continue
        plan.values.append(name)
        if name == plan.main or not is_index(dtype):
            plan.learned.append(name)
        plan.entries += [Entry(name, stat) for stat in STATS]
        if name == plan.main and is_index(dtype):
            plan.tokens = name if known.vocab else None
            named = name == "inputs.input_ids"
            plan.text = name if ndim == 2 and (known.vocab or named) else None
    return plan


class Measure:
    """Takes the numbers. On an accelerator nothing is read; a dozen small kernels are queued."""

    def __init__(self, known: Labels) -> None:
        self.known = known
        self.directions: dict[tuple[int, torch.device, torch.dtype], Tensor] = {}
        self.places: dict[tuple[int, torch.device], Tensor] = {}
        self.classes: Tensor | None = None  # from 0 to the number of them

    @torch.no_grad()
    def row(self, found: dict[str, Tensor], plan: Plan) -> Tensor:
        """[width + shares + marks + 1] numbers: float32, where the batch lies."""
        scalars: list[Tensor] = []
        marks: list[Tensor] = []
        for name in dict.fromkeys(entry.leaf for entry in plan.entries):
            tensor = found[name]
            if name == plan.labels:
                scalars += self.of_labels(tensor)
                continue
            values = as_real(tensor)
            values = values if values.dtype in (torch.float32, torch.float64) else values.float()
            flat = values.reshape(-1)
            low, high = torch.aminmax(flat)  # NaN and Inf come through, in one pass
            if name in plan.brief:
                scalars += [low, high]
                continue
            mean, deviation = moments(flat, torch.maximum(-low, high))
            # in deviations: one value of a heavy tail moves both
            scalars += [low, high, mean / (deviation + TINY), deviation]
            if name == plan.main:
                marks = self._marks(values)
        parts = [torch.stack(scalars)] if scalars else []
        if plan.shares and plan.labels is not None:
            parts.append(self._counts(found[plan.labels], plan.shares))
        parts += marks
        row = torch.cat(parts) if parts else torch.zeros(0)
        if row.dtype is torch.float64:  # what float32 does not hold is no Inf for that
            row = torch.where(row.isfinite(), row.clamp(-LARGEST, LARGEST), row)
        return row.to(torch.float32)

    def of_labels(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the largest, of those that stand for a class."""
        ignored = self.known.ignored
        if ignored is not None:
            target = torch.where(target == ignored, 0, target)
        low, high = torch.aminmax(target)
        return low, high

    def _counts(self, target: Tensor, classes: int) -> Tensor:
        """How often there is each class; by sorting, which repeats on every device."""
        if self.classes is None or self.classes.device != target.device:
            self.classes = torch.arange(classes + 1, device=target.device)
        return torch.searchsorted(target.long().sort().values, self.classes).diff()

    def _marks(self, values: Tensor) -> list[Tensor]:
        """Order statistics of the samples' projections on a random direction, and how many differ.

        Whatever the order of the samples, a batch has the same ones each time.
        """
        samples = values.reshape(len(values), -1)
        step = -(-samples.shape[1] // MOST_FEATURES)
        samples = samples[:, ::step] if step > 1 else samples
        shadow, _ = torch.mv(samples, self.direction(samples)).sort()
        chosen = shadow.index_select(0, self._places(shadow))
        wide = (shadow[-1] - shadow[0]) * 1e-6
        distinct = (shadow[1:] - shadow[:-1] > wide).sum() + 1
        return [chosen, distinct.reshape(1)]

    def _places(self, shadow: Tensor) -> Tensor:
        kind = len(shadow), shadow.device
        if kind not in self.places:
            last = kind[0] - 1
            places = [round(i * last / (MARKS - 1)) for i in range(MARKS)]
            self.places[kind] = torch.tensor(places).to(shadow.device)  # waits, once
        return self.places[kind]

    def direction(self, samples: Tensor) -> Tensor:
        """What samples are projected on, [features]."""
        kind = samples.shape[1], samples.device, samples.dtype
        if kind not in self.directions:
            own = torch.Generator().manual_seed(20_14)  # apart from the run's own generators
            drawn = torch.randn(kind[0], generator=own) / max(1, kind[0]) ** 0.5
            self.directions[kind] = drawn.to(samples.device, samples.dtype)
        return self.directions[kind]


def moments(flat: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation; nothing is read from an accelerator.

    They are taken of shares of the largest value, so that no square is too large, and in two
    passes, so that a small deviation is not lost beside a large mean. On the CPU that takes ten
    times as long, and it shows beforehand whether it is needed.
    """
    if flat.device.type == "cpu":
        mean, square = flat.sum() / flat.numel(), torch.dot(flat, flat) / flat.numel()
        variance = square - mean * mean
        if bool(variance > ROUNDED * square):  # false where a sum or a square overflowed
            return mean, variance.sqrt()
    unit = torch.where(largest > 0, largest, 1)
    shares = flat / unit
    mean = shares.sum() / shares.numel()
    shares -= mean
    deviation = (torch.dot(shares, shares) / shares.numel()).sqrt()
    return mean * unit, deviation * unit


def bad_samples(tensor: Tensor, low: float, high: float, ignored: int | None = None) -> Tensor:
    """Which samples hold a value that is outside, or no number; one flag a sample."""
    tensor = as_real(tensor)
    bad = ~((tensor >= low) & (tensor <= high))
    if ignored is not None:
        bad &= tensor != ignored
    return bad.reshape(len(tensor), -1).any(1)
