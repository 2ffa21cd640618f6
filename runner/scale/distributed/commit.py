"""Commit a distributed checkpoint: the manifest is written after all parts are."""

from __future__ import annotations

import errno
import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from runner.core.process_wait import PolledClock
from runner.core.record.storage import FileDigest

if TYPE_CHECKING:
    from runner.scale.distributed.world import World

POLL_S = 0.02


class CheckpointCommit:
    """Coordinates by keys in the store, without collectives, so training continues meanwhile.

    All processes save the same checkpoints in the same order, so a counter identifies each one.
    """

    def __init__(self, world: World) -> None:
        self.world, self.rank, self.size = world, world.rank, world.size
        store: Any = world.store
        self._store: Any = store.clone()  # own client: a blocking wait would hold up other callers
        self._count = 0

    def announce_folder(self, created: bool) -> None:
        """Rank 0: announce whether the folder of the next checkpoint was created."""
        self._count += 1
        self._store.set(self._key("open"), "made" if created else "")

    def await_folder(self) -> None:
        """Other ranks: wait for the folder. Raises OSError if it could not be created."""
        self._count += 1
        if not self._wait_for_key(self._key("open"), 0):
            raise OSError(errno.EIO, "process 0 could not make its folder")

    def report(self, written: FileDigest | None, problem: str = "") -> None:
        """Other ranks: report the digest of the written part, or the problem."""
        report = {"problem": problem} if written is None else asdict(written)
        self._store.set(self._key(str(self.rank)), json.dumps(report))

    def collect_digests(self) -> list[FileDigest]:
        """Rank 0: return the digests of all other ranks. Raises OSError if one failed."""
        digests = []
        for rank in range(1, self.size):
            report = json.loads(self._wait_for_key(self._key(str(rank)), rank))
            if "problem" in report:
                raise OSError(errno.EIO, f"process {rank}: {report['problem']}")
            digests.append(FileDigest(**report))
        return digests

    def _key(self, name: str) -> str:
        return f"checkpoint/{self.world.place.attempt}/{self._count}/{name}"

    def _wait_for_key(self, key: str, rank: int) -> bytes:
        """Poll for a key's value, since a blocking wait cannot be cancelled. Raises OSError."""
        clock, limit = PolledClock(), self.world.config.timeout_s
        try:
            while not self._store.check([key]):
                if self.world.lost or clock.poll() > limit:
                    raise OSError(errno.EIO, f"process {rank} has not written its part")
                time.sleep(POLL_S)
            value: bytes = self._store.get(key)
            return value
        except RuntimeError as error:  # the store ended with its process
            raise OSError(errno.EIO, "the other processes have ended") from error
