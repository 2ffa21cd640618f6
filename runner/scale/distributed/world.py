"""Collective operations of a run's processes. All processes have to make each call."""

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
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, TCPStore

from runner.core.errors import ConfigError, ProcessLost, RunnerError, UsageError
from runner.core.format import join_names
from runner.core.schemas.device import FSDP_UNSUPPORTED, DistributedConfig, DistributedKind
from runner.core.security.pickle_transfer import dumps_persistent
from runner.scale.distributed.outcome import RANKS_FOLDER, RankOutcome, SharedOutcomes
from runner.scale.distributed.rank_info import LOOPBACK, RankInfo
from runner.scale.distributed.stacks import StackWriter

if TYPE_CHECKING:
    from runner.core.interfaces.run import Run
    from runner.core.interfaces.shards import CheckpointCommitProtocol, ShardsProtocol
    from runner.core.interfaces.technique import RunBuilder
    from runner.core.optim.optimizer_step import OptimizerStep

T = TypeVar("T")
_world_numbers = count()  # numbers the worlds of this process, as in every other process

STACKS_SHARE = 0.8  # share of the timeout after which a process writes its stacks


class World:
    """The processes that train one model, from the view of one of them."""

    is_shared = True

    def __init__(self, place: RankInfo, config: DistributedConfig, device: torch.device) -> None:
        """Join the others. Raises ProcessLost if one does not come within the timeout."""
        self.place, self.rank, self.size = place, place.rank, place.size
        self.config, self.device = config, device
        self.host = socket.gethostname()
        self.backend = choose_backend(config, device.type)
        if device.type != "cuda" and self.backend == "nccl":
            problem = "nccl needs GPUs, and there are none"
            raise ConfigError("distributed.backend", problem, "leave it out, or use gloo")
        self.clock: Callable[[], AbstractContextManager[None]] = nullcontext  # of the run, once set
        self.lost = False  # another process has ended: no more collectives
        self._commit: CheckpointCommitProtocol | None = None
        self.shards: ShardsProtocol | None = None  # set if weights are sharded
        # set with the model: a context without gradient reduction; the call for validation
        self.no_sync: Callable[[], AbstractContextManager[None]] = nullcontext
        self.validation_forward: Callable[..., Any] | None = None
        self.has_left = False  # this process works alone from now on
        self.sample_flop: float | None = None  # FLOPs per sample, if known
        self.is_stand_in = False  # this micro-batch has no own samples, and does not count
        self._micro_batch: tuple[int, int, int] | None = None  # see `begin_micro_batch`
        # of the current batch, by rank, if some may have been left out
        self.usable_samples: list[int] | None = None
        self.trained_weights: list[tuple[str, Tensor]] = []  # they get a gradient in each step
        self._stacks: StackWriter | None = None
        if place.address in ("127.0.0.1", "localhost", "::1"):
            # gloo would look up the host name, which may not resolve
            for name in {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        timeout = timedelta(seconds=config.timeout_s)
        backends = "cpu:gloo,cuda:nccl" if self.backend == "nccl" else self.backend
        if dist.is_initialized():
            problem = "this process already has a process group"
            raise UsageError(f"distributed: {problem}; let build create it")
        with self._timed_collective():
            self.store = open_store(place, timeout)
            # separate from earlier attempts, and from earlier runs of this process
            prefix = f"attempt_{place.attempt}/{next(_world_numbers)}"
            store = PrefixStore(prefix, self.store)
            dist.init_process_group(
                backends, store=store, rank=place.rank, world_size=place.size, timeout=timeout
            )
        # own client: a waiting collective holds up other callers
        client: Any = self.store
        self._outcomes = SharedOutcomes(PrefixStore(prefix, client.clone()), self.rank, self.size)
        self._write(RankOutcome(self.rank, "running"))

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is rank 0, which writes the record."""
        return self.rank == 0

    @property
    def kind(self) -> str:
        """The kind of distributed training: ddp or fsdp."""
        return self.config.kind.value

    def describe(self) -> dict[str, Any]:
        """Return the facts that are known before the first step."""
        return {
            "kind": self.kind,
            "world_size": self.size,
            "backend": self.backend,
            "attempt": self.place.attempt,
            "restarts": [message for _, message in self.place.losses],  # with reasons
        }

    def close(self, error: BaseException | None = None) -> None:
        """Leave the group and publish the error; the others' collectives with this process fail.

        After a loss the group is not destroyed, since that may not return.
        """
        if isinstance(error, Exception) and not self.has_left:  # signals are sent to all processes
            self._write(RankOutcome.from_error(self.rank, error))
        if self._stacks is not None:
            self._stacks.close()
            self._stacks = None
        if dist.is_initialized() and not (self.has_left or self.lost):
            dist.destroy_process_group()

    # -- this process's part -------------------------------------------------------------------

    def local_slice(self, samples: int) -> slice:
        """Return the slice of a batch for this process; sizes differ by at most one."""
        return _split_evenly(samples, self.size)[self.rank]

    def max_local_samples(self, samples: int) -> int:
        """Return the largest number of samples of any process."""
        return -(-samples // self.size)

    def micro_batch_slices(self, samples: int, micro_batch: int, own: int) -> list[slice]:
        """Return the micro-batches of this process's part, equally many on all processes.

        If its part, or the `own` samples left of it, are too few, some are empty.
        """
        return self._split_part(self.local_slice(samples), samples, micro_batch, own)

    def _split_part(self, part: slice, samples: int, micro_batch: int, own: int) -> list[slice]:
        own = min(own, part.stop - part.start)
        return _split_evenly(own, max(1, -(-self.max_local_samples(samples) // micro_batch)))

    def begin_micro_batch(
        self, samples: int, micro_batch: int, number: int, is_stand_in: bool
    ) -> None:
        """Begin micro-batch `number` (from 0) of a batch of so many samples."""
        self.is_stand_in, self._micro_batch = is_stand_in, (samples, micro_batch, number)

    def count_samples(self) -> int:
        """Return the samples of the current micro-batch over all processes, without a collective.

        Outside of a step, at least one for each process.
        """
        if self._micro_batch is None:
            return self.size
        samples, micro_batch, number = self._micro_batch
        parts = _split_evenly(samples, self.size)
        own = self.usable_samples or [samples] * self.size
        micro_batches = (
            self._split_part(part, samples, micro_batch, usable)[number]
            for part, usable in zip(parts, own, strict=True)
        )
        return sum(each.stop - each.start for each in micro_batches)

    def check_batches(self, samples: int, batch_size: int, drop_last: bool) -> None:
        """Raise ConfigError if a training batch has fewer samples than there are processes."""
        last = samples % batch_size
        if batch_size < self.size:
            problem = f"is {batch_size}, fewer than one sample for each of {self.size} processes"
            raise ConfigError("training.batch_size", problem, f"use {self.size} or more")
        if 0 < last < self.size and not drop_last:
            problem = f"leaves a last batch of {last}, fewer than the {self.size} processes"
            raise ConfigError("training.batch_size", problem, "change it, or data.drop_last=true")

    def folder(self, folder: Path) -> Path:
        """Return the folder to which this process writes, below the run's."""
        return folder if self.is_rank_zero else folder / RANKS_FOLDER / str(self.rank)

    def unsupported_reason(self, technique: str) -> str | None:
        """Return why a technique does not work with this kind of training; None if it does."""
        is_sharded = self.config.kind is DistributedKind.fsdp
        return FSDP_UNSUPPORTED.get(technique) if is_sharded else None

    def checkpoint_commit(self) -> CheckpointCommitProtocol | None:
        """Return the object that coordinates checkpoints of shards; None without shards."""
        if self.shards is None:
            return None
        from runner.scale.distributed.commit import CheckpointCommit

        if self._commit is None:
            self._commit = CheckpointCommit(self)
        return self._commit

    # -- collectives ---------------------------------------------------------------------------

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Sum over all processes, in place, without host synchronisation."""
        with self._timed_collective():
            dist.all_reduce(values)
        return values

    def total_weight(self, weight: Tensor | float, own: int, samples: int) -> Tensor | float:
        """Return a batch's weight over all processes, from that of `own` samples, maybe none."""
        if not isinstance(weight, Tensor):
            return weight / own * samples
        part = self.local_slice(samples)
        has_samples = own and part.stop > part.start
        return self.all_reduce_sum(weight.clone() if has_samples else torch.zeros_like(weight))

    def measure_step(
        self, update: OptimizerStep, loss: Tensor, veto: Tensor | None, again: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return loss, gradient norm and skip flag of a step, by one all-reduce.

        `loss` is the part of this process, or `again` the sum over all.
        """
        loss = loss / self.size if again else loss
        if not again:  # a hook may drop one
            self._check_gradients()
        local_bad, local_square = update.local_part()
        veto = update.zero if veto is None else veto.to(loss.device)
        stacked = torch.stack([p.to(loss.dtype) for p in [loss, veto, local_bad, local_square]])
        total, vetoed, bad, squares = self.all_reduce_sum(stacked)
        norm, skipped = update.measure(total, None if self.shards is None else squares.sqrt())
        return total, norm, torch.maximum(skipped, ((vetoed + bad) > 0).to(skipped.dtype))

    def _check_gradients(self) -> None:
        """Raise ConfigError if a trained weight has no gradient, since DDP would wait for it.

        Gradients in the same bucket have not arrived either, so no update may follow.
        """
        missing = [name for name, weight in self.trained_weights if weight.grad is None]
        if missing:
            problem = f"is false, but the loss does not depend on {join_names(missing)}"
            fix = "set it to true, or leave them out of the model"
            raise ConfigError("distributed.unused_parameters", problem, fix)

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Broadcast rank 0's buffers, which differ where each process used its own samples."""
        with self._timed_collective():
            for buffer in model.buffers():
                value = buffer.detach().contiguous()
                dist.broadcast(value, 0)
                buffer.detach().copy_(value)

    def all_reduce_max(self, *numbers: int) -> list[int]:
        """Return the maximum of each number over all processes, on the host; once per step."""
        if self.has_left:
            return [*numbers]
        if self._stacks is not None:
            self._stacks.reset_timer()
        flags = torch.tensor(numbers)  # host sync: none, it stays on the CPU
        with self._timed_collective():
            # host sync: with the other processes, for verdict and signals, once a step
            dist.all_reduce(flags, dist.ReduceOp.MAX)
        return flags.tolist()  # host sync: none, the tensor is on the CPU

    def all_gather(self, value: T) -> list[T]:
        """Return each process's value by rank; only its own after `leave`.

        UsageError if it has a tensor of a device, however deeply nested.
        """
        if self.has_left:
            return [value]
        _refuse_device_tensors("World.all_gather", value)
        values: list[Any] = [None] * self.size
        with self._timed_collective():
            dist.all_gather_object(values, value)
        return values

    def union(self, numbers: list[int]) -> tuple[list[int], ProcessLost | None]:
        """Return the union of all processes' numbers; after a loss its own, and the error."""
        try:
            return sorted({*chain(*self.all_gather(numbers))}), None
        except ProcessLost as error:
            return numbers, error

    def broadcast_choice(self, decide: Callable[[], T]) -> T:
        """Return rank 0's decision on all processes; a RunnerError of it is raised on all."""
        choice_and_error: list[Any] = [None, None]
        if self.is_rank_zero:
            try:
                decision = decide()
                _refuse_device_tensors("World.broadcast_choice", decision)
                choice_and_error[0] = decision
            except RunnerError as error:
                choice_and_error[1] = error
        with self._timed_collective():
            dist.broadcast_object_list(choice_and_error, 0)
        if choice_and_error[1] is not None:
            raise choice_and_error[1]
        choice: T = choice_and_error[0]
        return choice

    def barrier(self) -> None:
        """Wait for all processes."""
        self.all_reduce_max(0)

    @contextmanager
    def rank_zero_first(self) -> Iterator[None]:
        """Let rank 0 run the body before the others do."""
        if not self.is_rank_zero:
            self.barrier()
        yield
        if self.is_rank_zero:
            self.barrier()

    # -- lost processes --------------------------------------------------------------------------

    @property
    def faults(self) -> Counter[str]:
        """The faults after which all processes were restarted, by kind."""
        return Counter(kind for kind, _ in self.place.losses)

    @property
    def has_stalled_device(self) -> bool:
        """Whether the device may wait for a lost process forever: NCCL's kernels have no end.

        Then nothing may wait for it or save what it holds, and all processes restart.
        """
        return self.lost and self.backend == "nccl"

    def means_loss(self, error: BaseException) -> bool:
        """Whether the error means that another process has ended or does not answer."""
        return is_lost(error)

    def leave(self, error: BaseException) -> None:
        """Stop taking part in collectives; this process finishes alone, e.g. saves a checkpoint.

        The agent is informed, so that a long save does not count as hung.
        """
        self.has_left = True
        self._write(RankOutcome.from_error(self.rank, error))

    def _write(self, outcome: RankOutcome) -> None:
        if self.place.outcome_folder is not None:
            outcome.write(self.place.outcome_folder)
        elif outcome.kind != "running":
            self._outcomes.publish(outcome)

    def write_stacks(self, file: Path) -> None:
        """Write all threads' stacks to the file if no collective ends for most of the timeout.

        Also if this process crashes.
        """
        self._stacks = StackWriter(file, STACKS_SHARE * self.config.timeout_s)

    @contextmanager
    def translate_lost(self) -> Iterator[None]:
        """Raise ProcessLost for errors within that mean that another process has ended."""
        try:
            yield
        except Exception as error:
            if not is_lost(error):
                raise
            raise self.convert_lost(error) from error

    def find_error(self) -> ProcessLost | None:
        """Return the error that ended another process, if no agent of ours collects them."""
        return self._outcomes.find_error() if self.place.outcome_folder is None else None

    def convert_lost(self, error: BaseException) -> ProcessLost:
        """Return ProcessLost for an error that `is_lost`, naming the process if no agent does."""
        self.lost = True
        if isinstance(error, ProcessLost):
            return error
        lost = as_lost(error)
        if self.place.outcome_folder is None:
            self._outcomes.publish(RankOutcome.from_error(self.rank, lost))
            lost = self._outcomes.name_cause(lost)
        return lost

    @contextmanager
    def _timed_collective(self) -> Iterator[None]:
        with self.translate_lost(), self.clock():
            yield


@cache
def open_store(place: RankInfo, timeout: timedelta) -> TCPStore:
    """Open the store shared by all processes; it stays open for this process's lifetime."""
    is_host = place.rank == 0 and not place.hosted
    if is_host and place.address == LOOPBACK:
        return host_local_store(place.port, timeout)
    return TCPStore(place.address, place.port, place.size, is_host, timeout, wait_for_workers=False)


def host_local_store(port: int = 0, timeout: timedelta = timedelta(seconds=300)) -> TCPStore:
    """Open a store for processes of this machine; by itself it listens on all interfaces."""
    with socket.create_server((LOOPBACK, port)) as server:
        port = server.getsockname()[1]
        return TCPStore(
            LOOPBACK, port, None, True, timeout, False, master_listen_fd=server.detach()
        )


def choose_backend(config: DistributedConfig, device_type: str) -> str:
    """Return the configured backend, or the default one of the device: nccl or gloo."""
    default = "nccl" if device_type == "cuda" else "gloo"
    return default if config.backend is None else config.backend.value


def is_lost(error: BaseException) -> bool:
    """Whether the error means that another process has ended or does not answer."""
    if isinstance(error, ProcessLost | dist.DistError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("gloo/" in text or "NCCL" in text)


def as_lost(error: BaseException) -> ProcessLost:
    """Convert an error that `is_lost` to ProcessLost."""
    if isinstance(error, ProcessLost):
        return error
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    hung = "imed out" in text or "timeout" in text
    problem = "does not answer within distributed.timeout_s" if hung else "has ended"
    return ProcessLost(f"another process {problem} ({text.rpartition('] ')[2][:200]})", hung)


def _refuse_device_tensors(call: str, value: object) -> None:
    """Raise UsageError if the pickle of `value` would have a tensor that is not on the CPU."""

    def check_device(each: Any) -> None:  # pickle calls it before it pickles an object
        if isinstance(each, Tensor) and each.device.type != "cpu":
            problem = f"a tensor of shape {[*each.shape]} on {each.device} would arrive on the"
            fix = "pass tensors on the CPU, or reduce them by all_reduce_sum"
            raise UsageError(f"{call}: {problem} sender's device; {fix}")

    dumps_persistent(value, check_device)


def world_of(owner: Run | RunBuilder) -> World | None:
    """Return the World of a run of several processes; the core knows its interface alone."""
    return cast("World", owner.world) if owner.world.is_shared else None


def refuse_lost(run: Run, error: Exception) -> bool:
    """First of a run's recoveries: never repeat a step without the others."""
    if is_lost(error):
        world = world_of(run)
        raise (as_lost(error) if world is None else world.convert_lost(error)) from error
    return False


def _split_evenly(samples: int, parts: int) -> list[slice]:
    ends = [-(-samples * i // parts) for i in range(parts + 1)]
    return [slice(start, stop) for start, stop in pairwise(ends)]
