"""Lock of a run folder, which the kernel releases when its process dies.

It is a record lock (`lockf`). A `flock` would be inherited by loader workers, and workers left by
a killed run would keep it, so that the run could not be resumed.

The kernel drops a process's record locks on a file as soon as that process closes any descriptor
of it. So only this module opens `.lock`, and it records the locks of its own process.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from runner.core.errors import StorageError, UsageError
from runner.core.record.storage import NO_WAIT, make_folder, safe_opener

log = logging.getLogger("runner")

NAME = ".lock"
ATTEMPTS = 5  # as `is_locked` of another process takes the lock for some microseconds
LOCKED_ERRORS = (errno.EACCES, errno.EAGAIN)
# on some network file systems
UNSUPPORTED_ERRORS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)

_owners: dict[tuple[int, int], int] = {}  # process by (device, inode) of the lock file
_held: dict[Path, Lock] = {}  # by folder, as it was given


class Lock(AbstractContextManager["Lock"]):
    """An acquired lock, released by `release()`, by its `with` block or by the process's end."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._file = None if descriptor is None else _file_identity(descriptor)

    def release(self) -> None:
        """Release the lock; a second call does nothing, and file errors are ignored."""
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        for folder in [folder for folder, held in _held.items() if held is self]:
            del _held[folder]
        with suppress(OSError):
            if self._file is not None and _owners.get(self._file) == os.getpid():
                del _owners[self._file]  # not in a forked child, which has no lock
                os.ftruncate(descriptor, 0)
        with suppress(OSError):
            os.close(descriptor)

    def __exit__(self, *exc: object) -> None:
        self.release()


def lock(folder: Path) -> Lock:
    """Lock `folder`, which must exist, for this process.

    Raises UsageError naming the process that has locked it, and StorageError if the lock file
    cannot be written. Warns instead if locks are not supported (some network file systems).
    """
    if _is_locked_here(folder):
        raise UsageError(f"{folder}: already in use by this process ({os.getpid()})")
    try:
        descriptor = safe_opener(folder / NAME, os.O_RDWR | os.O_CREAT)  # truncated below
    except OSError as error:
        raise StorageError(f"{folder}: cannot be written to: {error.strerror}") from error
    try:
        _acquire(descriptor, folder)
    except OSError as error:
        os.close(descriptor)
        if error.errno not in UNSUPPORTED_ERRORS:
            raise StorageError(f"{folder}: cannot be locked: {error.strerror}") from error
        log.warning("%s: no file locks; do not start a second run in this folder", folder)
        return Lock(None)
    except UsageError:
        os.close(descriptor)
        raise
    _owners[_file_identity(descriptor)] = os.getpid()
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    except OSError as error:  # a full disk: the lock is valid, only its owner is not named
        log.warning("%s: %s", folder / NAME, error.strerror)
    _held[folder] = Lock(descriptor)
    return _held[folder]


def owns_folder(folder: Path) -> bool:
    """Whether a folder that this process has locked is still there, and not another one. 2 µs."""
    held = _held.get(folder)
    try:
        return held is None or _file_identity(folder / NAME) == held._file
    except OSError:
        return False


def lock_again(folder: Path) -> None:
    """Make a locked folder that was removed or moved again, and lock it. Raises as `lock` does."""
    earlier = _held[folder]
    make_folder(folder)
    new = lock(folder)
    earlier.release()
    earlier._descriptor, earlier._file, new._descriptor = new._descriptor, new._file, None
    _held[folder] = earlier


def is_locked(folder: Path) -> bool:
    """Whether a running process has locked `folder`; False if that is unknown."""
    if _is_locked_here(folder):
        return True
    try:
        descriptor = os.open(folder / NAME, os.O_RDONLY | os.O_CLOEXEC | NO_WAIT)
    except OSError:
        return False
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in LOCKED_ERRORS
    finally:
        os.close(descriptor)
    return False


def _acquire(descriptor: int, folder: Path) -> None:
    for attempt in range(ATTEMPTS):
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in LOCKED_ERRORS:
                raise
        time.sleep(0.02 if attempt + 1 < ATTEMPTS else 0)
    owner = os.pread(descriptor, 256, 0).decode(errors="replace").strip()
    problem = f"in use by process {owner or '(unknown)'}, which is still running"
    raise UsageError(f"{folder}: {problem}; wait for it, or stop it first")


def _is_locked_here(folder: Path) -> bool:
    try:
        return _owners.get(_file_identity(folder / NAME)) == os.getpid()
    except OSError:
        return False


def _file_identity(file: int | Path) -> tuple[int, int]:
    status = os.stat(file)
    return status.st_dev, status.st_ino
