"""The user's map-style data set: any class with `__len__` and `__getitem__`."""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from types import FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import StackDataset, Subset

from runner.core.data import collate as collation
from runner.core.data.collate import Nest, as_class_indices, as_pair, label_key
from runner.core.data.dataset import Dataset, class_labels
from runner.core.data.labels import check_id_range
from runner.core.data.order import mix, sample_seeds
from runner.core.data.preprocessing import DEFAULT_OPENING, OpenOptions
from runner.core.data.split import split_samples
from runner.core.data.usable import lacks_resources
from runner.core.errors import BadSample, ConfigError, DataError, RunnerError, error_text
from runner.core.findings import Choice
from runner.core.interfaces.batch import Batch, Sizes
from runner.core.interfaces.nested import named_leaves, tree_map
from runner.core.preserved_state import preserve_random_state
from runner.core.schemas.data import BadSamples, DataConfig

TIMED_SAMPLES = 4  # samples; the first one opens and imports
SLOW_S = 0.5  # a slower sample ends the timing
SEED_MASK = 0xFFFF_FFFF  # bits of a seed for NumPy
MAX_GENERATORS = 64
MAX_LEVELS = 8  # four objects, each in a list, tuple or dict
MAX_ITEMS = 1000  # of a list, tuple or dict
MAX_OBJECTS = 20_000
KINDS = (np.random.Generator, np.random.RandomState, torch.Generator, random.Random)
PLAIN = (str, bytes, int, float, complex, type(None), np.ndarray, torch.Tensor, type, ModuleType)
"""Types of values that keep no generator: most of what a data set has."""


