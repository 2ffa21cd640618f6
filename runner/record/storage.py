"""Files that are whole or not there: hashed while written, synced, and put in place by a rename."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import stat
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from runner.errors import CheckpointError, StorageError
from runner.masking import masked
from runner.record.text import json_safe

log = logging.getLogger("runner")

NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EACCES}  # file systems that cannot sync a folder
NO_LINK = os.O_NOFOLLOW
NO_WAIT = os.O_NONBLOCK  # of a pipe; of a file it changes nothing
LARGEST = 2**28  # bytes of a record that is read whole; ours have some thousands
OLD = ".old-"  # before the name of a folder that is being replaced


@dataclass(frozen=True)
class FileDigest:
    """What a file must still be when it is read."""

    size: int
    sha256: str


class HashedFile:
    """A file being written, with its digest; remembers the trouble that the disk made.

    torch.save turns an OSError of the file into a RuntimeError about positions, so the cause is
    kept here.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._size = 0
        self.trouble: OSError | None = None

    def write(self, data: Any) -> int:
        """Append bytes, or anything that holds them."""
        try:
            self._file.write(data)
        except OSError as error:
            self.trouble = error
            raise
        self._digest.update(data)
        count = memoryview(data).nbytes
        self._size += count
        return count

    def flush(self) -> None:
        """Hand what is buffered to the system."""
        self._file.flush()

    @property
    def written(self) -> FileDigest:
        """Size and digest so far."""
        return FileDigest(self._size, self._digest.hexdigest())


MOST_WAITING = 2**24  # bytes


class RetryingAppender:
    """Appends records to a file; those that the disk refuses are tried again at the next write.

    Nothing is buffered in the process, so what is in the file survives a kill; a small write costs
    about a microsecond. Every failure is an OSError, a deleted file included. At most
    `MOST_WAITING` bytes wait: of more, the oldest are lost. A file that cannot be opened is tried
    again as well; each time `place` makes its folder ready and says where it is.
    """

    def __init__(self, place: Callable[[], Path], *, new: bool = False) -> None:
        self.place, self.new, self.path = place, new, Path()
        self.descriptor, self.size, self.closed = -1, 0, False
        self.waiting: deque[bytes] = deque()
        self.lost = self.waiting_bytes = 0
        with suppress(OSError):  # `write` says it
            self._open()

    def write(self, record: bytes) -> None:
        """Append what waits and `record`; OSError where they wait on."""
        self.waiting.append(record)
        self.waiting_bytes += len(record)
        while self.waiting_bytes > MOST_WAITING and len(self.waiting) > 1:
            self.waiting_bytes -= len(self.waiting.popleft())
            self.lost += 1
        self._write_waiting()

    def close(self) -> None:
        """Try what waits a last time, and close the file; a second time does nothing."""
        with suppress(OSError):  # they are counted as unwritten
            self._write_waiting()
        self.closed = True
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)

    @property
    def unwritten(self) -> int:
        """Records that are not in the file."""
        return self.lost + len(self.waiting)

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | (os.O_EXCL if self.new else 0)
        flags |= NO_LINK | NO_WAIT  # a folder that is resumed may be another's work
        self.path = self.place()
        self.descriptor = os.open(self.path, flags, 0o644)
        self.size = os.fstat(self.descriptor).st_size

    def _write_waiting(self) -> None:
        if self.waiting and self.descriptor < 0 and not self.closed:
            self._open()
        while self.waiting:
            self._append(self.waiting[0])
            self.waiting_bytes -= len(self.waiting.popleft())

    def _append(self, record: bytes) -> None:
        """Write all of a record, or raise OSError and leave the file as it was."""
        if os.fstat(self.descriptor).st_nlink == 0:  # writing to it would succeed, into nothing
            raise FileNotFoundError(errno.ENOENT, "deleted while the run went on", str(self.path))
        try:
            written = os.write(self.descriptor, record)
            while written < len(record):  # the disk took a part: the next try says what is wrong
                written += os.write(self.descriptor, record[written:])
        except OSError:
            with suppress(OSError):
                os.ftruncate(self.descriptor, self.size)
            raise
        self.size += len(record)


