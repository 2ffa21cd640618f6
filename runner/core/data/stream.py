"""Data that are read in order: streams, generators, batches of their own, a caller's DataLoader."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import partial
from itertools import count, islice
from operator import itemgetter
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from runner.core.data.collate import Nest, infer_sizes, label_key
from runner.core.data.preprocessing import DEFAULT_OPENING, OpenOptions
from runner.core.data.user_dataset import UserDataset, comparable, find_collate, get_states
from runner.core.errors import ConfigError, DataError, RunnerError, UsageError, error_text
from runner.core.interfaces.batch import Batch, Sizes, batch_size_of
from runner.core.interfaces.nested import tensors, tree_map
from runner.core.schemas.data import BadSamples, DataConfig
from runner.core.security.registry import construct

VALIDATION_KEY = "data.validation_target"
MOST_COUNTED = 1000  # samples in which classes and token ids are counted
STATE_METHODS = ("state_dict", "load_state_dict")
TRAIN, VALIDATION = {"split": "train"}, {"split": "validation"}
Resolve = Callable[[str, str], Any]


def is_stream(data: Any) -> bool:
    """Whether the data are read in order: they have no index, or batches of their own."""
    if isinstance(data, IterableDataset | DataLoader):
        return True
    if hasattr(type(data), "__len__") and hasattr(type(data), "__getitem__"):
        return getattr(data, "batch_sampler", None) is not None
    return hasattr(type(data), "__iter__")


def has_state(stream: Any) -> bool:
    """Whether the stream, or its iterator, saves and loads a position."""
    return all(callable(getattr(stream, name, None)) for name in STATE_METHODS)


class StreamDataset(UserDataset):
    """Adapter for data that are read in order; samples are those of a map-style data set.

    `make` opens the stream at its start. Items are samples, or batches of their own: those of a
    DataLoader as they are, or lists of indices of `batch_sampler`.
    """

    is_stream = True
    augments = False
    length: int | None = None  # batches in a pass, if known
    make_validation: Callable[[], Any] | None = None

    def __init__(
        self,
        make: Callable[[], Any],
        name: str,
        config: DataConfig,
        opening: OpenOptions = DEFAULT_OPENING,
        sizes: Sizes | None = None,
        first: Any = None,  # already made
        given: bool = False,  # `make` returns the caller's own object each time
    ) -> None:
        self.make, self.name, self.config, self.opening = make, name, config, opening
        self.targets = opening.targets
        self.dataset = data = make() if first is None else first
        self.given, self.unread = given, None if given else data  # for the first pass
        self.is_loader = isinstance(data, DataLoader)
        self.sampler = None if self.is_loader else getattr(data, "batch_sampler", None)
        self.own_batches = self.is_loader or self.sampler is not None
        self.unit = "batches" if self.own_batches else "samples"
        self.in_memory = self.is_loader  # no workers of ours
        self.collate = itemgetter(0) if self.is_loader else find_collate(data)
        own = getattr(data, "generator", None) if self.is_loader else None
        self.generators = [] if own is None else [own]  # restored after a look at the data
        self.start_states = get_states(self.generators)  # of each pass over a validation set
        self.first_items, self.first_count = list[Any](), 0  # read, and asked for
        self.train = self.validation = np.arange(1)
        if self.own_batches:
            with suppress(TypeError):
                self.length = len(data if self.is_loader else self.index_batches())
        self._refuse_keys()
        self.start_state = self._find_start() if given and not self.own_batches else None
        if sizes is None and opening.fitted is not None:
            sizes = opening.fitted.sizes
        pairs = self._pairs()
        with self._restored_generators():
            first = next(pairs)
            self.dtypes = {tensor.dtype for tensor in tensors(first)}
            if sizes is None:
                described = data.dataset if self.is_loader else data
                counted = MOST_COUNTED, f"the first {MOST_COUNTED:,} of"
                sizes, self.choices = infer_sizes(
                    described,
                    name,
                    lambda index: next(pairs) if index else first,
                    samples=counted,
                    targets=opening.targets,
                )
        self.sizes = sizes

    def _refuse_keys(self) -> None:
        config = self.config
        wanted = [f"data.{key}" for key in ("split", "folds", "sampler") if getattr(config, key)]
        if config.bad_samples is BadSamples.drop:
            wanted.append("data.bad_samples=drop")
        for key in wanted:
            problem = f"needs samples with an index, and {self.name} is read in order"
            raise ConfigError(key, problem, "leave it out")

    def _find_start(self) -> Any:
        """Return the state at the start of a stream that continues when it is opened again.

        None for one that starts over by itself, or has no state.
        """
        if not has_state(stream := self.dataset):
            return None
        with self._restored_generators(), suppress(Exception):  # raised when it is read
            start, after = deepcopy(stream.state_dict()), list[Any]()
            for _ in range(2):
                next(self.iterate(stream), None)
                after.append(comparable(deepcopy(stream.state_dict())))
            return start if after[0] != after[1] else None
        return None

    def open(self) -> Any:
        """Return the stream at its start."""
        stream = self.make()
        if self.start_state is not None:
            stream.load_state_dict(deepcopy(self.start_state))
        return stream

    def _pairs(self) -> Iterator[tuple[Nest, Nest]]:
        """Yield inputs and target of the samples; after the end the last ones again."""
        pair = None
        for number, item in enumerate(self._first_items()):
            sample = self._load(item)[0]
            pair = self.as_pairs([sample], [number])[0]
            yield pair
        while pair is not None:
            yield pair

    def _first_items(self) -> Iterator[Any]:
        """Yield the items from the start, of another opening; DataError if there are none."""
        with self.errors_of("opening it"):
            items, end = self.iterate(self.open()), object()
        for number in count():
            with self.errors_of(f"{self.unit} {number}"):
                item = next(items, end)
            if item is not end:
                yield item
            elif number:
                return
            else:
                raise DataError(f"data: {self.name} has no samples")

    def iterate(self, stream: Any) -> Iterator[Any]:
        """Return the iterator over the items of an open stream."""
        if self.sampler is not None:
            return iter(self.index_batches())
        if isinstance(stream, DataLoader) or hasattr(type(stream), "__iter__"):
            return iter(stream)
        return map(stream.__getitem__, range(len(stream)))  # of a map-style data set

    def index_batches(self) -> Any:
        """Return the data set's batch sampler, an attribute or what a method returns."""
        return self.sampler() if callable(self.sampler) else self.sampler

    def _load(self, item: Any) -> list[Any]:
        """Return the samples of an item."""
        if self.sampler is None:
            return [item]
        try:  # not `errors_of`: a batch's indices are formatted for an error alone
            return [self.dataset[int(index)] for index in item]
        except RunnerError:
            raise
        except Exception as error:
            raise self.translate(f"samples {item}", error) from error

    @contextmanager
    def errors_of(self, what: str) -> Iterator[None]:
        """Raise an error of the user's code as DataError, with its traceback."""
        try:
            yield
        except RunnerError:
            raise
        except Exception as error:
            raise self.translate(what, error) from error

    def translate(self, what: str, error: Exception) -> DataError:
        """Return the error of the user's code as one of ours, with its traceback."""
        problem = f"data: {self.name}: {what}: {error_text(error)}"
        return DataError(f"{problem}\n{traceback.format_exc()}")

    def assemble_items(self, items: Sequence[Any], first: int) -> Batch:
        """Return the batch of some items, of which the first has the number `first`."""
        samples = [sample for item in items for sample in self._load(item)]
        return self.assemble(samples, range(first, first + len(samples)))

    def fetch(self, indices: np.ndarray, seeds: np.ndarray | None) -> Batch:
        """Return a batch of the first samples, as many as there are indices if it has so many."""
        count = 1 if self.own_batches else len(indices)
        with self._restored_generators():
            if self.first_count < count:
                self._seed(0)
                self.first_count = count
                self.first_items = [*islice(self._first_items(), count)]
            batch = self.assemble_items(self.first_items[:count], 0)
        rows = slice(len(indices)) if self.own_batches else slice(None)
        inputs, target = (tree_map(part, lambda tensor: tensor[rows]) for part in batch)
        return inputs, target

    def set_batch_size(self, size: int) -> int:
        """Let `train` stand for the samples of the first batch; return their number."""
        if self.own_batches:
            self.train = np.arange(2**20)  # more than a batch has
            size = batch_size_of(self.fetch(self.train, None)[1])
        self.train = self.validation = np.arange(size)
        return size

    def open_validation(self) -> StreamDataset | None:
        """Return the stream to validate on; None without one."""
        if self.make_validation is None:
            return None
        name = self.config.validation_target or f"the validation split of {self.name}"
        make, given, options = self.make_validation, self.given, (self.config, self.opening)
        return StreamDataset(make, name, *options, self.sizes, given=given)

    def target_key(self) -> str | None:
        """Return the key of the target in the first sample or batch, if that is a dict."""
        with self._restored_generators():
            sample = self._load(next(self.iterate(self.open())))[0]
            return label_key(sample if self.collate is None else self.collate([sample]))

    def draws_itself(self) -> bool:
        """Return False: what a stream draws is not seeded by sample."""
        return False


