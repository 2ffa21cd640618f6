"""Batches of a stream: read in order, in this process or by workers, from a position on."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.utils.data._utils.worker as torch_worker

from runner.core.data.loader import BatchLoader
from runner.core.data.order import BatchSampler, Segment, mix
from runner.core.data.stream import VALIDATION_KEY, StreamDataset, has_state
from runner.core.data.user_dataset import SEED_MASK, set_states
from runner.core.errors import CheckpointError, ConfigError, DataError, RunnerError
from runner.core.interfaces.batch import Batch, batch_size_of
from runner.core.preserved_state import preserve_random_state
from runner.core.security.files.encode import encode

if TYPE_CHECKING:
    from runner.core.data.workers import Key
    from runner.core.interfaces.run import Run

log = logging.getLogger("runner")

SKIP_TIMEOUT_S = 86_400.0  # for a worker that skips what was read before
_END = object()
_BATCH, _PASS = 17, 18  # stream numbers of seeds, beside those of `runner.core.data.order`


class Position(NamedTuple):
    """How far a reader is."""

    batches: int = 0
    passes: int = 0  # that are over
    items: int = 0  # taken in the current pass
    state: Any = None  # of the stream there, as plain data; None: it has none
    pass_items: int = 0  # in the last pass that is over

    @property
    def passes_read(self) -> int:
        """The passes read to their end, which shows only when the next item is asked for."""
        return self.passes + (0 < self.pass_items == self.items)


@dataclass(frozen=True)
class StreamShard:
    """The part of a stream that one reader of a run takes."""

    number: int = 0
    count: int = 1
    is_told: bool = False  # `get_worker_info` answers; else it is None


class ShardInfo:
    """torch's `WorkerInfo` over the readers of all processes; notes whether it is asked."""

    def __init__(self, shard: StreamShard, seed: int, dataset: Any) -> None:
        self.seed, self.dataset, self.rng = seed, dataset, None
        self.worker_method = "multiprocessing"
        self.shard, self.asked = shard, False

    @property
    def id(self) -> int:
        """The number of the reader."""
        self.asked = True
        return self.shard.number

    @property
    def num_workers(self) -> int:
        """The number of readers."""
        self.asked = True
        return self.shard.count


@dataclass(frozen=True)
class StreamBatch:
    """A batch of a stream, and where its reader is after it."""

    batch: Batch | None  # None: the stream has ended
    samples: int  # over all processes
    reader: int
    position: Position
    notes: Sequence[tuple[str, str]] = ()  # kind and text of what is to be said


