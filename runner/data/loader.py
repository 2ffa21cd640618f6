"""Batches as a pure function of the step, fetched here or by worker processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from runner.data.batch import Batch
from runner.data.config import DataConfig
from runner.data.dataset import Dataset
from runner.data.order import BatchSampler
from runner.data.workers import Key, Workers
from runner.errors import ConfigError, DataError
from runner.techniques.base import Choice

MOST_WORKERS = 4  # that an automatic choice takes
QUICK_S = 0.005  # a batch that is fetched faster than this gains nothing from a worker
PREFETCH = 2  # batches: one to hand over, one in the making


class HasTorchDevice(Protocol):
    """A device, as far as the loader needs it."""

    @property
    def torch(self) -> torch.device:
        """Where batches go."""


class Inspector(Protocol):
    """What looks at batches on the CPU, and may leave samples out."""

    def inspect(self, step: int, batch: Batch) -> Batch:
        """The batch of that step (0 is the first), as it may go on."""

    def pruned(self, batch: Batch) -> Batch:
        """The same, for a batch that is fetched again."""


def make_loader(
    source: Dataset,
    indices: np.ndarray,
    *,
    batch_size: int,
    seed: int,
    device: HasTorchDevice,
    config: DataConfig,
    shuffle: bool,
    repeat: bool,
    augment: bool,
    placements: Sequence[Callable[[Batch], Batch]] = (),
) -> BatchLoader:
    """Batches of the samples `indices`; with `repeat` epoch after epoch, else one pass.

    `data.drop_last` counts for training only: a single pass leaves no sample out. `placements` are
    applied to each batch on the device. Raises ConfigError or DataError where there is no batch.
    """
    n = len(indices)
    if n == 0:
        raise DataError(f"data: the {'training' if repeat else 'validation'} set is empty")
    if batch_size < 1:
        raise ConfigError("training.batch_size", f"{batch_size} is no size", "use 1 or more")
    drop_last = config.drop_last and repeat
    batches = n // batch_size if drop_last else -(-n // batch_size)
    if batches == 0:
        raise ConfigError(
            "training.batch_size",
            f"{batch_size} is more than the {n} training samples, and data.drop_last=true",
            "use a smaller batch or data.drop_last=false",
        )
    order = BatchSampler(
        np.asarray(indices, np.int64),
        batch_size=batch_size,
        batches=batches,
        seed=seed,
        shuffle=shuffle,
        seeds=augment and source.augments,
    )
    choices = list(source.choices)
    workers = _workers(source, config, batch_size, choices)
    pin = _pin(config, device.torch, choices)
    aside = _aside(config, pin, choices)
    persistent = _persistent(config, workers, choices)
    ahead = _prefetch(config, workers, choices)
    pool = Workers(Fetch(source, order), workers, ahead, config.timeout_s) if workers else None
    return BatchLoader(
        Fetch(source, order),
        n,
        repeat,
        pool,
        persistent,
        mover(device.torch, pin, aside),
        placements,
        choices,
    )


class Fetch:
    """The batch of a key, on the CPU; what a worker process runs."""

    def __init__(self, source: Dataset, order: BatchSampler) -> None:
        self.source, self.order = source, order

    def __call__(self, key: Key) -> Batch:
        """The batch with that number in that epoch."""
        return self.source.fetch(*self.order.batch(*key))


class BatchLoader:
    """The batches of one part of a data set (see the protocol `runner.data.batch.Loader`)."""

    def __init__(
        self,
        fetch: Fetch,
        n: int,
        repeat: bool,
        pool: Workers | None,
        persistent: bool,
        move: Callable[[Batch], Batch] | None,
        placements: Sequence[Callable[[Batch], Batch]],
        choices: list[Choice],
    ) -> None:
        self.fetch, self.n, self.repeat = fetch, n, repeat
        self.pool, self.persistent = pool, persistent
        self.placements = ([move] if move else []) + list(placements)
        self.choices = choices
        self.steps_per_epoch = fetch.order.batches
        self.inspector: Inspector | None = None

    def batches(self, start: int) -> Iterator[Batch]:
        """Batches from step `start` on; ends after an epoch unless the loader repeats."""
        epochs = self._epochs(start)
        if self.pool is None:
            batches: Iterator[Batch] = (self.fetch(key) for keys in epochs for key in keys)
        else:
            batches = self._from_workers(epochs, self.pool)
        if self.inspector is not None:  # before the device has it
            batches = map(self.inspector.inspect, count(start), batches)
        yield from map(self._placed, batches) if self.placements else batches

    def peek(self) -> Batch:
        """The first batch, fetched here, so that workers go on with what they are at."""
        return self._placed(self.fetch((0, 0)))

    def at(self, step: int) -> Batch:
        """The batch of that step, fetched here; workers and iterators are not disturbed."""
        batch = self.fetch(divmod(step, self.steps_per_epoch))
        return self._placed(batch if self.inspector is None else self.inspector.pruned(batch))

    def indices(self, step: int) -> list[int]:
        """Which samples of the data set that batch holds."""
        chosen: list[int] = self.fetch.order.batch(*divmod(step, self.steps_per_epoch))[0].tolist()
        return chosen

    def samples(self, step: int) -> int:
        """How many samples the batch of that step holds."""
        size = self.fetch.order.batch_size
        return min(size, self.n - step % self.steps_per_epoch * size)

    def ready(self) -> tuple[int, int]:
        """How many batches workers had fetched when they were asked for, and how many were."""
        return (0, 0) if self.pool is None else (self.pool.ready, self.pool.asked)

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


def _workers(source: Dataset, config: DataConfig, batch_size: int, choices: list[Choice]) -> int:
    if config.workers is not None:
        return config.workers
    cores = _cores()
    seconds = None if source.sample_seconds is None else source.sample_seconds * batch_size
    if source.in_memory:
        workers, reason = 0, "the data is in memory; workers would only copy it"
    elif seconds is not None and seconds < QUICK_S:
        workers, reason = (
            0,
            f"a batch is fetched in {1e3 * seconds:.1f} ms, faster than handed over",
        )
    else:
        workers = min(MOST_WORKERS, cores)
        measured = "" if seconds is None else f", and a batch takes {1e3 * seconds:.0f} ms"
        reason = f"samples are fetched one by one{measured}; {cores} cores are there"
    choices.append(Choice("data.workers", workers, reason))
    return workers


def _pin(config: DataConfig, device: torch.device, choices: list[Choice]) -> bool:
    possible = device.type == "cuda"
    pin = possible and config.pin_memory is not False
    if config.pin_memory is None or config.pin_memory != pin:
        reason = f"pinned memory is for CUDA; the device is {device.type}"
        if possible:
            reason = "the copy to the device then overlaps with computing"
        choices.append(Choice("data.pin_memory", pin, reason))
    return pin


def _aside(config: DataConfig, pin: bool, choices: list[Choice]) -> bool:
    aside = pin and config.device_prefetch is True
    if config.device_prefetch and not aside:
        reason = "a copy runs beside the step on CUDA alone, and from pinned memory"
        choices.append(Choice("data.device_prefetch", False, reason))
    return aside


def _persistent(config: DataConfig, workers: int, choices: list[Choice]) -> bool:
    if not workers and config.persistent_workers is None:
        return False  # nothing to choose
    persistent = workers > 0 and config.persistent_workers is not False
    if config.persistent_workers is None or config.persistent_workers != persistent:
        reason = (
            "keeping them costs less than starting them each epoch" if workers else "no workers"
        )
        choices.append(Choice("data.persistent_workers", persistent, reason))
    return persistent


def _prefetch(config: DataConfig, workers: int, choices: list[Choice]) -> int:
    if (config.prefetch is None) != bool(workers):
        return config.prefetch or 0  # as asked, or nothing to choose
    ahead = PREFETCH if workers else 0
    reason = "one to hand over, one in the making" if workers else "no workers"
    choices.append(Choice("data.prefetch", ahead, reason))
    return ahead


def _cores() -> int:
    """Cores that this process may use, as far as the system tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def mover(device: torch.device, pin: bool, aside: bool) -> Callable[[Batch], Batch] | None:
    """What brings a batch to the device; None on the CPU, where it already is.

    With `aside` it is copied while the step before it is computed: the host, which only queues
    that step, has asked for this batch long before the device is done.
    """
    if device.type == "cpu":
        return None

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            # memory that is not pinned may be freed under the copy, so that one is waited for
            return (value.pin_memory() if pin else value).to(device, non_blocking=pin)
        if isinstance(value, dict):
            return {key: move(item) for key, item in value.items()}
        return tuple(move(item) for item in value)

    if not aside:
        return move
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def move_aside(batch: Batch) -> Batch:
        with torch.cuda.stream(stream):
            moved: Batch = move(batch)
        steps = torch.cuda.current_stream(device)
        steps.wait_stream(stream)  # the device waits, the host does not
        _keep_for(moved, steps)
        return moved

    return move_aside


def _keep_for(value: Any, stream: torch.cuda.Stream) -> None:
    """Memory of another stream is not to be used anew before `stream` is done with it."""
    if isinstance(value, Tensor):
        value.record_stream(stream)
    else:
        for item in value.values() if isinstance(value, dict) else value:
            _keep_for(item, stream)