class UserDataset(Dataset):
    """Adapter for a user's map-style data set.

    Python's, NumPy's and torch's global generators, and those that the data set keeps, are seeded
    before each sample, so augmentation depends on (seed, epoch, index) alone, and are restored
    afterwards. With `__getitems__` a whole batch is read, seeded by its first sample.
    """

    in_memory = False
    augments = True
    dtype = torch.float32  # of the weights; floats are cast to it if either dtype is float64
    read_seconds = 0.0  # of the last call of the data set, without seeding
    dtypes: Set[torch.dtype] = frozenset()  # of the tensors in the sample read last
    collate: Callable[[list[Any]], Any] | None = None  # the data set's own `collate_fn`
    targets = "inferred"  # what they are, as in `OpenOptions`
    stratified_by: np.ndarray | None = None  # the class of each sample, if that splits them

    def __init__(
        self, dataset: Any, name: str, config: DataConfig, opening: OpenOptions = DEFAULT_OPENING
    ) -> None:
        for method in ("__len__", "__getitem__"):
            if not callable(getattr(type(dataset), method, None)):
                problem = f"{name} has no {method}, so its samples cannot be fetched by index"
                fix = "define __len__ and __getitem__ (map-style), or __iter__ (a stream)"
                raise ConfigError("data._target_", problem, fix)
        if not len(dataset):
            raise DataError(f"{name}: 0 samples; training and validation need at least one each")
        self.dataset, self.name = dataset, name
        self.collate, self.targets = find_collate(dataset), opening.targets
        self.generators = find_generators(dataset)
        inferred = tuple[Choice, ...]()
        if opening.fitted is None:
            self.sizes, inferred = self._infer_sizes(config, opening)
        else:
            self.sizes = opening.fitted.sizes
        rule = config.split.name if config.split is not None else opening.split_rule
        if rule == "stratified" and opening.splits_samples(config):
            self.stratified_by = self._labels_to_split(config, opening)
        split = split_samples(opening, len(dataset), config, name, self.stratified_by)
        self.train, self.validation, choices = split
        self.choices = (*choices, *inferred)
        with suppress(BadSample):  # it is raised when its batch is fetched
            first = self.part([0])[0]
            indices = list(range(1, min(TIMED_SAMPLES, len(first))))
            while indices and self.sample_seconds is not None and self.sample_seconds < SLOW_S:
                chunk_size = len(indices) if _fetches_batches(first) else 1
                self._time_samples(indices[:chunk_size])
                indices = indices[chunk_size:]
        self.generators = find_generators(dataset)  # some are made at the first sample

    def _infer_sizes(
        self, config: DataConfig, opening: OpenOptions
    ) -> tuple[Sizes, tuple[Choice, ...]]:
        self.labels_read = dict[int, int]()  # by sample

        def read(index: int) -> tuple[Nest, Nest]:
            inputs, target = self._time_samples([index])[0]
            is_one = isinstance(target, torch.Tensor) and target.numel() == 1
            if is_one and not (target.is_floating_point() or target.is_complex()):
                self.labels_read[index] = int(target)
            return inputs, target

        skip_bad = config.bad_samples is BadSamples.drop
        return collation.infer_sizes(
            self.dataset, self.name, read, skip_bad, targets=opening.targets
        )

    def _labels_to_split(self, config: DataConfig, opening: OpenOptions) -> np.ndarray | None:
        """Return the class of each sample: `targets`, or what was read to count the classes."""
        labels = self.labels()
        if labels is not None or self.sizes.task != "classification":
            return labels
        if opening.fitted is not None:
            self._infer_sizes(config, opening)  # as in the run that was fitted
        indices = range(len(self.dataset))
        if len(self.labels_read) < len(indices):
            return None
        return np.array([self.labels_read[index] for index in indices])

    def part(self, rows: Sequence[int]) -> tuple[Any, int]:
        """Return the data set that has these samples, and the index of its first one."""
        return self.dataset, 0

    def collate_of(self, rows: Sequence[int]) -> Callable[[list[Any]], Any] | None:
        """Return the `collate_fn` for these samples; None without one."""
        return self.collate

    def match_dtype(self, model: torch.nn.Module) -> tuple[Choice, ...]:
        """Cast float64 samples to the dtype of the weights; for float64 weights cast all floats."""
        weights = [p.dtype for p in model.parameters() if p.is_floating_point()]
        self.dtype = next(iter(weights), self.dtype)
        cast = {dtype for dtype in self.dtypes if self._casts(dtype)}
        if not cast:
            return ()
        own, *others = (str(x).removeprefix("torch.") for x in (self.dtype, *sorted(cast, key=str)))
        reason = f"samples have {' and '.join(others)}; the weights of the model are {own}"
        return (Choice("data._target_", f"cast to {own}", reason),)

    @contextmanager
    def _restored_generators(self) -> Iterator[None]:
        """Restore the global and the data set's generators on exit; gradients are off inside."""
        generators, states = self.generators, get_states(self.generators)
        try:
            with preserve_random_state(), torch.no_grad():
                yield
        finally:
            set_states(generators, states)

    def _casts(self, dtype: torch.dtype) -> bool:
        doubles = torch.float64 in (dtype, self.dtype)
        return dtype != self.dtype and dtype.is_floating_point and doubles

    def _cast(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.dtype) if self._casts(values.dtype) else values

    def as_pairs(self, samples: list[Any], rows: Sequence[int]) -> list[tuple[Nest, Nest]]:
        """Return inputs and target of each sample, collated by itself if the data set collates."""
        collate = self.collate_of(rows)
        if collate is None:
            return _as_pairs(samples, rows)
        pairs = []
        for sample, row in zip(samples, rows, strict=True):
            inputs, target = self._collated(collate, [sample], [row])
            pairs.append((first_row(inputs), first_row(target)))
        return pairs

    def target_key(self) -> str | None:
        """Return the key of the target in the first sample, if that is a dict."""
        with self._restored_generators(), suppress(BadSample):
            samples = self._samples([0], sample_seeds(0, 0, np.array([0])).tolist())
            collate = self.collate_of([0])
            return label_key(samples[0] if collate is None else collate(samples))
        return None

    def draws_itself(self) -> bool:
        """Whether the first sample draws from a generator that the data set keeps."""
        index = self.train[:1]
        with self._restored_generators(), suppress(RunnerError):  # raised when it is fetched
            seeds = sample_seeds(0, 0, index).tolist()
            self._seed(seeds[0])
            before = comparable(get_states(self.generators))
            self._samples(index.tolist(), seeds)
            return bool(comparable(get_states(self.generators)) != before)
        return False

    def labels(self) -> np.ndarray | None:
        """Return the data set's `targets` (torchvision's convention), or None."""
        with suppress(TypeError, ValueError):  # `targets` of another type
            labels = class_labels(getattr(self.dataset, "targets", None), self.sizes)
            return labels if labels is not None and len(labels) == len(self.dataset) else None
        return None

    def _time_samples(self, indices: list[int]) -> list[tuple[Nest, Nest]]:
        with self._restored_generators():
            samples = self._samples(indices, sample_seeds(0, 0, np.array(indices)).tolist())
        at_once = _fetches_batches(self.part(indices)[0])
        seconds = self.read_seconds / (len(indices) if at_once else 1)
        # the minimum: the first sample warms up
        self.sample_seconds = min(seconds, self.sample_seconds or seconds)
        pairs = self.as_pairs(samples, indices)
        self.dtypes = {leaf.dtype for _, leaf in named_leaves(pairs[0])}
        return pairs

    def fetch(self, indices: np.ndarray, seeds: np.ndarray | None) -> Batch:
        """Return the stacked samples; raise BadSample for labels or ids out of range."""
        if seeds is None:  # not augmented, but the data set may still draw random numbers
            seeds = sample_seeds(0, 0, indices)
        rows = indices.tolist()
        with self._restored_generators():
            return self.assemble(self._samples(rows, seeds.tolist()), rows)

    def assemble(self, samples: list[Any], rows: Sequence[int]) -> Batch:
        """Return the batch of samples, which messages number as `rows`; see `fetch`."""
        if (collate := self.collate_of(rows)) is not None:
            batch: Sequence[Nest] = self._collated(collate, samples, rows)
        elif (plain := collation.stack_plain(samples)) is not None:
            batch = plain
        else:
            pairs = _as_pairs(samples, rows)
            parts = zip(zip(*pairs, strict=True), ("inputs", "target"), strict=True)
            batch = [collation.stack(column, rows, name) for column, name in parts]
        inputs, target = (tree_map(part, self._cast) for part in batch)
        return self._checked(inputs, as_class_indices(target, self.sizes, self.targets), rows)

    def _collated(
        self, collate: Callable[[list[Any]], Any], samples: list[Any], rows: Sequence[int]
    ) -> tuple[Nest, Nest]:
        """Return inputs and target of the batch that the data set's `collate_fn` makes."""
        try:
            return as_pair(collate(samples), rows[0])
        except RunnerError:
            raise
        except Exception as error:
            where = f"data: collate_fn of {self.name} fails from sample {rows[0]} on"
            trace = traceback.format_exc()
            raise DataError(f"{where}: {error_text(error)}\n{trace}") from error

    def _checked(self, inputs: Nest, target: Nest, rows: Sequence[int]) -> Batch:
        """Return the batch; BadSample for labels or ids out of range."""
        limits = [("inputs", collation.main_leaf(inputs), "vocab", self.sizes.vocab)]
        if self.sizes.task != "regression" and isinstance(target, torch.Tensor):
            limits.append(("target", target, "classes", self.sizes.classes))
        for what, values, size, limit in limits:
            if limit is not None and not values.is_floating_point():
                fix = f"correct it, or set the data set's attribute `{size}`"
                names = rows if len(values) == len(rows) else range(len(values))
                check_id_range(values, limit, names, f"data: {what} of sample", fix)
        return inputs, target

    def _samples(self, indices: list[int], seeds: list[int]) -> list[Any]:
        """Read the samples by `__getitems__` where the data set has it, else one by one."""
        dataset, start_index = self.part(indices)
        if not _fetches_batches(dataset):
            return self._read_each(indices, seeds)
        self._seed(seeds[0])
        start = time.perf_counter()
        try:
            samples = dataset.__getitems__([index - start_index for index in indices])
            self.read_seconds = time.perf_counter() - start
        except RunnerError:
            raise
        except Exception as error:
            self._read_each(indices, seeds)  # raises the error of a bad sample, if there is one
            text = f"data: __getitems__ fails for {len(indices)} samples that __getitem__ can read"
            raise DataError(f"{text}: {error_text(error)}") from error
        if not isinstance(samples, list | tuple) or len(samples) != len(indices):
            kind = type(samples).__name__
            size = f" of {len(samples)}" if isinstance(samples, list | tuple) else ""
            problem = f"data: __getitems__ of {len(indices)} samples returns a {kind}{size}"
            raise DataError(f"{problem}; return a list with one item per index")
        return [*samples]

    def _read_each(self, indices: list[int], seeds: list[int]) -> list[Any]:
        pairs = enumerate(zip(indices, seeds, strict=True))
        return [self._sample(index, seed, batch_index) for batch_index, (index, seed) in pairs]

    def _seed(self, seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed & SEED_MASK)
        # torch.manual_seed would touch the device's
        torch.default_generator.manual_seed(seed & SEED_MASK)
        seed_generators(self.generators, seed)

    def _sample(self, index: int, seed: int, batch_index: int) -> Any:
        self._seed(seed)
        start = time.perf_counter()
        try:
            sample = self.dataset[index]
            self.read_seconds = time.perf_counter() - start
            return sample
        except RunnerError:
            raise
        except Exception as error:
            problem = f"data: sample {index}: {error_text(error)}"
            if lacks_resources(error):
                raise DataError(f"{problem}\n{traceback.format_exc()}") from error
            raise BadSample(batch_index, problem, f"\n{traceback.format_exc()}") from error


