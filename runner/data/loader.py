"""Batches as a pure function of the step, fetched here or by worker processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from runner.data.batch import Batch
from runner.data.config import BadSamples, DataConfig
from runner.data.dataset import Dataset
from runner.data.nested import tensors, tree_map
from runner.data.order import BatchSampler
from runner.errors import ConfigError, DataError
from runner.techniques.base import Choice

if TYPE_CHECKING:
    from runner.data.usable import UsableFetch
    from runner.data.workers import Key, Workers
    from runner.errors import WorkerLost

MOST_WORKERS = 4  # that an automatic choice takes
QUICK_S = 0.005  # a batch that is fetched faster than this gains nothing from a worker
PREFETCH = 2  # batches: one to hand over, one in the making


class Inspector(Protocol):
    """The checks of batches on the CPU."""

    def inspect(self, step: int, batch: Batch) -> Batch:
        """The batch of that step (0 is the first), as it may go on."""


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
    part: Callable[[int], slice] | None = None,
) -> BatchLoader:
    """Batches of the samples `indices`; with `repeat` epoch after epoch, else one pass.

    `data.drop_last` counts for training only: a single pass leaves no sample out. `placements` are
    applied to each batch on the device; of the classes in `labels`, those of `indices`, each is
    drawn equally often. `part` says which of a batch's samples are this process's. Raises
    ConfigError or DataError where there is no batch.
    """
    n = len(indices)
    if n == 0:
        raise DataError(f"data: the {'training' if repeat else 'validation'} set is empty")
    batches = n // batch_size if config.drop_last and repeat else -(-n // batch_size)
    if batches == 0:
        problem = f"{batch_size} is more than the {n} training samples, and data.drop_last=true"
        fix = "use a smaller batch or data.drop_last=false"
        raise ConfigError("training.batch_size", problem, fix)
    seeds = augment and source.augments
    sizes = batch_size, batches, seed, shuffle, seeds
    order = BatchSampler(np.asarray(indices, np.int64), *sizes, labels, part)
    workers, choices = _choose_workers(source, config, batch_size)
    pin = device.type == "cuda" and config.pin_memory is not False
    aside = pin and config.device_prefetch is True
    for key, honoured, reason in (
        ("pin_memory", pin, "pinned memory is for CUDA"),
        ("device_prefetch", aside, "needs CUDA and pinned memory"),
        ("persistent_workers", workers > 0, "there are no workers"),
        ("prefetch", workers > 0, "there are no workers"),
    ):
        if getattr(config, key) and not honoured:
            choices.append(Choice(f"data.{key}", False, reason))
    move = mover(device, pin, aside)
    placements = [*([move] if move else []), *placements]
    usable = None
    if config.bad_samples is BadSamples.drop:
        from runner.data.usable import UsableFetch

        usable = UsableFetch(source, order)
    fetch = usable or Fetch(source, order)
    persistent = config.persistent_workers is not False
    pool = None
    if workers:
        from runner.data.workers import Workers

        ahead = config.prefetch or PREFETCH
        limits = config.timeout_s, config.worker_restarts
        pool = Workers(fetch, workers, ahead, *limits, share=persistent)
    return BatchLoader(fetch, repeat, placements, [*source.choices, *choices], pool, persistent)


@dataclass(frozen=True)
class Fetch:
    """The batch of a key, on the CPU; what a worker process runs."""

    source: Dataset
    order: BatchSampler

    def __call__(self, key: Key) -> Batch:
        """The batch with that number in that epoch."""
        return self.source.fetch(*self.order.batch(*key))


@dataclass(eq=False)
class BatchLoader:
    """Batches of one part of a data set, as a pure function of the step: resuming costs nothing."""

    fetch: Fetch | UsableFetch
    repeat: bool
    placements: Sequence[Callable[[Batch], Batch]]
    choices: list[Choice]
    pool: Workers | None = None
    persistent: bool = True  # workers live for more than an epoch
    inspector: Inspector | None = None

    def __post_init__(self) -> None:
        self.steps_per_epoch = self.fetch.order.batches
        self.usable: UsableFetch | None = None if isinstance(self.fetch, Fetch) else self.fetch

    def batches(self, start: int) -> Iterator[Batch]:
        """Batches from step `start` on; ends after an epoch unless the loader repeats."""
        epochs = self._epochs(start)
        if self.pool is None:
            batches: Iterator[Any] = (self.fetch(key) for keys in epochs for key in keys)
        else:
            batches = self._from_workers(epochs, self.pool)
        if self.usable is not None:
            batches = map(self.usable.take, batches)
        if self.inspector is not None:  # before the device has it
            batches = map(self.inspector.inspect, count(start), batches)
        yield from map(self._placed, batches) if self.placements else batches

    def peek(self) -> Batch:
        """The first batch, fetched here, so that workers go on with what they are at."""
        return self.at(0)

    def at(self, step: int) -> Batch:
        """The batch of that step, fetched here; workers and iterators are not disturbed."""
        return self._placed(self.first(step))

    def first(self, step: int = 0) -> Batch:
        """The batch of that step as it was fetched, on the CPU."""
        fetched: Any = self.fetch(divmod(step, self.steps_per_epoch))
        batch: Batch = fetched if self.usable is None else fetched.batch
        return batch

    def indices(self, step: int) -> list[int]:
        """Which samples of the data set that batch holds."""
        key = divmod(step, self.steps_per_epoch)
        chosen = self.fetch.order.batch(*key)[0]
        if self.usable is not None:
            chosen = self.usable.remaining(key, chosen)
        return [int(index) for index in chosen]

    @property
    def empty(self) -> bool:
        """Whether no sample is left of the batch handed over last, which is a stand-in."""
        return self.usable is not None and not len(self.usable.last.kept)

    def samples(self, step: int) -> int:
        """How many samples the batch of that step holds, over all processes."""
        return self.fetch.order.samples(step % self.steps_per_epoch)

    def ready(self) -> tuple[int, int]:
        """How many batches workers had fetched when they were asked for, and how many were."""
        return (0, 0) if self.pool is None else (self.pool.ready, self.pool.asked)

    def report_lost_workers(self, report: Callable[[WorkerLost], None]) -> None:
        """Have `report` called with why a worker is replaced; without, it is logged."""
        if self.pool is not None:
            self.pool.report_lost = report

    def close(self) -> None:
        """Kill every worker, at once."""
        if self.pool is not None:
            self.pool.close()

    def _placed(self, batch: Batch) -> Batch:
        for place in self.placements:
            batch = place(batch)
        return batch

    def _epochs(self, start: int) -> Iterator[Iterator[Key]]:
        """The keys of each epoch from step `start` on."""
        first, skip = divmod(start, self.steps_per_epoch)
        for epoch in count(first) if self.repeat else (first,):
            yield ((epoch, number) for number in range(skip, self.steps_per_epoch))
            skip = 0

    def _from_workers(self, epochs: Iterator[Iterator[Key]], pool: Workers) -> Iterator[Batch]:
        if self.persistent:  # and they read ahead over the end of an epoch
            yield from pool.batches(key for keys in epochs for key in keys)
            return
        for keys in epochs:
            yield from pool.batches(keys)
            pool.close()


def _choose_workers(
    source: Dataset, config: DataConfig, batch_size: int
) -> tuple[int, list[Choice]]:
    """How many workers fetch, and why where the config leaves it open."""
    if config.workers is not None:
        return config.workers, []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = min(MOST_WORKERS, cores or 1)
    reason = f"samples are fetched one by one, {cores} cores"
    if source.in_memory:
        workers, reason = 0, "the data is in memory; workers would only copy it"
    elif source.sample_seconds is not None:
        seconds = source.sample_seconds * batch_size
        workers = 0 if seconds < QUICK_S else workers
        reason = f"a batch takes {1e3 * seconds:.3g} ms to fetch, on {cores} cores"
    return workers, [Choice("data.workers", workers, reason)]


def mover(device: torch.device, pin: bool, aside: bool) -> Callable[[Batch], Batch] | None:
    """What brings a batch to the device; None on the CPU, where it already is.

    With `aside` it is copied while the step before it is computed: the host, which only queues
    that step, has asked for this batch long before the device is done.
    """
    if device.type == "cpu":
        return None

    def copy(tensor: Tensor) -> Tensor:
        # memory that is not pinned may be freed under the copy, so that one is waited for
        return (tensor.pin_memory() if pin else tensor).to(device, non_blocking=pin)

    def move(batch: Batch) -> Batch:
        moved: Batch = tree_map(batch, copy)
        return moved

    if not aside:
        return move
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def move_on_stream(batch: Batch) -> Batch:
        with torch.cuda.stream(stream):
            moved = move(batch)
        steps = torch.cuda.current_stream(device)
        steps.wait_stream(stream)  # the device waits, the host does not
        for tensor in tensors(moved):  # its memory is another stream's: not to be used again early
            tensor.record_stream(steps)
        return moved

    return move_on_stream
