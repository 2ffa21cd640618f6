"""What a file's ends tell before the rest of it is read, since it may be large.

The same checks are made once more on all of the bytes; nothing passes for having passed here.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Callable, Iterator

from runner.errors import CheckpointError
from runner.security.config import SecurityLevel
from runner.security.gate import tensors_file
from runner.security.gate.archive import find_table
from runner.security.gate.arrays import MAGIC, check_header
from runner.security.gate.format import HEAD, first_member, identify, is_zip
from runner.security.gate.policy import Bounds, Policy
from runner.security.gate.program import Peekable, is_program
from runner.security.gate.refused import Refused
from runner.security.gate.wanted import NeedsPickle
from runner.security.trust import Reason

SHORT = 1 << 20  # bytes of a safetensors header that is read here
BLOCK = 1 << 20  # bytes of a zip's table that are searched at a time
LARGEST = 1 << 28  # bytes of it that are searched
LISTED = 1 << 20  # bytes of it whose members are looked into: 13,000 take 0.3 s
MEMBERS = (b"data.pkl", b".npy")  # how names of files end in archives that loaders open
ENDING = 1 << 17  # bytes in which readers look for the end: torch's goes back by whole blocks
END = b"PK\x05\x06"
_END = struct.Struct("<4s4H2LH")  # of a zip: what follows is a comment
_WIDE = 0xFFFFFFFF
_LOCATOR = struct.Struct("<4sLQL")  # before it where sizes are long
_END64 = struct.Struct("<4sQ2H2L4Q")


def refusal(data: Peekable, name: str, policy: Policy) -> Reason | None:
    """Why nothing of it may be loaded, where that is seen without reading all of it.

    With security=off its structure is nobody's concern.
    """
    try:
        kind = identify(data, name)
        if kind in _CHECKS and policy.level is not SecurityLevel.off:
            _CHECKS[kind](data, policy.bounds)
    except NeedsPickle:
        return None  # it may be allowed by its digest
    except Refused as refused:
        return refused.reason
    except struct.error:  # it is being written to, which is seen where it is read
        return None
    return None


def holds_model(data: Peekable) -> bool:
    """Whether a loader of models or arrays would take its content, whatever its name is.

    Pickles of protocols that have no beginning of their own are not looked for.
    """
    head = bytes(data[:HEAD])
    # numpy takes for an archive what begins with its end as well; of other things they are no
    # concern of ours
    if is_zip(head) or head.startswith(END):
        named = first_member(head).endswith(MEMBERS) or _lists(data, MEMBERS)
        return named or _holds_array(data)
    return head.startswith(MAGIC) or head.startswith(b"\x80") and is_program(data)


def _check_npy(data: Peekable, bounds: Bounds) -> None:
    check_header(data)


def _check_zip(data: Peekable, bounds: Bounds) -> None:
    find_table(data)


def _check_safetensors(data: Peekable, bounds: Bounds) -> None:
    if int.from_bytes(data[:8], "little") <= SHORT:
        tensors_file.check(data, bounds)


_CHECKS: dict[str, Callable[[Peekable, Bounds], None]] = {
    "npy": _check_npy,
    "npz": _check_zip,
    "torch_zip": _check_zip,
    "safetensors": _check_safetensors,
}


def _lists(data: Peekable, names: tuple[bytes, ...]) -> bool:
    """Whether one of these is in the table at the end of a zip, which no reader opens without.

    In any case, which torch's reader does not regard. Its place is what any reader may take for it;
    one that is too large to be searched has it.
    """
    before = max(0, len(data) - ENDING)
    tail = bytes(data[before:])
    found = tail.rfind(END, 0, max(0, len(tail) - _END.size + 4))
    if found < 0:
        return False
    end = before + found
    start = min(_starts(data, end), default=end)
    if end - start > LARGEST:
        return True
    overlap = max(map(len, names)) - 1
    for at in range(start, end, BLOCK):
        part = bytes(data[at : min(end, at + BLOCK + overlap)]).lower()
        if any(name in part for name in names):
            return True
    return False


def _starts(data: Peekable, end: int) -> Iterator[int]:
    """Where the table may begin that ends at the record at `end`: where that says, or as long
    before it as that says. The one for long sizes lies where that says, or right before it.
    """
    *_, size, offset, _ = _END.unpack(data[end : end + _END.size])
    spans = [] if _WIDE in (size, offset) else [(offset, end - size)]
    before = bytes(data[max(0, end - _LOCATOR.size) : end])
    if before.startswith(b"PK\x06\x07") and len(before) == _LOCATOR.size:
        for at in (_LOCATOR.unpack(before)[2], end - _LOCATOR.size - _END64.size):
            record = bytes(data[max(0, at) : at + _END64.size])
            if len(record) == _END64.size:
                *_, size, offset = _END64.unpack(record)
                spans.append((offset, at - size))
    for span in spans:
        yield from (start for start in span if 0 <= start <= end)


def _holds_array(data: Peekable) -> bool:
    """Whether a member of a zip begins as an array: numpy goes by that, and not by the name.

    Read as numpy reads it; what cannot be read so is none to it either.
    """
    try:
        with zipfile.ZipFile(_File(data)) as archive:
            return any(_begins(archive, member) == MAGIC for member in archive.infolist())
    except CheckpointError:
        raise
    except Exception:  # of a dozen kinds
        return False


def _begins(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    try:
        with archive.open(member) as file:
            return file.read(len(MAGIC))
    except CheckpointError:
        raise
    except Exception:  # as above, and the next one may be an array
        return b""


class _File(io.RawIOBase):
    """Peeked bytes as a file, of which no more than LISTED are read at once."""

    def __init__(self, data: Peekable) -> None:
        self._data, self._at = data, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        at = offset + (0, self._at, len(self._data))[whence]
        if at < 0:
            raise OSError("before its beginning")
        self._at = at
        return at

    def read(self, size: int = -1, /) -> bytes:
        stop = len(self._data) if size < 0 else self._at + size
        if stop - self._at > LISTED:
            raise OSError("too much at once")
        part = bytes(self._data[self._at : stop])
        self._at += len(part)
        return part