def _fetches_batches(dataset: Any) -> bool:
    """Whether `__getitems__` reads a batch at once; torch's Subset and StackDataset delegate it."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    is_user_class = not isinstance(dataset, StackDataset)
    return is_user_class and callable(getattr(dataset, "__getitems__", None))


def find_collate(dataset: Any) -> Callable[[list[Any]], Any] | None:
    """Return the `collate_fn` of a data set, also of torch's Subset of it; None without one."""
    while isinstance(dataset, Subset) and not hasattr(dataset, "collate_fn"):
        dataset = dataset.dataset
    collate = getattr(dataset, "collate_fn", None)
    return collate if callable(collate) else None


def first_row(nest: Nest) -> Nest:
    """Return the first sample of collated values."""
    return tree_map(nest, lambda tensor: tensor[0] if tensor.ndim else tensor)


def _as_pairs(samples: list[Any], indices: Sequence[int]) -> list[tuple[Nest, Nest]]:
    rows = enumerate(zip(samples, indices, strict=True))
    return [as_pair(sample, index, batch_index) for batch_index, (sample, index) in rows]


# -- random generators that a data set keeps -------------------------------------------------------


def find_generators(dataset: object) -> list[Any]:
    """Return the generators that a data set keeps, also in wrapped ones and containers.

    Global generators and those of the system or of a device are left out. Reads no property.
    """
    seen, generators = set[int](), list[Any]()
    level: list[Any] = [dataset]
    for _ in range(MAX_LEVELS + 1):
        inner = list[Any]()
        for value in level:
            if id(value) in seen or len(seen) > MAX_OBJECTS:
                continue
            seen.add(id(value))
            if not isinstance(value, KINDS):
                inner += _inner_values(value)
            elif _can_be_seeded(value):
                generators.append(value)
        level = inner
    return generators[:MAX_GENERATORS]


