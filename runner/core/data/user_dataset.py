"""The user's map-style data set: any class with `__len__` and `__getitem__`."""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch.utils.data import StackDataset, Subset

from runner.core.data.collate import (
    Nest,
    as_pair,
    infer_sizes,
    label_key,
    main_leaf,
    stack,
    stack_pairs,
)
from runner.core.data.dataset import Dataset, class_labels
from runner.core.data.dataset_generators import (
    comparable,
    find_generators,
    get_states,
    seed_generators,
    set_states,
)
from runner.core.data.labels import check_id_range
from runner.core.data.open import DEFAULT_OPENING, OpenOptions
from runner.core.data.order import sample_seeds
from runner.core.data.split import split_samples
from runner.core.data.usable import lacks_resources
from runner.core.errors import BadSample, ConfigError, DataError, RunnerError
from runner.core.interfaces.batch import Batch
from runner.core.interfaces.nested import named_leaves, tree_map
from runner.core.interfaces.technique import Choice
from runner.core.schemas.data import BadSamples, DataConfig

TIMED_SAMPLES = 4  # samples; the first one opens and imports
SLOW_S = 0.5  # a slower sample ends the timing
SEED_MASK = 0xFFFF_FFFF  # bits of a seed for NumPy


class UserDataset(Dataset):
    """Adapter for a user's map-style data set.

    Python's, NumPy's and torch's global generators, and those that the data set keeps, are seeded
    before each sample, so augmentation depends on (seed, epoch, index) alone, and are restored
    afterwards. As in torch's DataLoader, a data set with `__getitems__` is asked for a whole batch,
    seeded by the batch's first sample.
    """

    in_memory = False
    augments = True
    dtype = torch.float32  # of the weights; floats are cast to it if either dtype is float64
    dtypes: Set[torch.dtype] = frozenset()  # of the tensors in the sample read last
    uses_own_rng = False  # whether a sample has drawn from a generator that the data set keeps
    uses_global_rng = False  # whether a sample has drawn from Python's or NumPy's global generator

    def __init__(
        self, dataset: Any, name: str, config: DataConfig, opening: OpenOptions = DEFAULT_OPENING
    ) -> None:
        for method in ("__len__", "__getitem__"):
            if not callable(getattr(type(dataset), method, None)):
                problem = f"{name} has no {method}, so its samples cannot be fetched by index"
                fix = "define __len__ and __getitem__ (a map-style data set)"
                raise ConfigError("data._target_", problem, fix)
        self.dataset, self.name = dataset, name
        self.generators = find_generators(dataset)
        self.train, self.validation, choices = split_samples(opening, len(dataset), config, name)
        if opening.fitted is None:
            skip_bad = config.bad_samples is BadSamples.drop
            self.sizes, inferred = infer_sizes(
                dataset, name, lambda index: self._time_samples([index])[0], skip_bad
            )
            choices = (*choices, *inferred)
        else:
            self.sizes = opening.fitted.sizes
        self.choices = choices
        with suppress(BadSample):  # it is raised when its batch is fetched
            indices = list(range(1, min(TIMED_SAMPLES, len(dataset))))
            while indices and self.sample_seconds is not None and self.sample_seconds < SLOW_S:
                chunk_size = len(indices) if _fetches_batches(dataset) else 1
                self._time_samples(indices[:chunk_size])
                indices = indices[chunk_size:]
        self.generators = find_generators(dataset)  # some are made at the first sample

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
            with _global_generators():
                yield
        finally:
            set_states(generators, states)

    def _casts(self, dtype: torch.dtype) -> bool:
        doubles = torch.float64 in (dtype, self.dtype)
        return dtype != self.dtype and dtype.is_floating_point and doubles

    def _cast(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.dtype) if self._casts(values.dtype) else values

    def target_key(self) -> str | None:
        """Return the key of the target in the first sample, if that is a dict."""
        with self._restored_generators(), suppress(BadSample):
            return label_key(self._samples([0], sample_seeds(0, 0, np.array([0])).tolist())[0])
        return None

    def draws_itself(self) -> bool:
        """Whether the first sample draws from a generator that the data set keeps."""
        if self.generators and not self.uses_own_rng:
            with suppress(RunnerError):  # it is raised when its batch is fetched
                self.fetch(self.train[:1], None)
        return self.uses_own_rng

    def labels(self) -> np.ndarray | None:
        """Return the data set's `targets` (torchvision's convention), or None."""
        with suppress(TypeError, ValueError):  # `targets` of another type
            labels = class_labels(getattr(self.dataset, "targets", None), self.sizes)
            return labels if labels is not None and len(labels) == len(self.dataset) else None
        return None

    def _time_samples(self, indices: list[int]) -> list[tuple[Nest, Nest]]:
        started = time.perf_counter()
        with self._restored_generators():
            samples = self._samples(indices, sample_seeds(0, 0, np.array(indices)).tolist())
        seconds = (time.perf_counter() - started) / len(indices)
        # the minimum: the first sample warms up
        self.sample_seconds = min(seconds, self.sample_seconds or seconds)
        pairs = _as_pairs(samples, indices)
        self.dtypes = {leaf.dtype for _, leaf in named_leaves(pairs[0])}
        return pairs

    def fetch(self, indices: np.ndarray, seeds: np.ndarray | None) -> Batch:
        """Return the stacked samples; raise BadSample for labels or ids out of range."""
        if seeds is None:  # not augmented, but the data set may still draw random numbers
            seeds = sample_seeds(0, 0, indices)
        rows = indices.tolist()
        with self._restored_generators():
            samples = self._samples(rows, seeds.tolist())
            batch = stack_pairs(samples)
            if batch is None:
                columns = zip(*_as_pairs(samples, rows), strict=True)
                names = ("inputs", "target")
                batch = tuple(stack(c, rows, n) for c, n in zip(columns, names, strict=True))
        inputs, target = (tree_map(part, self._cast) for part in batch)
        limits = [("inputs", main_leaf(inputs), "vocab", self.sizes.vocab)]
        if self.sizes.task != "regression" and isinstance(target, torch.Tensor):
            limits.append(("target", target, "classes", self.sizes.classes))
        for what, values, size, limit in limits:
            if limit is not None and not values.is_floating_point():
                fix = f"correct it, or set the data set's attribute `{size}`"
                check_id_range(values, limit, indices, f"data: {what} of sample", fix)
        return inputs, target

    def _samples(self, indices: list[int], seeds: list[int]) -> list[Any]:
        """Read the samples by `__getitems__` where the data set has it, else one by one."""
        if not _fetches_batches(self.dataset):
            return self._read_each(indices, seeds)
        _seed(seeds[0])
        seed_generators(self.generators, seeds[0])
        before = self._own_states()
        try:
            samples = self.dataset.__getitems__(indices)
            self.uses_own_rng |= self._own_states() != before
        except RunnerError:
            raise
        except Exception as error:
            self._read_each(indices, seeds)  # raises the error of a bad sample, if there is one
            text = f"data: __getitems__ fails for {len(indices)} samples that __getitem__ can read"
            raise DataError(f"{text}: {type(error).__name__}: {error}") from error
        if not isinstance(samples, list | tuple) or len(samples) != len(indices):
            kind = type(samples).__name__
            size = f" of {len(samples)}" if isinstance(samples, list | tuple) else ""
            problem = f"data: __getitems__ of {len(indices)} samples returns a {kind}{size}"
            raise DataError(f"{problem}; return a list with one item per index")
        return [*samples]

    def _read_each(self, indices: list[int], seeds: list[int]) -> list[Any]:
        """Read samples one by one; seed each, which is slow, only once a sample has drawn.

        The first batch that draws is read again with seeds, so the samples do not depend on this.
        """

        def read() -> list[Any]:
            pairs = enumerate(zip(indices, seeds, strict=True))
            return [self._sample(index, seed, batch_index) for batch_index, (index, seed) in pairs]

        while True:
            before = self._unseeded_states()
            try:
                samples = read()
            except RunnerError:
                if not self._record_draws(before):
                    raise
            else:
                if not self._record_draws(before):
                    return samples

    def _own_states(self) -> Any:
        """Return the states of the data set's generators until one of them has drawn."""
        if self.uses_own_rng or not self.generators:
            return None
        return comparable(get_states(self.generators))

    def _unseeded_states(self) -> tuple[Any, Any]:
        """Return the states of the global and of the own generators that are not seeded yet."""
        return None if self.uses_global_rng else _generator_states(), self._own_states()

    def _record_draws(self, before: tuple[Any, Any]) -> bool:
        """Return whether generators that are not seeded yet have drawn; they are from now on."""
        global_drawn, own_drawn = (
            a != b for a, b in zip(self._unseeded_states(), before, strict=True)
        )
        self.uses_global_rng |= global_drawn
        self.uses_own_rng |= own_drawn
        return bool(global_drawn or own_drawn)

    def _sample(self, index: int, seed: int, batch_index: int) -> Any:
        if self.uses_global_rng:
            _seed(seed)
        else:  # a data set may read torch's seed and draw from its own generator
            torch.default_generator.manual_seed(seed & SEED_MASK)
        if self.uses_own_rng:
            seed_generators(self.generators, seed)
        try:
            return self.dataset[index]
        except RunnerError:
            raise
        except Exception as error:
            problem = f"data: sample {index}: {type(error).__name__}: {error}"
            if lacks_resources(error):
                raise DataError(f"{problem}\n{traceback.format_exc()}") from error
            raise BadSample(batch_index, problem, f"\n{traceback.format_exc()}") from error


def _fetches_batches(dataset: Any) -> bool:
    """Whether `__getitems__` reads a batch at once; torch's Subset and StackDataset delegate it."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    is_user_class = not isinstance(dataset, StackDataset)
    return is_user_class and callable(getattr(dataset, "__getitems__", None))


def _as_pairs(samples: list[Any], indices: list[int]) -> list[tuple[Nest, Nest]]:
    rows = enumerate(zip(samples, indices, strict=True))
    return [as_pair(sample, index, batch_index) for batch_index, (sample, index) in rows]


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed & SEED_MASK)
    # torch.manual_seed would touch the device's
    torch.default_generator.manual_seed(seed & SEED_MASK)


def _generator_states() -> tuple[Any, ...]:
    """Return the states of Python's and NumPy's global generators."""
    state: Any = np.random.get_state()
    return random.getstate(), state[1].tobytes(), *state[2:]


@contextmanager
def _global_generators() -> Iterator[None]:
    """Restore the global generators on exit; gradients are off inside."""
    python, numpy, torch_ = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        with torch.no_grad():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_)