class Reader:
    """Reads the batches of one shard in order, from a position on.

    The global generators are seeded at the start of each pass and of each batch, so what a stream
    draws from them is the same after a resume.
    """

    def __init__(
        self,
        data: StreamDataset,
        shard: StreamShard,
        size: int,  # items in a batch
        seed: int,
        at: Position,
        repeats: bool = True,
        most: int | None = None,  # items; None: to the end
    ) -> None:
        self.data, self.shard, self.size, self.at = data, shard, size, at
        self.seed, self.repeats, self.most = mix(seed, shard.number), repeats, most
        self.items: Any = None  # an iterator, once it is open
        self.holder: Any = None  # of the stream's state
        self.generator_state: Any = None  # of a DataLoader's, at the start of the pass
        self.is_whole = True  # False: a batch was read in part
        self.notes: list[tuple[str, str]] = []

    def read(self, number: int) -> list[Any]:
        """Return the items of batch `number`; [] after the end. Earlier ones are skipped."""
        start, before = perf_counter(), self.at
        skipped = 0 if self.items is not None else self._open()
        while self.at.batches < number:
            skipped += len(self._take())
        if skipped:
            what = f"{skipped:,} {self.data.unit} of {self.data.name}{self._of_shard()}"
            seconds = f"{perf_counter() - start:.1f} s"
            text = f"data: {what} were read before and had to be skipped: {seconds}"
            self.notes.append(("skipped", text))
        items = self._take()
        if before.batches == 0:
            self.position()  # a state that no checkpoint can hold is an error at once
        return items

    def position(self) -> Position:
        """Return the position after the last batch, with the stream's state if that is exact."""
        if self.items is None or not self.is_whole:
            return self.at
        state = self.generator_state
        if has_state(self.holder):
            with self.data.errors_of("state_dict"):
                state = self.holder.state_dict()
        try:
            path = f"state_dict of {self.data.name}"
            return self.at._replace(state=encode(state, path, lambda _, tensor: tensor.clone()))
        except TypeError as error:
            raise DataError(f"data: {error}") from error

    def _take(self) -> list[Any]:
        at, items, self.is_whole = self.at, list[Any](), False
        passes, taken, pass_items = at.passes, at.items, at.pass_items
        wanted = self.size if self.most is None else min(self.size, self.most - taken)
        self._seed(_BATCH, at.batches)
        while len(items) < wanted:
            item = self._next(taken)
            if item is not _END:
                items.append(item)
                taken += 1
                continue
            if not self.repeats:
                break
            self._check_not_empty(taken)
            text = f"data: {self.data.name} ended after {taken:,} {self.data.unit}"
            if self.data.length is None:  # else it is expected
                text += f"{self._of_shard()} and starts over: pass {passes + 2}"
                self.notes.append(("ended", text))
            passes, taken, pass_items = passes + 1, 0, taken
            self._begin_pass(passes)
        self.at = Position(at.batches + 1, passes, taken, pass_items=pass_items)
        self.is_whole = True
        return items

    def _open(self) -> int:
        """Open the stream at the position; return the number of items that had to be skipped."""
        at = self.at
        self._begin_pass(at.passes, at.state)
        if not at.items or at.state is not None and not self.data.own_batches:
            return 0
        start = at.batches * self.size - at.items  # of this pass, perhaps within a batch
        for taken in range(at.items):
            batch, offset = divmod(start + taken, self.size)
            if not offset and (taken or not at.passes):  # else it has the chance of its pass
                self._seed(_BATCH, batch)
            if self._next(taken) is _END:
                problem = f"{self.data.name} has fewer samples than before the resume"
                raise DataError(f"data: {problem}{self._of_shard()}")
        return at.items

    def _begin_pass(self, number: int, state: Any = None) -> None:
        data = self.data
        stream, data.unread = data.unread, None
        with data.errors_of("opening it"):
            if stream is None or number or state is not None:
                stream = data.open() if self.items is None else data.make()
            if self.repeats and callable(getattr(stream, "set_epoch", None)):
                stream.set_epoch(number)
            self._seed(_PASS, number)
            if not self.repeats:
                set_states(data.generators, data.start_states)
            self.holder = None if data.own_batches else stream
            if data.own_batches:
                self.generator_state = _generator_state(stream, state)
            elif state is not None and has_state(self.holder):
                self.holder.load_state_dict(state)
            items = data.iterate(stream)
            if not data.own_batches and has_state(items):
                self.holder = items
                if state is not None:
                    self.holder.load_state_dict(state)
            resumes = state is not None
            self.items = items if self.shard.count == 1 else self._take_shard(items, resumes)

    def _take_shard(self, items: Iterator[Any], resumes: bool) -> Iterator[Any]:
        """Yield the items of the shard: every so many of a stream that did not ask for it."""
        number, shards = self.shard.number, self.shard.count
        if self.data.sampler is None:
            items = chain([*islice(items, 1)], items)  # by its first item it has asked
            if getattr(torch_worker._worker_info, "asked", False):
                yield from items
                return
        yield from islice(items, shards - 1 if resumes else number, None, shards)

    def _next(self, taken: int) -> Any:
        try:
            return next(self.items, _END)
        except RunnerError:
            raise
        except Exception as error:
            raise self.data.translate(f"sample {taken}{self._of_shard()}", error) from error

    def _check_not_empty(self, taken: int) -> None:
        if taken:
            return
        problem = f"data: {self.data.name} has no samples{self._of_shard()}"
        fix = "; use fewer data.workers, or more files" if self.shard.count > 1 else ""
        raise DataError(problem + fix)

    def _of_shard(self) -> str:
        number, shards = self.shard.number, self.shard.count
        return f" for reader {number + 1} of {shards}" if shards > 1 else ""

    def _seed(self, kind: int, number: int) -> None:
        seed = mix(self.seed, kind, number)
        random.seed(seed)
        np.random.seed(seed & SEED_MASK)
        torch.default_generator.manual_seed(seed & SEED_MASK)

    @contextmanager
    def worker_info(self) -> Iterator[None]:
        """Let `torch.utils.data.get_worker_info` answer while entered."""
        before = torch_worker._worker_info
        info: Any = None  # not torch's class, which differs between its versions
        if self.shard.is_told:
            info = ShardInfo(self.shard, self.seed, self.data.dataset)
        torch_worker._worker_info = info
        try:
            yield
        finally:
            torch_worker._worker_info = before