def _inner_values(value: Any) -> list[Any]:
    """Return the values in a container, function or object that may keep a generator."""
    values: Iterable[Any]
    if isinstance(value, dict):  # a subclass may compute what it returns
        values = dict.values(value)
    elif isinstance(value, list):
        values = list.__iter__(value)
    elif isinstance(value, tuple):
        values = tuple.__iter__(value)
    elif isinstance(value, partial):
        values = (value.func, *value.args, *value.keywords.values())
    elif hasattr(type(value), "__self__"):  # a method, also of a class in C
        values = (value.__self__,)
    elif isinstance(value, FunctionType):
        values = _closure(value)
    else:
        values = [*getattr(value, "__dict__", {}).values()]
        for attribute in (each for cls in type(value).__mro__ for each in vars(cls).values()):
            if isinstance(attribute, MemberDescriptorType):  # of __slots__
                with suppress(AttributeError):  # not set
                    values.append(attribute.__get__(value))
            elif isinstance(attribute, KINDS):
                values.append(attribute)
    return [each for each in islice(values, MAX_ITEMS) if not isinstance(each, PLAIN)]


def _closure(function: FunctionType) -> list[Any]:
    values = list[Any]()
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # empty
            values.append(cell.cell_contents)
    return values


def _can_be_seeded(generator: Any) -> bool:
    if isinstance(generator, torch.Generator):
        return generator is not torch.default_generator and generator.device.type == "cpu"
    if isinstance(generator, random.Random):
        is_global = generator is getattr(random.random, "__self__", None)
        return not is_global and not isinstance(generator, random.SystemRandom)
    if generator is getattr(np.random.random_sample, "__self__", None):  # the global one
        return False
    name = _bit_generator_name(generator)
    return isinstance(getattr(np.random, name, None), type)  # not of a class of the user's


