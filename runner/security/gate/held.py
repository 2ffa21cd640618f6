"""A file's bytes, read once: what is hashed is what is checked, handed on, and loaded.

`Held` is for files that are loaded: the bytes lie in memory of this process alone, and the limited
process gets a copy without a name that, on Linux, is sealed. `Watched` is for a verdict alone,
after which nothing is loaded: the bytes stay where they are, which saves as much time again as the
hashing takes, and a file that is seen to change meanwhile gets no verdict.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from threading import Event
from typing import Self

from runner.errors import CheckpointError

BLOCK = 1 << 22  # bytes that are hashed by a thread while the next ones are read
FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class Stopped(Exception):
    """Reading was given up on the way."""


class Held:
    """The bytes of one file, its size and sha256; a context manager that lets go of them."""

    def __init__(self, memory: memoryview, sha256: str) -> None:
        self.view = memory.toreadonly()  # all of it
        self.size = len(memory)
        self.sha256 = sha256

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go; what still looks at the bytes keeps them."""
        self.view = memoryview(b"")

    def handed(self) -> int:
        """A descriptor of a copy that cannot be changed; the caller closes it. Raises OSError."""
        target = _nameless()
        try:
            left = self.view
            while left:
                left = left[os.write(target, left) :]
            _seal(target)
        except BaseException:
            os.close(target)
            raise
        return target


class Watched:
    """An open file, its size and sha256; a context manager that closes it.

    Whoever opens it may let another thread do the hashing, and look into it meanwhile.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = open(open_regular(path), "rb", buffering=0)  # noqa: SIM115  # it stays open
        self._before = _stamp(self.file)
        self.size = self._before[0]
        self.hashing: Future[str] = Future()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.file.close()

    def close(self) -> None:
        """Let go of it."""
        self.file.close()

    def hash(self, stop: Event | None = None) -> str:
        """Read all of it, for its sha256. Raises CheckpointError, and Stopped."""
        try:
            sha256, size = _hashed(self.file, stop)
        except (OSError, ValueError) as error:  # or it was closed
            raise CheckpointError(f"{self.path}: cannot be read: {error}") from error
        if size != self.size:
            raise CheckpointError(f"{self.path}: it changed while it was read")
        return sha256

    @property
    def sha256(self) -> str:
        """As it is found by `hashing`, which is waited for."""
        return self.hashing.result()

    @property
    def view(self) -> memoryview:
        """All of it, as it lies on the disk."""
        return memoryview(mapped(self.file.fileno(), self.size) if self.size else b"")

    @property
    def place(self) -> str:
        """A name for it that leads to this very file, whatever its path does by now."""
        return place_of(self.file.fileno())

    def handed(self) -> int:
        """Another descriptor of it; the caller closes it. Raises OSError."""
        return os.dup(self.file.fileno())

    def changed(self) -> bool:
        """Whether it was seen to be written to since it was opened.

        One who had it mapped into memory before may hide that. What is loaded later is therefore
        held, hashed and examined anew.
        """
        return _stamp(self.file) != self._before


class Peeked:
    """A file as bytes of which only those are read that are asked for, by slices; a context manager
    that closes it. CheckpointError says why it cannot be had.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(open_regular(path), "rb", buffering=0)  # noqa: SIM115  # it stays open
        self.size = os.fstat(self._file.fileno()).st_size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> bytes:
        start, stop, _ = part.indices(self.size)
        try:
            self._file.seek(start)
            return self._file.read(max(0, stop - start)) or b""
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error.strerror}") from error


def hold(path: Path, stop: Event | None = None) -> Held:
    """Read a file, hashing it on the way; CheckpointError says why it cannot be had."""
    found = hashlib.sha256()
    try:
        with open(open_regular(path), "rb", buffering=0) as file, ThreadPoolExecutor(1) as hashing:
            memory = _memory(os.fstat(file.fileno()).st_size)
            at = 0
            while count := file.readinto(memory[at : at + BLOCK]):
                _unless(stop)
                part = memory[at : at + count]
                if len(memory) > BLOCK:
                    hashing.submit(found.update, part)  # one thread: it takes them in turn
                else:
                    found.update(part)
                at += count
            if at < len(memory) or file.read(1):
                raise CheckpointError(f"{path}: it changed while it was read")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    return Held(memory, found.hexdigest())


def digest(path: Path, stop: Event | None = None) -> tuple[str, int]:
    """sha256 and size of a file that nobody will look into; CheckpointError as for `hold`."""
    with Watched(path) as found:
        return found.hash(stop), found.size


def open_regular(path: Path) -> int:
    """A descriptor of a regular file: a pipe or device is not waited for. CheckpointError."""
    try:
        source = os.open(path, FLAGS)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(source).st_mode):
        os.close(source)
        raise CheckpointError(f"{path}: not a file")
    return source


def mapped(descriptor: int, size: int) -> mmap.mmap:
    """The sealed bytes in memory, for reading; at least one of them."""
    if sys.platform == "win32":
        return mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
    # kernels before 6.7 take a shared mapping of sealed memory for one that could write
    return mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)


def place_of(descriptor: int) -> str:
    """The name under which an open file can be opened again; empty where the system has none."""
    return f"/proc/self/fd/{descriptor}" if sys.platform == "linux" else ""


def _memory(size: int) -> memoryview:
    """So many bytes, in large pages: with small ones the system takes as long as the hashing."""
    if not size:
        return memoryview(bytearray())
    if sys.platform == "win32":
        return memoryview(mmap.mmap(-1, size))
    # not shared, as is the default: of shared memory few systems give large pages
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux" and size >= BLOCK:
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def _hashed(file: FileIO, stop: Event | None) -> tuple[str, int]:
    found, size = hashlib.sha256(), 0
    block = memoryview(bytearray(1 << 18))  # stays in the cache
    while count := file.readinto(block):
        _unless(stop)
        found.update(block[:count])
        size += count
    return found.hexdigest(), size


def _stamp(file: FileIO) -> tuple[int, ...]:
    about = os.fstat(file.fileno())
    return about.st_size, about.st_mtime_ns, about.st_ctime_ns


def _unless(stop: Event | None) -> None:
    if stop is not None and stop.is_set():
        raise Stopped


def _nameless() -> int:
    if sys.platform == "linux":
        return os.memfd_create("held", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:  # noqa: RET505  # so that the type checker leaves it out elsewhere
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())


def _seal(target: int) -> None:
    if sys.platform == "linux":
        import fcntl

        for_good = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(target, fcntl.F_ADD_SEALS, for_good)
