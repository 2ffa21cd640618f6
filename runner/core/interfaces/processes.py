"""What a run needs of its other processes; `runner.scale.distributed` has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from runner.core.interfaces.batch import split_batch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from runner.core.errors import ProcessLost
    from runner.core.interfaces.shards import CheckpointCommitProtocol, ShardsProtocol
    from runner.core.optim.optimizer_step import OptimizerStep

T = TypeVar("T")


class PlaceProtocol(Protocol):
    """Where this process is among those of its run."""

    @property
    def attempt(self) -> int: ...  # 0 until all are restarted


class FirstAttempt:
    """The place of the only process."""

    attempt = 0


class WorldProtocol(Protocol):
    """The processes that train one model, from the view of one; all have to make each call.

    Values and bodies are those of a run in one process.
    """

    is_shared: bool = False  # by several processes
    rank: int = 0
    size: int = 1
    lost: bool = False  # another process has ended: no more collectives
    usable_samples: list[int] | None = None  # of the current batch, by rank, if some were left out
    validation_forward: Callable[..., Any] | None = None
    no_sync: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def place(self) -> PlaceProtocol:
        return FirstAttempt()

    @property
    def shards(self) -> ShardsProtocol | None:
        return None

    @property
    def is_rank_zero(self) -> bool:
        return True

    @property
    def kind(self) -> str:
        return "none"

    @property
    def faults(self) -> Counter[str]:
        return Counter()

    @property
    def has_stalled_device(self) -> bool:
        return False

    def describe(self) -> dict[str, Any]:
        return {}

    def local_slice(self, samples: int) -> slice:
        return slice(0, samples)

    def max_local_samples(self, samples: int) -> int:
        return samples

    def micro_batch_slices(self, samples: int, micro_batch: int, own: int) -> list[slice]:
        return split_batch(own, micro_batch)

    def begin_micro_batch(
        self, samples: int, micro_batch: int, number: int, is_stand_in: bool
    ) -> None:
        return

    def check_batches(self, samples: int, batch_size: int, drop_last: bool) -> None:
        return

    def folder(self, folder: Path) -> Path:
        return folder

    def unsupported_reason(self, technique: str) -> str | None:
        return None

    def checkpoint_commit(self) -> CheckpointCommitProtocol | None:
        return None  # unless weights are sharded

    def total_weight(self, weight: Tensor | float, own: int, samples: int) -> Tensor | float:
        return weight

    def measure_step(
        self, update: OptimizerStep, loss: Tensor, veto: Tensor | None, again: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        return loss, *update.measure(loss)  # the veto counts once hooks have been called

    def broadcast_buffers(self, model: nn.Module) -> None:
        return

    def all_reduce_max(self, *numbers: int) -> list[int]:
        return [*numbers]

    def all_gather(self, value: T) -> list[T]:
        return [value]

    def union(self, numbers: list[int]) -> tuple[list[int], ProcessLost | None]:
        return numbers, None

    def broadcast_choice(self, decide: Callable[[], T]) -> T:
        return decide()

    def barrier(self) -> None:
        return

    def rank_zero_first(self) -> AbstractContextManager[None]:
        return nullcontext()

    def means_loss(self, error: BaseException) -> bool:
        return False

    def leave(self, error: BaseException) -> None:
        return

    def translate_lost(self) -> AbstractContextManager[None]:
        return nullcontext()


class OneProcess(WorldProtocol):
    """The World of a run in one process."""


class StepLimit(Protocol):
    """Limits the step in which a signal arrived; `GracePeriod` of the training is one."""

    def wait_for_step(self, next_signal: Callable[[float], int | None]) -> None: ...
    def record_children(self) -> None: ...
    def kill_children(self) -> None: ...
