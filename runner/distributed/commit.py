"""Checkpoint commit by several processes: rank 0 writes the manifest once all parts are written."""

from __future__ import annotations

import errno
import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from runner.record.storage import FileDigest

if TYPE_CHECKING:
    from runner.distributed.world import World

POLL_S = 0.02


class Commit:
    """Agreement on a checkpoint by keys in the store; no collectives, so training continues.

    Each process saves the same checkpoints in the same order, so their number tells them apart.
    """

    def __init__(self, world: World) -> None:
        self.world, self.rank, self.size = world, world.rank, world.size
        store: Any = world.store
        self._store: Any = store.clone()  # a wait in one client blocks its other callers
        self._count = 0

    def open(self, made: bool) -> None:
        """Rank 0: publish whether the folder of the next checkpoint was made."""
        self._count += 1
        self._store.set(self._key("open"), "made" if made else "")

    def await_folder(self) -> None:
        """Other ranks: wait for the folder. Raises OSError if rank 0 could not make it."""
        self._count += 1
        if not self._wait(self._key("open"), 0):
            raise OSError(errno.EIO, "process 0 could not make its folder")

    def report(self, written: FileDigest | None, problem: str = "") -> None:
        """Other ranks: publish the digest of the written part, or the problem."""
        report = {"problem": problem} if written is None else asdict(written)
        self._store.set(self._key(str(self.rank)), json.dumps(report))

    def collect(self) -> list[FileDigest]:
        """Rank 0: return the digests of the other parts. Raises OSError if one was not written."""
        digests = []
        for rank in range(1, self.size):
            report = json.loads(self._wait(self._key(str(rank)), rank))
            if "problem" in report:
                raise OSError(errno.EIO, f"process {rank}: {report['problem']}")
            digests.append(FileDigest(**report))
        return digests

    def _key(self, name: str) -> str:
        return f"checkpoint/{self.world.place.attempt}/{self._count}/{name}"

    def _wait(self, key: str, rank: int) -> bytes:
        """Poll until `key` is set and return its value. Raises OSError on loss or time-out."""
        end = time.monotonic() + self.world.config.timeout_s
        try:
            while not self._store.check([key]):
                if self.world.lost or time.monotonic() > end:
                    raise OSError(errno.EIO, f"process {rank} has not written its part")
                time.sleep(POLL_S)
            value: bytes = self._store.get(key)
            return value
        except RuntimeError as error:  # the store has ended with its process
            raise OSError(errno.EIO, "the other processes have ended") from error
