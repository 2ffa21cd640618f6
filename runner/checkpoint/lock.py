"""One owner per run folder: a lock that the kernel releases when its process dies.

It is a record lock (`lockf`). One made by `flock` would be inherited by loader workers and stay
held by those that a killed run leaves behind, so that the run could not be resumed.

The price: the kernel drops a process's record locks on a file as soon as that process closes
any descriptor of it. So this module is the only one that opens `.lock`, and remembers which ones
its own process holds.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from pathlib import Path

from runner.errors import StorageError, UsageError
from runner.record.storage import NO_LINK, NO_WAIT

try:
    import fcntl

    LOCKS = True
except ImportError:  # Windows
    LOCKS = False

log = logging.getLogger("runner")

NAME = ".lock"
PROBES = 5  # tries to lock, as `is_locked` of another process holds a lock for some microseconds
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL}  # file systems without them

_held: dict[tuple[int, int], int] = {}  # (device, inode) of a lock file: process that holds it


class Lock:
    """A held lock; leaving its `with` block, `release()` or the process's death gives it up."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def release(self) -> None:
        """Give the lock up; a second call does nothing."""
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        if _held.get(_identity(descriptor)) == os.getpid():  # not in a forked child: it holds none
            os.ftruncate(descriptor, 0)
            del _held[_identity(descriptor)]
        os.close(descriptor)

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


def lock(folder: Path) -> Lock:
    """Become the one process that writes into `folder`, which must exist.

    Raises UsageError naming the process that already is, and StorageError where no lock file can
    be written. Where locks do not exist (Windows, some network file systems) it warns instead.
    """
    if not LOCKS:
        log.warning("%s: no file locks on this system; start no second run in this folder", folder)
        return Lock(None)
    if _held_here(folder):
        raise UsageError(f"{folder}: this process ({os.getpid()}) already runs in it")
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | NO_LINK  # what is there is emptied
        descriptor = os.open(folder / NAME, flags, 0o644)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be written to: {error.strerror}") from error
    try:
        free = _acquire(descriptor)
    except OSError as error:
        os.close(descriptor)
        if error.errno not in NO_LOCKS:
            raise StorageError(f"{folder}: cannot be locked: {error.strerror}") from error
        log.warning("%s: no file locks there; start no second run in this folder", folder)
        return Lock(None)
    if not free:
        owner = os.pread(descriptor, 256, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise UsageError(
            f"{folder}: in use by process {owner or '(unknown)'}, which is still running; "
            "wait for it, or stop it first"
        )
    _held[_identity(descriptor)] = os.getpid()
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    except OSError as error:  # a full disk: the lock holds all the same, only its owner is unnamed
        log.warning("%s: %s", folder / NAME, error.strerror)
    return Lock(descriptor)


def is_locked(folder: Path) -> bool:
    """Whether a living process runs in `folder`; False where that cannot be known."""
    if not LOCKS:
        return False
    if _held_here(folder):
        return True
    try:
        descriptor = os.open(folder / NAME, os.O_RDONLY | os.O_CLOEXEC | NO_WAIT)
    except OSError:
        return False
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EACCES, errno.EAGAIN)
    else:
        return False
    finally:
        os.close(descriptor)


def _acquire(descriptor: int) -> bool:
    for attempt in range(PROBES):
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            if attempt + 1 < PROBES:
                time.sleep(0.02)
        else:
            return True
    return False


def _held_here(folder: Path) -> bool:
    try:
        status = os.stat(folder / NAME)
    except OSError:
        return False
    return _held.get((status.st_dev, status.st_ino)) == os.getpid()


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
