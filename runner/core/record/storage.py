"""Write files atomically and durably: hash while writing, fsync, rename into place.

All files are opened by `safe_opener`, and folders below a guarded one by descriptor, so that no
link in a run's folder leads a write, a rename or a deletion elsewhere.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import stat
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from runner.core.errors import CheckpointError, SecurityError, StorageError
from runner.core.masking import mask_secrets
from runner.core.record.text import json_safe

log = logging.getLogger("runner")

# of file systems that cannot fsync a folder
NO_FSYNC_ERRORS = {errno.EINVAL, errno.ENOTSUP, errno.EACCES}
METRICS = "metrics.jsonl"
LONGEST_ROW = 2**20  # bytes of a row of it; longer lines are not ours
NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # 0: links are looked for before and after opening
FOLDER_FLAGS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY
NO_WAIT = os.O_NONBLOCK  # for pipes; no effect on files
MAX_RECORD_BYTES = 2**28  # bytes of a record that is read at once; ours have thousands
OLD_PREFIX = ".old-"  # prefix of a folder's name while it is replaced


@dataclass(frozen=True)
class FileDigest:
    """Size and sha256 of a file, to verify it when it is read."""

    size: int
    sha256: str


class HashedFile:
    """A file that is hashed while it is written; `error` is the first OSError.

    torch.save replaces an OSError of the file by a RuntimeError about positions, so the cause is
    stored here.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._size = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Append bytes or a buffer."""
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self._digest.update(data)
        count = memoryview(data).nbytes
        self._size += count
        return count

    def flush(self) -> None:
        """Flush buffered bytes to the operating system."""
        self._file.flush()

    @property
    def digest(self) -> FileDigest:
        """Size and digest of the bytes so far."""
        return FileDigest(self._size, self._digest.hexdigest())


class RetryingAppender:
    """Appends records to a file; after a failed write, records are retried at the next write.

    Writes are unbuffered, so the file survives a kill; a small one takes about 1 µs. Every failure,
    including a deleted file, is an OSError. A file that cannot be opened is retried as well:
    `make_path` then prepares its folder and returns its path.
    """

    def __init__(self, make_path: Callable[[], Path], *, exclusive: bool = False) -> None:
        self.make_path, self.exclusive, self.path = make_path, exclusive, Path()
        self.descriptor, self.size, self.closed = -1, 0, False
        self.waiting: deque[bytes] = deque()
        self.waiting_bytes = 0
        with suppress(OSError):  # `write` raises it
            self._open()

    def write(self, record: bytes) -> None:
        """Append waiting records, then `record`. Raises OSError if any still wait."""
        self.waiting.append(record)
        self.waiting_bytes += len(record)
        self._write_waiting()

    def close(self) -> None:
        """Retry waiting records once, and close the file; idempotent."""
        with suppress(OSError):  # they stay counted in `unwritten`
            self._write_waiting()
        self.closed = True
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)

    @property
    def unwritten(self) -> int:
        """Number of records that are not in the file."""
        return len(self.waiting)

    @property
    def position(self) -> int:
        """Size of the file in bytes, with the records that wait."""
        return self.size + self.waiting_bytes

    @property
    def is_deleted(self) -> bool:
        """Whether its file was deleted."""
        return self.descriptor >= 0 and os.fstat(self.descriptor).st_nlink == 0

    def recreate(self) -> None:
        """Write a file that was deleted or moved again, with all records. Raises OSError."""
        if self.descriptor >= 0 and not self.path.exists():
            self.descriptor = write_again(self.descriptor, self.path)
        self._write_waiting()

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | (os.O_EXCL if self.exclusive else 0)
        self.path = self.make_path()
        self.descriptor = safe_opener(self.path, flags)
        self.size = os.fstat(self.descriptor).st_size

    def _write_waiting(self) -> None:
        if self.waiting and self.descriptor < 0 and not self.closed:
            self._open()
        while self.waiting:
            self._append(self.waiting[0])
            self.waiting_bytes -= len(self.waiting.popleft())

    def _append(self, record: bytes) -> None:
        """Write a complete record, or truncate to the old size and raise OSError."""
        if self.is_deleted:  # writes to a deleted file would succeed
            raise FileNotFoundError(errno.ENOENT, "deleted during the run", str(self.path))
        try:
            written = os.write(self.descriptor, record)
            while written < len(record):  # a partial write: the next one raises the reason
                written += os.write(self.descriptor, record[written:])
        except OSError:
            with suppress(OSError):
                os.ftruncate(self.descriptor, self.size)
            raise
        self.size += len(record)


def write_again(descriptor: int, path: Path) -> int:
    """Write what an open file holds to a new one, which replaces it; return its descriptor."""
    new = safe_opener(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL)
    offset = 0
    try:
        while block := os.pread(descriptor, 1 << 20, offset):
            offset += os.write(new, block)
    except OSError:
        os.close(new)
        path.unlink()
        raise
    os.close(descriptor)
    return new


def write_file(path: Path, write_contents: Callable[[HashedFile], None]) -> FileDigest:
    """Write a new file durably; `write_contents` fills it. Raises OSError."""
    with open(path, "xb", buffering=1 << 20, opener=safe_opener) as file:
        hashed = HashedFile(file)
        try:
            write_contents(hashed)
        except RuntimeError as error:
            if hashed.error is not None:
                raise hashed.error from error
            raise
        file.flush()
        os.fsync(file.fileno())
    return hashed.digest


_guarded_folders: set[str] = set()


def guard_folder(folder: Path) -> None:
    """Write through no link below this folder, a run's or a sweep's, from now on."""
    _guarded_folders.update((os.path.abspath(folder), os.path.realpath(folder)))


def link_refusal(path: Path) -> SecurityError:
    """Return the error for a link in the place of something to write."""
    target = os.path.realpath(path)
    return SecurityError(f"{path}: refused: it is a link, to {target}; remove it")


@contextmanager
def open_folder(folder: Path, create: bool = False) -> Iterator[int]:
    """Yield a descriptor of a folder; SecurityError for a link below a guarded one, OSError."""
    path = Path(os.path.abspath(folder))
    root = next((p for p in (path, *path.parents) if str(p) in _guarded_folders), path)
    if create:
        os.makedirs(root, exist_ok=True)
    descriptor = os.open(root, FOLDER_FLAGS)
    try:
        for part in path.relative_to(root).parts:
            root /= part
            if _is_link(part, descriptor):
                raise link_refusal(root)
            with _full_path(root):
                if create:
                    with suppress(FileExistsError):
                        os.mkdir(part, dir_fd=descriptor)
                inner = _open_unlinked(part, FOLDER_FLAGS, descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def safe_opener(path: str | Path, flags: int) -> int:
    """Open a file to write, never writable by others; for `open(opener=…)`.

    A link in its place is replaced by the file. Raises what `open_folder` raises.
    """
    folder, name = os.path.split(path)
    with open_folder(Path(folder)) as descriptor, _full_path(path):
        if _is_link(name, descriptor):
            os.unlink(name, dir_fd=descriptor)
        return _require_regular(_open_unlinked(name, flags | NO_WAIT, descriptor), path)


def _open_unlinked(name: str, flags: int, folder: int) -> int:
    """Open a file of an open folder. Raises OSError for a link."""
    descriptor = os.open(name, flags | NO_LINK, 0o664, dir_fd=folder)
    if not NO_LINK and _is_link(name, folder):
        os.close(descriptor)
        raise OSError(errno.ELOOP, "is a link", name)
    return descriptor


@contextmanager
def _full_path(path: str | Path) -> Iterator[None]:
    """Name the path in errors, not the last part of it."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:  # else it has no file in its text
            error.filename = str(path)
        raise