def _bit_generator_name(generator: Any) -> str:
    if isinstance(generator, np.random.RandomState):
        return str(generator.get_state(legacy=False)["bit_generator"])
    return type(generator.bit_generator).__name__


def seed_generators(generators: Sequence[Any], seed: int) -> None:
    """Seed each generator from `seed`, with a stream of its own."""
    for number, generator in enumerate(generators):
        stream = mix(seed, number)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(stream)
        elif isinstance(generator, random.Random):
            generator.seed(stream)
        else:
            seeded = getattr(np.random, _bit_generator_name(generator))(stream)
            is_legacy = isinstance(generator, np.random.RandomState)
            kind: Any = np.random.RandomState if is_legacy else np.random.Generator
            set_states([generator], get_states([kind(seeded)]))


def get_states(generators: Sequence[Any]) -> list[Any]:
    """Return the states of the generators."""
    states = list[Any]()
    for generator in generators:
        if isinstance(generator, torch.Generator):
            states.append(generator.get_state())
        elif isinstance(generator, random.Random):
            states.append(generator.getstate())
        elif isinstance(generator, np.random.RandomState):
            states.append(generator.get_state(legacy=False))
        else:
            states.append(generator.bit_generator.state)
    return states


def set_states(generators: Sequence[Any], states: Sequence[Any]) -> None:
    """Set the states of the generators, as `get_states` returned them."""
    for generator, state in zip(generators, states, strict=True):
        if isinstance(generator, torch.Generator):
            generator.set_state(state)
        elif isinstance(generator, random.Random):
            generator.setstate(state)
        elif isinstance(generator, np.random.RandomState):
            generator.set_state(state)
        else:
            generator.bit_generator.state = state


def comparable(state: Any) -> Any:
    """Return states in a form that `==` compares, arrays and tensors as bytes."""
    if isinstance(state, list | dict):
        values = state.values() if isinstance(state, dict) else state
        return [comparable(value) for value in values]
    if isinstance(state, torch.Tensor):
        state = state.numpy()
    return state.tobytes() if isinstance(state, np.ndarray) else state