def open_stream(
    config: DataConfig,
    factory: Callable[..., Any],
    stream: Any,  # that it has made, with `required_split`
    arguments: Mapping[str, Any],
    resolve: Resolve,
    opening: OpenOptions,
) -> StreamDataset:
    """Open the user's stream, and find what to validate on."""
    if not opening.labelled:
        problem = f"predict needs samples with an index, and {config._target_} is read in order"
        raise ConfigError("job", problem, "from Python: runner.load(RUN).predict(…)")
    names_split = "split" in _parameters(factory) and "split" not in arguments
    if names_split and not required_split(factory):
        stream = None  # made without the split
    make = partial(construct, factory, arguments, TRAIN, "data")
    data = StreamDataset(make, str(config._target_), config, opening, first=stream)
    validating = factory if names_split else None
    if config.validation_target is not None:
        validating = resolve(config.validation_target, VALIDATION_KEY)
    if validating is not None:
        data.make_validation = partial(construct, validating, arguments, VALIDATION, "data")
    return data


def required_split(factory: Callable[..., Any]) -> Mapping[str, str]:
    """Return the split for a constructor that cannot be called without one."""
    parameter = _parameters(factory).get("split")
    return TRAIN if parameter is not None and parameter.default is parameter.empty else {}


def _parameters(factory: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(factory).parameters
    except ValueError:  # a C function
        return {}


def adopt_data(
    data: Any,
    validation: Any,
    config: DataConfig,
    opening: OpenOptions = DEFAULT_OPENING,
) -> UserDataset:
    """Return the adapter of data made by the caller."""
    source = data.dataset if isinstance(data, DataLoader) else data
    name = f"{type(source).__module__}.{type(source).__qualname__}"
    if validation is data and has_state(data):  # two readers would move its one position
        problem = "Components.validation must be another object than data, a stream with a state"
        raise UsageError(f"{problem}; make a second one")
    if not is_stream(data):
        if validation is None:
            return UserDataset(data, name, config, opening)
        problem = f"is for a DataLoader or a stream, and {name} has an index to split by"
        fix = "leave it out, or use create_training_pipeline(model, data, validation=…)"
        raise UsageError(f"Components.validation {problem}; {fix}")
    name = name if source is data else f"the DataLoader of {name}"
    stream = StreamDataset(lambda: data, name, config, opening, given=True)
    if validation is not None:
        stream.make_validation = lambda: validation
    return stream