def _generator_state(loader: Any, state: Any) -> Any:
    """Return the state of a loader's generator, after setting it to `state`; None without one."""
    generator = getattr(loader, "generator", None)
    if not isinstance(generator, torch.Generator):
        return None
    if state is not None:
        generator.set_state(state)
    return generator.get_state()


@dataclass(eq=False)
class StreamFetch:
    """Reads the batch of a key: (number of the pass over a validation set, number of the batch).

    In a worker process it has the reader of that worker, else the only one.
    """

    source: StreamDataset
    order: BatchSampler  # of which only the sizes are used
    shard: StreamShard  # of the first reader
    readers: int
    size: int  # items in a batch
    seed: int = 0
    repeats: bool = True
    most: int | None = None  # items in a pass
    share: Callable[[int], slice] | None = None  # of a batch, for this process
    keeps_states: bool = False  # with each batch, of workers that read ahead

    def __post_init__(self) -> None:
        self.positions: dict[int, Position] = {}  # by reader, after its last batch that was used
        self.open: tuple[int, int, Reader] | None = None  # pass, number and reader

    def __call__(self, key: Key) -> StreamBatch:
        """Return the batch of `key`."""
        reader, number = self._reader(key), key[1] // self.readers
        preserve: AbstractContextManager[None] = nullcontext()  # a worker has its own
        if not self.keeps_states:
            preserve = preserve_random_state()
        with preserve, torch.no_grad(), reader.worker_info():
            first = reader.at.items
            items = reader.read(number)
            samples = len(items) * (processes := self.shard.count // self.readers)
            if self.share is not None:  # of a validation batch, which every process reads
                share = self.share(len(items))
                # no share: the first sample of the batch stands in
                items = items[share] if share.start < share.stop else items[:1]
            batch = self.source.assemble_items(items, first) if items else None
            if self.share is None and processes == 1 and batch is not None:
                samples = batch_size_of(batch[1])  # which a collate_fn may change
            position = reader.position() if self.keeps_states else reader.at
        notes, reader.notes = reader.notes, []
        return StreamBatch(batch, samples, key[1] % self.readers, position, notes)

    def _reader(self, key: Key) -> Reader:
        """Return the open reader of a key; one that is further, or was interrupted, starts anew."""
        index, number = key[1] % self.readers, key[1] // self.readers
        if self.open is not None and self.open[:2] == (key[0], index):
            reader = self.open[2]
            if reader.is_whole and reader.at.batches <= number:
                return reader
        at = self.positions.get(index, Position())
        at = at if at.batches <= number else Position()
        shard = replace(self.shard, number=self.shard.number + index)
        limits = self.repeats, self.most
        self.open = *key[:1], index, Reader(self.source, shard, self.size, self.seed, at, *limits)
        return self.open[2]

    def current_positions(self) -> dict[int, Position]:
        """Return where each reader is, for a checkpoint between two steps."""
        if self.open is not None and not self.keeps_states:
            return {0: self.open[2].position()}
        return self.positions


class StreamLoader(BatchLoader):
    """Loader of a stream: endless with `repeat`, else one pass, the same one each time."""

    fetch: Any  # a StreamFetch
    is_stream = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.current: tuple[int, Batch] | None = None  # step of the last batch, and the batch
        self.last_samples = 0
        self.passes_begun = 0  # over a validation set
        self.gathered: tuple[int, list[Any]] | None = None  # step, and positions by rank
        self.said: set[str] = set()  # kinds of notes

    def batches(self, start: int) -> Iterator[Batch]:
        """Yield batches from step `start`: endlessly with `repeat`, else to the stream's end."""
        if self.repeat:  # before it is open, as a second opening moves a caller's stream
            self.fetch_on_cpu()
        self.passes_begun += not self.repeat
        keys = ((self.passes_begun, number) for number in count(start))
        if self.pool is None:
            fetched: Iterator[StreamBatch] = map(self.fetch, keys)
        else:
            if self.repeat:
                self.pool.close()  # new workers know the current positions
            fetched = self.pool.batches(keys)
        timeout_s = 0.0
        if self.pool is not None and start and self.repeat:  # until each has skipped
            timeout_s, self.pool.timeout_s = self.pool.timeout_s, SKIP_TIMEOUT_S
        for step, result in enumerate(fetched, start):
            if self.pool is not None and timeout_s and step >= start + self.fetch.readers:
                self.pool.timeout_s, timeout_s = timeout_s, 0.0
            for kind, text in result.notes:
                log.log(logging.DEBUG if kind in self.said else logging.WARNING, "%s", text)
                self.said.add(kind)
            if result.batch is None:
                return
            if self.repeat:
                self.fetch.positions[result.reader] = result.position
            self.last_samples, batch = result.samples, result.batch
            if self.inspector is not None:
                batch = self.inspector.inspect(step, batch)
            batch = self._place(batch)
            self.current = step, batch
            yield batch

    def continue_segments(self, segments: Sequence[Segment], step: int) -> bool:
        """A stream continues where it is, with any batch size."""
        return False

    def epochs_before(self, step: int) -> float:
        """Return the passes that every reader has ended, or by a length those until `step`.

        A first pass counts once the second has begun, as its end is not known before.
        """
        if self.fetch.source.length is not None:
            return step / self.steps_per_epoch
        return float(min((at.passes_read for at in self.fetch.positions.values()), default=0))

    def at(self, step: int) -> Batch:
        """Return the current batch, also for those to come, or the first; DataError for others."""
        if self.current is not None and self.current[0] <= step:
            return self.current[1]
        if step and self.current is not None:
            text = f"data: not applicable: a stream: batch {step + 1} cannot be fetched again"
            raise DataError(text)
        return self._place(self.fetch_on_cpu())

    def fetch_on_cpu(self, step: int = 0) -> Batch:
        """Return the first batch, which is read from another opening of the stream."""
        source: StreamDataset = self.fetch.source
        share = len(source.train) if source.own_batches else self.fetch.size
        return source.fetch(source.train[:share], None)

    def indices(self, step: int) -> list[int]:
        """Return the numbers of the samples in a batch, in the order of training."""
        size = self.batch_size
        return list(range(step * size, (step + 1) * size))

    @property
    def empty(self) -> bool:
        """No batch is a stand-in."""
        return False

    def samples(self, step: int) -> int:
        """Return the size of the last batch, over all processes."""
        return self.last_samples or self.batch_size

    def state(self, run: Run) -> dict[str, Any]:
        """Return the positions of all readers, by process, for a checkpoint.

        Collective, but once per step: later calls, of a process that ends alone, reuse them.
        """
        step = run.progress.step
        if self.gathered is None or self.gathered[0] != step:
            own = {index: list(at) for index, at in self.fetch.current_positions().items()}
            self.gathered = step, run.gather(own)
        return {"readers": self.fetch.shard.count, "processes": self.gathered[1]}

    def load(self, state: Any, run: Run) -> None:
        """Continue at the positions of a checkpoint; CheckpointError for another number of readers.

        A process whose position is not known skips what it has read.
        """
        if state is None:
            return
        readers, now = int(state["readers"]), self.fetch.shard.count
        if readers != now:
            problem = f"its stream was read by {readers} readers (workers of all processes)"
            fix = "resume with the same data.workers and distributed.processes"
            raise CheckpointError(f"data.workers: {problem}, and now there are {now}; {fix}")
        found = state["processes"]
        own = found[run.rank] if run.rank < len(found) else {}
        self.fetch.positions = {int(index): Position(*at) for index, at in own.items()}


def no_validation(data: StreamDataset) -> ConfigError:
    """Return the error for a stream without anything to validate on."""
    problem = f"is required, as no samples of {data.name}, a stream, can be held out"
    fix = f"{VALIDATION_KEY}=my_package.MyStream, or let its constructor take `split`"
    if data.is_loader:
        fix = "give one from Python: Components(data=…, validation=…)"
    return ConfigError(VALIDATION_KEY, problem, f"{fix}; training.validate_every=0 goes without")


class NoValidation(StreamLoader):
    """Loader of a validation set that there is not; whoever asks for batches gets an error."""

    def batches(self, start: int) -> Iterator[Batch]:
        """Raise ConfigError."""
        raise no_validation(self.fetch.source)

    def at(self, step: int) -> Batch:
        """Raise ConfigError."""
        raise no_validation(self.fetch.source)
