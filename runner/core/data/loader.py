"""Batches as a pure function of the step, fetched in this process or by workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch

from runner.core.data.dataset import Dataset
from runner.core.data.order import BatchSampler, Segment
from runner.core.errors import ConfigError, DataError
from runner.core.findings import Choice
from runner.core.interfaces.batch import Batch
from runner.core.schemas.data import BadSamples, DataConfig

if TYPE_CHECKING:
    from runner.core.data.usable import UsableFetch
    from runner.core.data.workers import Key, Workers
    from runner.core.errors import WorkerLost

MAX_WORKERS = 4  # limit of the automatic choice
MIN_FETCH_S = 0.005  # a batch that is fetched faster than this gains nothing from a worker
PREFETCH = 2  # batches per worker: one ready, one being fetched
Loader = TypeVar("Loader", bound="BatchLoader")


class Inspector(Protocol):
    """Checks batches on the CPU."""

    def inspect(self, step: int, batch: Batch) -> Batch:
        """Return the checked batch of `step`, from 0."""


def make_loader(
    source: Dataset,
    indices: np.ndarray,
    *,
    batch_size: int,
    seed: int,
    device: torch.device,
    config: DataConfig,
    shuffle: bool,
    repeat: bool,
    augment: bool,
    placements: Sequence[Callable[[Batch], Batch]] = (),
    labels: np.ndarray | None = None,
    rank_slice: Callable[[int], slice] | None = None,
) -> BatchLoader:
    """Build a loader of the samples `indices`: endless epochs with `repeat`, else one pass.

    `data.drop_last` applies to training only: a single pass drops no sample. `placements` are
    applied to each batch on the device. With `labels`, the classes of `indices`, each class is
    drawn equally often. `rank_slice` selects this process's share of a batch. Raises ConfigError or
    DataError if there is no batch.
    """
    n = len(indices)
    if n == 0:
        raise DataError(f"data: the {'training' if repeat else 'validation'} set is empty")
    drop_last = config.drop_last and repeat
    batches = n // batch_size if drop_last else -(-n // batch_size)
    if batches == 0:
        problem = f"{batch_size} exceeds the {n} training samples, with data.drop_last=true"
        fix = "use a smaller batch or data.drop_last=false"
        raise ConfigError("training.batch_size", problem, fix)
    seeds = augment and source.augments
    sizes = batch_size, batches, seed, shuffle, seeds
    order = BatchSampler(np.asarray(indices, np.int64), *sizes, labels, rank_slice, drop_last)
    fetch: Fetch | UsableFetch = Fetch(source, order)
    if config.bad_samples is BadSamples.drop:
        from runner.core.data.usable import UsableFetch

        fetch = UsableFetch(source, order)
    chosen = _choose_workers(source, config, batch_size)
    return assemble_loader(BatchLoader, fetch, chosen, repeat, device, config, placements)


def assemble_loader(
    kind: type[Loader],
    fetch: Any,
    chosen: tuple[int, list[Choice]],  # number of workers
    repeat: bool,
    device: torch.device,
    config: DataConfig,
    placements: Sequence[Callable[[Batch], Batch]],
) -> Loader:
    """Build the loader of a fetch: with its workers, and copies to the device."""
    workers, choices = chosen
    pin = device.type == "cuda" and config.pin_memory is not False
    aside = pin and config.device_prefetch is True
    for key, applies, reason in (
        ("pin_memory", pin, "pinned memory needs CUDA"),
        ("device_prefetch", aside, "needs CUDA and pinned memory"),
        ("persistent_workers", workers > 0, "there are no workers"),
        ("prefetch", workers > 0, "there are no workers"),
    ):
        if getattr(config, key) and not applies:
            choices.append(Choice(f"data.{key}", False, reason))
    move = make_batch_mover(device, pin, aside)
    placements = [*([move] if move else []), *placements]
    persistent = config.persistent_workers is not False
    pool = None
    if workers:
        from runner.core.data.workers import Workers

        prefetch = config.prefetch or PREFETCH
        limits = config.timeout_s, config.worker_restarts
        pool = Workers(fetch, workers, prefetch, *limits, freeze_objects=persistent)
        if pin:  # without workers a batch is fetched in this thread, and pinned when it is moved
            from runner.core.data.device_transfer import pin_batch

            pool.prepare = pin_batch
    return kind(fetch, repeat, placements, [*fetch.source.choices, *choices], pool, persistent)


@dataclass(frozen=True)
class Fetch:
    """Fetches the batch of a key on the CPU; worker processes run it."""

    source: Dataset
    order: BatchSampler

    def __call__(self, key: Key) -> Batch:
        """Return the batch of `key`: (epoch, number in the epoch)."""
        return self.source.fetch(*self.order.batch(*key))


@dataclass(eq=False)
class BatchLoader:
    """Loader of one split. Batches are a pure function of the step, so resuming costs nothing."""

    fetch: Fetch | UsableFetch
    repeat: bool
    placements: Sequence[Callable[[Batch], Batch]]
    choices: list[Choice]
    pool: Workers | None = None
    persistent: bool = True  # workers survive the end of an epoch
    inspector: Inspector | None = None
    is_stream = False  # batches cannot be fetched again

    def __post_init__(self) -> None:
        order = self.fetch.order
        self.steps_per_epoch = batches = order.batches
        self.batch_size = min(order.batch_size, len(order.indices))  # of all but partial batches
        self.segments = [Segment(0, 0, 0, self.batch_size, batches, batches, 0.0)]
        self.usable: UsableFetch | None = None if isinstance(self.fetch, Fetch) else self.fetch

    def batches(self, start: int) -> Iterator[Batch]:
        """Yield batches from step `start`, to the end of the epoch or endlessly with `repeat`."""
        epochs = self._epochs(start)
        if self.pool is None:
            batches: Iterator[Any] = (self.fetch(key) for keys in epochs for key in keys)
        else:
            batches = self._from_workers(epochs, self.pool)
        if self.usable is not None:
            batches = map(self.usable.record_batch, batches)
        if self.inspector is not None:  # on the CPU
            batches = map(self.inspector.inspect, count(start), batches)
        yield from map(self._place, batches) if self.placements else batches

    def continue_segments(self, segments: Sequence[Segment], step: int) -> bool:
        """Continue at `step` of a run with these segments; return whether one had to be added.

        That is if the batch size or the batches per epoch differ. The batches then start at the
        next sample of the epoch. Call it before `batches`.
        """
        order, last = self.fetch.order, segments[-1]
        same_size = min(last.batch_size, len(order.indices)) == self.batch_size
        is_new = not (same_size and last.batches == self.steps_per_epoch)
        if is_new:
            epoch, first = last.position(step)
            share, rest = 0.0, order.count_batches(first)
            if rest == 0:
                epoch, first, rest = epoch + 1, 0, self.steps_per_epoch
            elif first:
                held = len(order.indices)
                if order.drop_last:
                    held = first + rest * self.batch_size
                share = max(last.epochs_before(step) - epoch, first / held)
            added = Segment(step, epoch, first, self.batch_size, rest, self.steps_per_epoch, share)
            segments = [*(segment for segment in segments if segment.step < step), added]
        self.segments = list(segments)
        order.start = self.segments[-1].epoch, self.segments[-1].sample
        return is_new

    def epochs_before(self, step: int) -> float:
        """Return the passes over the training set that are over before `step`."""
        return self._segment(step).epochs_before(step)

    def _segment(self, step: int) -> Segment:
        return next((s for s in reversed(self.segments) if s.step <= step), self.segments[0])

    def _fetch_of(self, step: int) -> tuple[Fetch | UsableFetch, Key]:
        """Return the fetch and the key of the batch of a step, perhaps of an earlier batch size."""
        segment = self._segment(step)
        if segment is self.segments[-1]:
            return self.fetch, segment.locate(step)
        start, size = (segment.epoch, segment.sample), segment.batch_size
        order = replace(self.fetch.order, batch_size=size, batches=segment.batches, start=start)
        return type(self.fetch)(self.fetch.source, order), segment.locate(step)

    def peek(self) -> Batch:
        """Return the first batch, fetched in this process: workers are not disturbed."""
        return self.at(0)

    def at(self, step: int) -> Batch:
        """Return the batch of `step`, fetched in this process; iterators are unaffected."""
        return self._place(self.fetch_on_cpu(step))

    def fetch_on_cpu(self, step: int = 0) -> Batch:
        """Return the batch of `step` on the CPU, without placements or checks."""
        fetch, key = self._fetch_of(step)
        fetched: Any = fetch(key)
        batch: Batch = fetched if self.usable is None else fetched.batch
        return batch

    def indices(self, step: int) -> list[int]:
        """Return the data set indices of the samples in the batch of `step`."""
        fetch, key = self._fetch_of(step)
        chosen = fetch.order.batch(*key)[0]
        if not isinstance(fetch, Fetch):
            chosen = fetch.usable_among(key, chosen)
        return [int(index) for index in chosen]

    @property
    def empty(self) -> bool:
        """Whether the last batch is a stand-in, as all of its samples were bad."""
        return self.usable is not None and not len(self.usable.last.indices)

    def samples(self, step: int) -> int:
        """Return the size of the batch of `step`, over all processes."""
        segment = self._segment(step)
        return min(segment.batch_size, len(self.fetch.order.indices) - segment.position(step)[1])

    def ready(self) -> tuple[int, int]:
        """Return the batches that were ready when requested, and those requested."""
        return (0, 0) if self.pool is None else (self.pool.ready, self.pool.requested)

    def state(self, run: Any) -> Any:
        """Return the state of a stream, for a checkpoint; None for other data."""

    def report_lost_workers(self, report: Callable[[WorkerLost], None]) -> None:
        """Call `report` when a worker is replaced; by default that is logged."""
        if self.pool is not None:
            self.pool.report_lost = report

    def free_worker_memory(self) -> int:
        """Ask the workers to free garbage and unused heap; return the batches until then."""
        return 1 if self.pool is None else self.pool.free_memory() + 1

    def close(self) -> None:
        """Kill every worker, at once."""
        if self.pool is not None:
            self.pool.close()

    def _place(self, batch: Batch) -> Batch:
        for placement in self.placements:
            batch = placement(batch)
        return batch

    def _epochs(self, start: int) -> Iterator[Iterator[Key]]:
        """Yield the keys of each epoch, from step `start`."""
        keys = map(self.segments[-1].locate, count(start))
        epochs = (group for _, group in groupby(keys, itemgetter(0)))
        return epochs if self.repeat else islice(epochs, 1)

    def _from_workers(self, epochs: Iterator[Iterator[Key]], pool: Workers) -> Iterator[Batch]:
        if self.persistent:  # workers also prefetch across the end of an epoch
            yield from pool.batches(key for keys in epochs for key in keys)
            return
        for keys in epochs:
            yield from pool.batches(keys)
            pool.close()


def _choose_workers(
    source: Dataset, config: DataConfig, batch_size: int
) -> tuple[int, list[Choice]]:
    """Return the number of workers, and the choice if the config sets none."""
    if config.workers is not None:
        return config.workers, []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = min(MAX_WORKERS, cores or 1)
    reason = f"samples are fetched one by one, {cores} cores"
    if source.in_memory:
        workers, reason = 0, "the data is in memory; workers would only copy it"
    elif source.sample_seconds is not None:
        seconds = source.sample_seconds * batch_size
        workers = 0 if seconds < MIN_FETCH_S else workers
        reason = f"a batch takes {1e3 * seconds:.3g} ms to fetch, on {cores} cores"
    return workers, [Choice("data.workers", workers, reason)]


def make_batch_mover(
    device: torch.device, pin: bool, aside: bool
) -> Callable[[Batch], Batch] | None:
    """Return a function that copies a batch to the device; None on the CPU."""
    if device.type == "cpu":
        return None
    from runner.core.data.device_transfer import batch_mover

    return batch_mover(device, pin, aside)
