"""Read a file's bytes once, so that the hashed bytes are the ones that are loaded.

`open_copy` is for files to load: on Linux into a sealed memfd, which no other process can change.
`open_in_place` is for a verdict only: the bytes stay on disk, and a file that changes meanwhile
gets no verdict.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import mmap
import os
import stat
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from runner.core.errors import CheckpointError, OutOfMemory

log = logging.getLogger("runner")

COPY_BYTES = 1 << 22
PROGRESS_S = 5.0  # between two lines on a long copy
OPEN_FLAGS = os.O_RDONLY | os.O_NONBLOCK
LINUX = sys.platform == "linux"


class MappedFile(mmap.mmap):
    """Memory-mapped bytes from which zipfile can read."""

    def seekable(self) -> bool:
        """Return True, as mmap does from Python 3.13 on."""
        return True


class FileBytes:
    """An open file with its size, sha256 (hashed in a thread), and a path to the same bytes."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.descriptor = descriptor
        self.path = f"/proc/self/fd/{descriptor}" if LINUX else str(path)
        self._initial_stamp = _file_stamp(descriptor)
        self.size = self._initial_stamp[0]
        pool = ThreadPoolExecutor(1, thread_name_prefix="sha256")
        self._sha256 = pool.submit(_hash, path, descriptor)
        pool.shutdown(wait=False)

    @classmethod
    def open_copy(cls, path: Path) -> Self:
        """Copy the file; except on Linux, only open it. CheckpointError or OutOfMemory."""
        if sys.platform != "linux":
            return cls.open_in_place(path)
        source = open_regular(path)
        try:
            target = os.memfd_create("file", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                _copy(path, source, target)
            except BaseException:
                os.close(target)
                raise
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        finally:
            os.close(source)
        return cls(path, target)

    @classmethod
    def open_in_place(cls, path: Path) -> Self:
        """Open without copying. Raises CheckpointError."""
        return cls(path, open_regular(path))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._sha256.exception()  # wait: the thread reads from the descriptor
        os.close(self.descriptor)

    @property
    def sha256(self) -> str:
        """The digest; waits for the hashing thread. Raises CheckpointError."""
        return self._sha256.result()

    @property
    def data(self) -> bytes | mmap.mmap:
        """The bytes, mapped read-only."""
        return map_bytes(self.descriptor, self.size)

    def changed(self) -> bool:
        """Whether size or times have changed since it was opened."""
        return _file_stamp(self.descriptor) != self._initial_stamp


def hash_file(path: Path) -> tuple[str, int]:
    """Return sha256 and size. Raises CheckpointError."""
    with FileBytes.open_in_place(path) as data:
        return data.sha256, data.size


def open_regular(path: Path) -> int:
    """Open a regular file without blocking on pipes or devices. Raises CheckpointError."""
    try:
        source = os.open(path, OPEN_FLAGS)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(source).st_mode):
        os.close(source)
        raise CheckpointError(f"{path}: not a file")
    return source


def map_bytes(descriptor: int, size: int) -> bytes | mmap.mmap:
    """Map an open file's bytes into memory."""
    if not size:
        return b""
    # kernels before 6.7 refuse a shared mapping of a sealed memfd, even read-only
    return MappedFile(descriptor, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)


def _copy(path: Path, source: int, target: int) -> None:
    """Copy all bytes and seal the copy. Raises OSError, or CheckpointError if the file changed."""
    from runner.core.device import memory  # imports torch, which a scan rarely needs

    size, copied, reported = os.fstat(source).st_size, 0, time.monotonic()
    if size > (available := memory.available_bytes()):
        problem = f"a copy in memory takes {size:,} bytes, but only {available:,} are available"
        raise OutOfMemory(f"{path}: refused: {problem}; get a smaller file, or free memory")
    while copied < size and (block := os.read(source, min(COPY_BYTES, size - copied))):
        copied += os.write(target, block)
        if time.monotonic() - reported >= PROGRESS_S:
            reported = time.monotonic()
            log.info("%s: %.1f of %.1f GB copied into memory", path, copied / 1e9, size / 1e9)
    if copied != size or os.read(source, 1):
        raise CheckpointError(f"{path}: it changed while it was read")
    os.lseek(target, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(target, fcntl.F_ADD_SEALS, seals)


def _hash(path: Path, descriptor: int) -> str:
    try:
        with open(os.dup(descriptor), "rb", buffering=0) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def _file_stamp(descriptor: int) -> tuple[int, ...]:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns
