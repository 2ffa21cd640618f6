"""The loaders of a run on data that are read in order."""

from __future__ import annotations

from typing import Any

import numpy as np

from runner.core.build.data import LoaderFactory, RunData
from runner.core.build.setup import Setup
from runner.core.data.loader import assemble_loader
from runner.core.data.order import BatchSampler
from runner.core.data.stream import StreamDataset
from runner.core.data.stream_loader import (
    NoValidation,
    StreamFetch,
    StreamLoader,
    StreamShard,
    no_validation,
)
from runner.core.errors import ConfigError
from runner.core.findings import Choice, notice
from runner.core.interfaces.processes import WorldProtocol
from runner.core.interfaces.technique import RunBuilder
from runner.core.schemas.data import DataConfig


def check_stream(setup: Setup, run_data: RunData, processes: WorldProtocol) -> tuple[int, int]:
    """Check what a stream needs; return its batch size, and the steps of an epoch, or of the run.

    Raises ConfigError without training.steps or anything to validate on.
    """
    training = setup.config.training
    data: Any = run_data.data  # a StreamDataset
    if setup.trains and training.steps is None and data.length is None:
        problem = f"is required: {data.name} is read in order, and has no length"
        fix = "training.steps=1000" + " in place of training.epochs" * (training.epochs is not None)
        raise ConfigError("training.steps", problem, fix)
    goes_without = training.validate_every == 0 if setup.trains else run_data.evaluates_all
    if data.make_validation is None and not goes_without:
        raise no_validation(data)
    if processes.size > 1 and data.own_batches:
        problem = f"{data.name} has batches of its own, which several processes cannot share"
        raise ConfigError("distributed", problem, "use one process")
    size = data.set_batch_size(training.batch_size)
    if size % processes.size:
        problem = f"{size} samples are not equally many for each of {processes.size} processes"
        raise ConfigError("training.batch_size", problem, f"use a multiple of {processes.size}")
    if size != training.batch_size and setup.trains:
        reason = f"the first batch of {data.name}, which makes them; not {training.batch_size}"
        setup.choices.append(notice("training.batch_size", size, reason))
    return size, data.length or training.steps or 1


class StreamLoaders(LoaderFactory):
    """Makes the loaders of a run on a stream."""

    @property
    def data(self) -> StreamDataset:
        """The training stream."""
        stream: Any = self.run_data.data
        return stream  # type: ignore[no-any-return]

    def training_loader(self, **options: Any) -> StreamLoader:
        """Return the endless loader of the training stream."""
        config: DataConfig = options["config"]
        workers, choices = choose_workers(self.data, config)
        readers, count = max(1, workers), self.processes.size
        told = workers > 0 or count > 1
        shard = StreamShard(self.processes.rank * readers, count * readers, told)
        size = 1 if self.data.own_batches else self.batch_size // count
        batches = self.data.length or self.config.training.steps or 1
        order = _sizes(self.batch_size, batches)
        fetch = StreamFetch(
            self.data, order, shard, readers, size,
            seed=self.config.seed, keeps_states=workers > 0,
        )  # fmt: skip
        return self._assemble(StreamLoader, fetch, (workers, choices), repeat=True, **options)

    def loaders(self, builder: RunBuilder) -> tuple[StreamLoader, StreamLoader, None]:
        """Return the loaders of training and validation; there is no test set."""
        options: dict[str, Any] = {"config": builder.data, "placements": tuple(builder.placements)}
        return self.training_loader(**options), self._validation_loader(**options), None

    def _validation_loader(self, config: DataConfig, **options: Any) -> StreamLoader:
        """Return the validation loader: each process reads all, by one worker at most."""
        source = self.data.open_validation()
        if source is None and self.run_data.evaluates_all:
            source = self.data
        if source is not None and source.own_batches and config.validation_samples is not None:
            problem = f"counts samples, and {source.name} has batches of its own"
            raise ConfigError("data.validation_samples", problem, "leave it out")
        kind = NoValidation if source is None else StreamLoader
        source, size = source or self.data, self.batch_size
        source.dtype, source.sizes = self.data.dtype, self.data.sizes
        source.set_batch_size(size)
        workers = min(1, choose_workers(source, config)[0])
        items = 1 if source.own_batches else size
        fetch = StreamFetch(
            source, _sizes(size, 1), StreamShard(is_told=workers > 0), 1, items,
            repeats=False, most=config.validation_samples, share=self.rank_slice,
        )  # fmt: skip
        return self._assemble(kind, fetch, (workers, []), config=config, repeat=False, **options)

    def _assemble(
        self, kind: type[StreamLoader], fetch: StreamFetch, chosen: Any, **options: Any
    ) -> StreamLoader:
        options = {"placements": (), "device": self.device, **options}
        return assemble_loader(kind, fetch, chosen, **options)


def _sizes(batch_size: int, batches: int) -> BatchSampler:
    """Return what a loader asks of the order of its samples, for data without an index."""
    return BatchSampler(np.arange(batch_size), batch_size, batches, 0, shuffle=False, seeds=False)


def choose_workers(data: StreamDataset, config: DataConfig) -> tuple[int, list[Choice]]:
    """Return the number of workers: none unless it is set, as a stream's order depends on it."""
    if data.is_loader:
        return 0, []
    if config.workers is not None:
        return config.workers, []
    reason = "not chosen for a stream, whose order depends on it"
    return 0, [Choice("data.workers", 0, reason)]
