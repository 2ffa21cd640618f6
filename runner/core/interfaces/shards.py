"""What a run needs of sharded weights; `runner.scale.distributed` has it. For types alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor, nn

    from runner.core.interfaces.batch import Batch
    from runner.core.record.storage import FileDigest

T = TypeVar("T")


class ShardsProtocol(Protocol):
    """This process's rows of every weight."""

    names: set[str]  # in the state_dict

    @property
    def is_lost(self) -> bool: ...  # those of a process that has ended
    @property
    def local_rows(self) -> nn.ParameterList: ...
    def by_name(self, remove_duplicate: bool = True) -> dict[str, Tensor]: ...
    def clear_gradients(self) -> None: ...
    def set_local_gradients(self) -> None: ...
    def all_agree(self, sound: bool) -> bool: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load(self, model: Mapping[str, Any]) -> None: ...
    def select_update_rows(
        self, update: Mapping[str, Any], trained: list[Tensor]
    ) -> dict[str, Any]: ...
    def map_micro_batches(
        self, batch: Batch, samples: int, size: int, own: int, compute: Callable[[Batch], T]
    ) -> list[T]: ...


class CheckpointCommitProtocol(Protocol):
    """Coordination of the processes that write one checkpoint."""

    rank: int
    size: int

    def announce_folder(self, created: bool) -> None: ...
    def await_folder(self) -> None: ...
    def report(self, written: FileDigest | None, problem: str = "") -> None: ...
    def collect_digests(self) -> list[FileDigest]: ...
