"""What the processes of a run agree on: sums, flags, choices. Each call is made by all of them."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from itertools import chain, count, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, TCPStore

from runner.distributed.config import DistributedConfig, DistributedKind
from runner.distributed.outcome import RANKS, RankOutcome, SharedOutcomes
from runner.distributed.place import Place
from runner.distributed.stacks import StackWriter
from runner.errors import ConfigError, ProcessLost, RunnerError, UsageError

if TYPE_CHECKING:
    from runner.distributed.commit import Commit
    from runner.distributed.sharded import Shards
    from runner.optim.optimizer_step import OptimizerStep
    from runner.training.run import Run

T = TypeVar("T")
_numbers = count()  # of the worlds of this process, as of every other

NAMED = 3  # weights that a message names
PATIENCE = 0.8  # share of the time-out after which a process writes where it stands


class World:
    """The processes that train one model, as one of them sees them."""

    def __init__(self, place: Place, config: DistributedConfig, device: torch.device) -> None:
        """Meet the others. Raises ProcessLost where one does not come within the time-out."""
        self.place, self.rank, self.size = place, place.rank, place.size
        self.config, self.device = config, device
        self.host = socket.gethostname()
        own = config.backend.value if config.backend is not None else None
        self.backend = own or ("nccl" if device.type == "cuda" else "gloo")
        if device.type != "cuda" and self.backend == "nccl":
            problem = "nccl is between GPUs, and there is none"
            raise ConfigError("distributed.backend", problem, "leave it out, or use gloo")
        self.clock: Callable[[], AbstractContextManager[None]] = nullcontext  # the run's, once set
        self.lost = False  # another process has ended: nothing is done together any more
        self._commit: Commit | None = None
        self.shards: Shards | None = None  # set where each has a shard of every weight
        # set with the model: while entered, a backward sends nothing; what a validation calls
        self.no_sync: Callable[[], AbstractContextManager[None]] = nullcontext
        self.alone: Callable[..., Any] | None = None
        self.left = False  # this process does by itself what it has yet to do
        self.sample_flop: float | None = None  # of a step, set with the model where it is known
        self.stand_in = False  # the samples of this micro-batch are others', and count for nothing
        self.trained: list[tuple[str, Tensor]] = []  # weights that each step's gradients are of
        self._stacks: StackWriter | None = None
        if place.address in ("127.0.0.1", "localhost", "::1"):
            # gloo would look the machine's name up, which need not be known
            for name in {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        timeout = timedelta(seconds=config.timeout_s)
        both = "cpu:gloo,cuda:nccl" if self.backend == "nccl" else self.backend
        if dist.is_initialized():
            raise UsageError("distributed: this process has a process group; let build make it")
        with self._waiting():
            self.store = open_store(place, timeout)
            # apart from what an earlier attempt, or an earlier run of this process, has left there
            prefix = f"attempt_{place.attempt}/{next(_numbers)}"
            store = PrefixStore(prefix, self.store)
            dist.init_process_group(
                both, store=store, rank=place.rank, world_size=place.size, timeout=timeout
            )
        # who waits in one client holds up its other callers, as a collective may
        client: Any = self.store
        outcomes = PrefixStore(prefix, client.clone())
        self._outcomes = SharedOutcomes(outcomes, self.rank, self.size)
        self._write(RankOutcome(self.rank, "running"))

    @property
    def first(self) -> bool:
        """Whether this process writes the record of the run."""
        return self.rank == 0

    @property
    def kind(self) -> str:
        """How the model is trained: ddp or fsdp."""
        return self.config.kind.value

    def describe(self) -> dict[str, Any]:
        """What is known of it from the first step on."""
        return {
            "kind": self.kind,
            "world_size": self.size,
            "backend": self.backend,
            "attempt": self.place.attempt,
            "restarts": [message for _, message in self.place.losses],  # and why
        }

    def close(self, error: BaseException | None = None) -> None:
        """Leave; what the others still do with this one fails, and they are told the error.

        After a loss the group is left as it is: taking it down is not sure to return.
        """
        if isinstance(error, Exception) and not self.left:  # a signal is sent to all
            self._write(RankOutcome.of(self.rank, error))
        if self._stacks is not None:
            self._stacks.close()
            self._stacks = None
        if dist.is_initialized() and not self.left:
            dist.destroy_process_group()

    # -- what belongs to this process ----------------------------------------------------------

    def part(self, samples: int) -> slice:
        """Which of a batch's samples are this process's; parts differ by one at most."""
        return _even(samples, self.size)[self.rank]

    def largest(self, samples: int) -> int:
        """Samples in the largest of the processes' parts."""
        return -(-samples // self.size)

    def parts(self, samples: int, micro_batch: int, own: int) -> list[slice]:
        """The micro-batches of this process's part of a batch: as many as any has.

        Where its part, or the `own` samples that are left of it, are too few, one is empty.
        """
        mine = self.part(samples)
        own = min(own, mine.stop - mine.start)
        return _even(own, max(1, -(-self.largest(samples) // micro_batch)))

    def check_batches(self, samples: int, batch_size: int, drop_last: bool) -> None:
        """Raise ConfigError where a training batch has fewer samples than there are processes."""
        last = samples % batch_size
        if batch_size < self.size:
            problem = f"is {batch_size}, and {self.size} processes take their part of each batch"
            raise ConfigError("training.batch_size", problem, f"use {self.size} or more")
        if 0 < last < self.size and not drop_last:
            problem = f"leaves a last batch of {last}, fewer than the {self.size} processes"
            raise ConfigError("training.batch_size", problem, "change it, or data.drop_last=true")

    def folder(self, folder: Path) -> Path:
        """Where this process writes, in the folder of the run."""
        return folder if self.first else folder / RANKS / str(self.rank)

    def refuses(self, technique: str) -> str | None:
        """Why a technique of that name cannot work with the way the model is trained here."""
        if self.config.kind is not DistributedKind.fsdp:
            return None
        from runner.distributed.sharded import REFUSED

        return REFUSED.get(technique)

    def meeting(self) -> Commit:
        """Where the processes agree that a checkpoint is whole."""
        from runner.distributed.commit import Commit

        if self._commit is None:
            self._commit = Commit(self)
        return self._commit

    # -- what all do together ------------------------------------------------------------------

    def total(self, values: Tensor) -> Tensor:
        """The sum over all processes, in place, on the device: the host does not wait for it."""
        with self._waiting():
            dist.all_reduce(values)
        return values

    def whole_weight(self, weight: Tensor | float, own: int, samples: int) -> Tensor | float:
        """The weight of a batch over all processes, from that of the `own` samples.

        Where there is none of its own, the weight is another's, which counts for nothing.
        """
        if not isinstance(weight, Tensor):
            return weight / own * samples
        mine = self.part(samples)
        counts = own and mine.stop > mine.start
        return self.total(weight.clone() if counts else torch.zeros_like(weight))

    def measure(
        self, update: OptimizerStep, loss: Tensor, veto: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, gradient norm and skip flag of a step, by one sum of what each process has."""
        self._check_gradients()
        spoiled, square = update.local_part()
        parts = [loss, update.never if veto is None else veto.to(loss.device), spoiled, square]
        total, vetoed, bad, squares = self.total(torch.stack([p.to(loss.dtype) for p in parts]))
        norm, skipped = update.measure(total, None if self.shards is None else squares.sqrt())
        unfit = ((vetoed + bad) > 0).to(skipped.dtype)
        return total, norm, torch.maximum(skipped, unfit)

    def _check_gradients(self) -> None:
        """Raise ConfigError where a weight has none: the others would wait for it, or not get it.

        What was sent together with it has not arrived either, so that no update may follow.
        """
        missing = [name for name, weight in self.trained if weight.grad is None]
        if missing:
            more = ", …" if len(missing) > NAMED else ""
            problem = (
                f"is false, and the loss does not depend on {', '.join(missing[:NAMED])}{more}"
            )
            fix = "set it to true, or leave them out of the model"
            raise ConfigError("distributed.unused_parameters", problem, fix)

    def share_buffers(self, model: nn.Module) -> None:
        """Give all processes rank 0's buffers, where each has followed its own samples."""
        with self._waiting():
            for buffer in model.buffers():
                value = buffer.detach().contiguous()
                dist.broadcast(value, 0)
                buffer.detach().copy_(value)

    def worst(self, *numbers: int) -> list[int]:
        """The largest of each number over all processes; on the host, once a step."""
        if self.left:
            return [*numbers]
        if self._stacks is not None:
            self._stacks.alive()
        flags = torch.tensor(numbers)
        with self._waiting():
            dist.all_reduce(flags, dist.ReduceOp.MAX)
        return flags.tolist()

    def gather(self, value: T) -> list[T]:
        """What each process gives, by rank; only its own where nothing is done together now."""
        if self.left:
            return [value]
        values: list[Any] = [None] * self.size
        with self._waiting():
            dist.all_gather_object(values, value)
        return values

    def union(self, numbers: list[int]) -> tuple[list[int], ProcessLost | None]:
        """What any process has; where one is lost, its own and the error, for later."""
        try:
            return sorted({*chain(*self.gather(numbers))}), None
        except ProcessLost as error:
            return numbers, error

    def choose(self, decide: Callable[[], T]) -> T:
        """What rank 0 decides; an error that it meets there is raised by all."""
        answer: list[Any] = [None, None]  # and the error, if there is one
        if self.first:
            try:
                answer[0] = decide()
            except RunnerError as error:
                answer[1] = error
        with self._waiting():
            dist.broadcast_object_list(answer, 0)
        if answer[1] is not None:
            raise answer[1]
        decided: T = answer[0]
        return decided

    def barrier(self) -> None:
        """Until all are here."""
        self.worst(0)

    # -- what becomes of a process that is lost --------------------------------------------------

    @property
    def faults(self) -> Counter[str]:
        """What has had all processes started again, by kind."""
        return Counter(kind for kind, _ in self.place.losses)

    def leave(self, error: BaseException) -> None:
        """From here on this process does by itself what it has yet to do, such as saving.

        The agent is told, which would take a process that saves for long for a hung one.
        """
        self.left = True
        self._write(RankOutcome.of(self.rank, error))

    def _write(self, outcome: RankOutcome) -> None:
        if self.place.meeting is not None:
            outcome.write(self.place.meeting)
        elif outcome.kind != "running":
            self._outcomes.publish(outcome)

    def watch(self, file: Path) -> None:
        """Write every thread's stack there when nothing is agreed on for most of the time-out.

        Also when this process crashes.
        """
        self._stacks = StackWriter(file, PATIENCE * self.config.timeout_s)

    @contextmanager
    def together(self) -> Iterator[None]:
        """For what needs the other processes: raises ProcessLost where one of them has ended."""
        try:
            yield
        except Exception as error:
            if not is_lost(error):
                raise
            raise self.lose(error) from error

    def find_error(self) -> ProcessLost | None:
        """What has ended another process, where no agent of ours asks them all."""
        return self._outcomes.find_error() if self.place.meeting is None else None

    def lose(self, error: BaseException) -> ProcessLost:
        """The error for one that `is_lost`, which says who was lost where no agent of ours does."""
        if isinstance(error, ProcessLost):
            return error
        lost, self.lost = as_lost(error), True
        if self.place.meeting is None:
            self._outcomes.publish(RankOutcome.of(self.rank, lost))
            lost = self._outcomes.name_cause(lost)
        return lost

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        with self.together(), self.clock():
            yield


@cache
def open_store(place: Place, timeout: timedelta) -> TCPStore:
    """Where all processes leave what the others read; open as long as this process lives."""
    own = place.rank == 0 and not place.hosted
    return TCPStore(place.address, place.port, place.size, own, timeout, wait_for_workers=False)


def is_lost(error: BaseException) -> bool:
    """Whether it means that another process has ended, or does not answer."""
    if isinstance(error, ProcessLost | dist.DistError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("gloo/" in text or "NCCL" in text)


def as_lost(error: BaseException) -> ProcessLost:
    """The error that is raised for one that `is_lost`."""
    if isinstance(error, ProcessLost):
        return error
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    hung = "imed out" in text or "timeout" in text
    what = "does not answer within distributed.timeout_s" if hung else "has ended"
    return ProcessLost(f"another process {what} ({text.rpartition('] ')[2][:200]})", hung)


def refuse_lost(run: Run, error: Exception) -> bool:
    """The first of a run's recoveries: a step is not repeated without the others."""
    if is_lost(error):
        raise (as_lost(error) if run.world is None else run.world.lose(error)) from error
    return False


def _even(samples: int, parts: int) -> list[slice]:
    ends = [-(-samples * i // parts) for i in range(parts + 1)]
    return [slice(start, stop) for start, stop in pairwise(ends)]