def write_file(path: Path, fill: Callable[[HashedFile], None]) -> FileDigest:
    """Write a new file durably; `fill` gets it open. Raises OSError when the disk makes trouble."""
    with open(path, "xb", buffering=1 << 20, opener=for_owners) as file:
        hashed = HashedFile(file)
        try:
            fill(hashed)
        except RuntimeError as error:
            if hashed.trouble is not None:
                raise hashed.trouble from error
            raise
        file.flush()
        os.fsync(file.fileno())
    return hashed.written


def for_owners(path: str, flags: int) -> int:
    """An opener: no file is world-writable at any umask, or reached by a planted link."""
    if os.path.islink(path):
        os.unlink(path)
    return _regular(os.open(path, flags | NO_LINK | NO_WAIT, 0o664), path)


def _regular(descriptor: int, path: str | Path) -> int:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a file", str(path))
    return descriptor


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file; NaN and Inf become null. Raises StorageError."""
    text = json.dumps(json_safe(value), indent=2, default=str, allow_nan=False)
    try:
        replace_text(path, text + "\n")
    except OSError as error:
        raise StorageError(f"{path}: not written: {error.strerror or error}") from error


def replace_text(path: Path, text: str) -> None:
    """Put a small file in the place of what is there: readers see the one or the other, whole.

    Lone surrogates, which names of files may bring, are written as escapes, and what the
    environment holds by its name. What lies under the temporary name is removed. Raises OSError,
    and leaves what was there.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    data = masked(text).encode("utf-8", "backslashreplace")
    try:
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb", opener=for_owners) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # else a power cut can leave the new name on an empty file
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_or_log(path: Path, text: str, level: int = logging.WARNING) -> None:
    """The same, with the file's folder; an OSError is logged, and ends nothing."""
    try:
        path.parent.mkdir(exist_ok=True)
        replace_text(path, text)
    except OSError as error:
        log.log(level, "%s: not written: %s", path, error.strerror or error)


def open_regular(path: Path) -> BinaryIO:
    """A file to read from. Raises OSError, also for a pipe, on which opening would wait for ever.

    Files in folders that may be another user's are opened with this.
    """
    return os.fdopen(_regular(os.open(path, os.O_RDONLY | NO_WAIT | os.O_CLOEXEC), path), "rb")


def read_record(path: Path, most: int = LARGEST) -> bytes:
    """All of a file of at most `most` bytes. Raises OSError, also where it has more."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"has more than {most:,} bytes", str(path))
        return file.read()


def read_file(path: Path) -> bytes:
    """The same; CheckpointError says why it cannot be had."""
    try:
        return read_record(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable; what a rename did is not before."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise
    finally:
        os.close(descriptor)


def remove_folder(folder: Path) -> None:
    """All of a folder; of a link the link itself, and nothing of what it leads to."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, durably."""
    missing = [f for f in (folder, *folder.parents) if not f.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync_folder(made.parent)


def write_folder(temporary: Path, final: Path) -> None:
    """Give a finished folder its name; one that has the name already makes room first.

    A crash in between leaves the one before under its `.old-` name, which `recover` puts back.
    """
    old = final.parent / (OLD + final.name)
    replaces = final.exists()
    if replaces:
        shutil.rmtree(old, ignore_errors=True)
        os.rename(final, old)
    try:
        os.rename(temporary, final)
    except OSError:
        if replaces:
            os.rename(old, final)
        raise
    sync_folder(final.parent)
    if replaces:
        shutil.rmtree(old, ignore_errors=True)


def recover(folder: Path) -> None:
    """Finish or undo what a crash cut off in `write_folder`."""
    for old in folder.glob(OLD + "*"):
        final = folder / old.name.removeprefix(OLD)
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(old, final)


def update_link(link: Path, target: str) -> None:
    """Make `link` lead to its neighbour `target`, at once: readers see the old or the new one."""
    temporary = link.with_name(f".tmp-{link.name}")
    with suppress(FileNotFoundError):
        temporary.unlink()
    try:
        temporary.symlink_to(target)
    except (OSError, NotImplementedError):  # no symbolic links there: a text file with the name
        temporary.write_text(target)
    os.replace(temporary, link)


def read_link(link: Path) -> str | None:
    """The name that `link` leads to, or None."""
    try:
        return os.readlink(link) if link.is_symlink() else read_record(link).decode()
    except (OSError, UnicodeDecodeError):
        return None
