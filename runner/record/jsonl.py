"""Files that are only ever appended to, a whole record at a time."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from runner.record.storage import NO_LINK, NO_WAIT


class Appender:
    """Appends records to a file; one that cannot be written whole is taken back.

    Nothing is buffered in the process, so what `write` returned from survives a kill; a small
    write costs about a microsecond. Every failure is an OSError, a deleted file included.
    """

    def __init__(self, path: Path, *, new: bool = False) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | (os.O_EXCL if new else 0)
        flags |= NO_LINK | NO_WAIT  # a folder that is resumed may be another's work
        self.path = path
        self.descriptor = os.open(path, flags, 0o644)
        self.size = os.fstat(self.descriptor).st_size

    def write(self, record: bytes) -> None:
        """Append `record`, or raise OSError and leave the file as it was."""
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

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)