def _is_link(name: str, folder: int) -> bool:
    try:
        return stat.S_ISLNK(os.lstat(name, dir_fd=folder).st_mode)
    except FileNotFoundError:
        return False


def _require_regular(descriptor: int, path: str | Path) -> int:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a file", str(path))
    return descriptor


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file atomically; NaN and Inf become null. Raises StorageError."""
    text = json.dumps(json_safe(value), indent=2, default=str, allow_nan=False)
    try:
        replace_text(path, text + "\n")
    except OSError as error:
        raise StorageError(f"{path}: not written: {error.strerror or error}") from error


def replace_text(path: Path, text: str) -> None:
    """Replace a small text file atomically.

    Lone surrogates (from file names) are escaped, and secrets from the environment are replaced by
    their names. A leftover temporary file is removed. On OSError the old file is unchanged.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    data = mask_secrets(text).encode("utf-8", "backslashreplace")
    try:
        remove_file(temporary)
        with open(temporary, "xb", opener=safe_opener) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # else a power failure can leave an empty file
        rename(temporary, path)
    except OSError:
        with suppress(OSError):
            remove_file(temporary)
        raise


def write_or_log(path: Path, text: str, level: int = logging.WARNING) -> None:
    """Replace a text file as `replace_text` does, and create its folder; an OSError is logged."""
    try:
        make_folder(path.parent)
        replace_text(path, text)
    except OSError as error:
        log.log(level, "%s: not written: %s", path, error.strerror or error)


def open_regular(path: Path) -> BinaryIO:
    """Open a file, perhaps another user's, for reading. Raises OSError, also for a pipe."""
    descriptor = os.open(path, os.O_RDONLY | NO_WAIT | os.O_CLOEXEC)
    return os.fdopen(_require_regular(descriptor, path), "rb")


def user_cache(environ: Mapping[str, str]) -> Path | None:
    """Return the runner's cache folder: in XDG_CACHE_HOME, else in the home folder.

    None without HOME if the user has no entry in passwd, as in a container.
    """
    cache = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return None if cache.startswith("~") else Path(cache) / "runner"


def read_record(path: Path, max_bytes: int = MAX_RECORD_BYTES) -> bytes:
    """Read a whole file. Raises OSError, also if it has more than `max_bytes`."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise OSError(errno.EFBIG, f"has more than {max_bytes:,} bytes", str(path))
        return file.read()


def read_file(path: Path) -> bytes:
    """Read a whole file. Raises CheckpointError with the reason."""
    try:
        return read_record(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def hard_link(source: Path, target: Path) -> None:
    """Create `target` as a hard link to a file."""
    with open_folder(target.parent) as folder:
        os.link(os.path.realpath(source), target.name, dst_dir_fd=folder)


def link_or_copy(source: Path, target: Path) -> None:
    """Create `target` as a hard link to a file, or as a copy on another file system."""
    try:
        hard_link(source, target)
    except OSError:
        with open_regular(source) as file:
            write_file(target, lambda copy: shutil.copyfileobj(file, copy))


def sync_folder(folder: Path) -> None:
    """fsync a folder, which makes renames in it durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_FSYNC_ERRORS:
            raise
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Rename a file, folder or link, replacing a file or link at `target`."""
    with _full_path(target), open_folder(source.parent) as old, open_folder(target.parent) as new:
        os.replace(source.name, target.name, src_dir_fd=old, dst_dir_fd=new)


def remove_file(path: Path) -> None:
    """Delete a file, of a symlink only the link; a missing one is ignored."""
    with suppress(FileNotFoundError), _full_path(path), open_folder(path.parent) as folder:
        os.unlink(path.name, dir_fd=folder)


def remove_folder(folder: Path, ignore_errors: bool = False) -> None:
    """Delete a folder; of a symlink only the link."""
    try:
        with open_folder(folder.parent) as parent:
            if _is_link(folder.name, parent):
                os.unlink(folder.name, dir_fd=parent)
            else:
                shutil.rmtree(folder.name, ignore_errors, dir_fd=parent)
    except OSError:
        if not ignore_errors:
            raise


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, durably."""
    missing = [f for f in (folder, *folder.parents) if not f.exists()]
    with open_folder(folder, create=True):
        pass
    for created in missing:
        sync_folder(created.parent)


def replace_folder(temporary: Path, final: Path) -> None:
    """Rename a finished folder to its final name, replacing an existing one.

    After a crash the old folder may be left as `.old-<name>`, which `recover_folders` restores.
    """
    old = final.parent / (OLD_PREFIX + final.name)
    replaces = os.path.lexists(final)
    if replaces:
        remove_folder(old, ignore_errors=True)
        rename(final, old)
    try:
        rename(temporary, final)
    except OSError:
        if replaces:
            rename(old, final)
        raise
    sync_folder(final.parent)
    if replaces:
        remove_folder(old, ignore_errors=True)


def recover_folders(folder: Path) -> None:
    """Complete or undo a `replace_folder` that a crash interrupted."""
    for old in folder.glob(OLD_PREFIX + "*"):
        final = folder / old.name.removeprefix(OLD_PREFIX)
        if final.exists():
            remove_folder(old, ignore_errors=True)
        else:
            rename(old, final)


def update_link(link: Path, target: str) -> None:
    """Atomically point `link` to its sibling `target`."""
    temporary = link.with_name(f".tmp-{link.name}")
    remove_file(temporary)
    try:
        with open_folder(link.parent) as folder:
            os.symlink(target, temporary.name, dir_fd=folder)
    except (OSError, NotImplementedError):  # no symlinks supported: a text file with the name
        with open(temporary, "w", opener=safe_opener) as file:
            file.write(target)
    rename(temporary, link)


def read_link(link: Path) -> str | None:
    """Return the name that `link` points to; None if it cannot be read."""
    try:
        return os.readlink(link) if link.is_symlink() else read_record(link).decode()
    except (OSError, UnicodeDecodeError):
        return None
