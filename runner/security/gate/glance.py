"""What a file's ends tell before the rest of it is read, since it may be large.

The same checks are made once more on all of the bytes; nothing passes for having passed here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

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
MEMBERS = (b"data.pkl", b".npy")  # how names of files end in archives that loaders open
_END = struct.Struct("<4s4H2LH")  # of a zip: what follows is a comment
_COMMENT, _WIDE = 0xFFFF, 0xFFFFFFFF
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
    if is_zip(head):  # archives of other things are no concern of ours
        return first_member(head).endswith(MEMBERS) or _lists(data, MEMBERS)
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

    Its place is what any reader may take for it; one that is too large to be searched has it.
    """
    before = max(0, len(data) - _END.size - _COMMENT)
    tail = bytes(data[before:])
    found = tail.rfind(b"PK\x05\x06", 0, max(0, len(tail) - _END.size + 4))
    if found < 0:
        return False
    end = before + found
    start = min(_starts(data, end), default=end)
    if end - start > LARGEST:
        return True
    overlap = max(map(len, names)) - 1
    for at in range(start, end, BLOCK):
        part = bytes(data[at : min(end, at + BLOCK + overlap)])
        if any(name in part for name in names):
            return True
    return False


def _starts(data: Peekable, end: int) -> Iterator[int]:
    """Where the table may begin that ends at the record at `end`: where that says, or as long
    before it as that says.
    """
    *_, size, offset, _ = _END.unpack(data[end : end + _END.size])
    spans = [] if _WIDE in (size, offset) else [(offset, end - size)]
    before = bytes(data[max(0, end - _LOCATOR.size) : end])
    if before.startswith(b"PK\x06\x07") and len(before) == _LOCATOR.size:
        at = _LOCATOR.unpack(before)[2]
        record = bytes(data[at : at + _END64.size])
        if len(record) == _END64.size:
            *_, size, offset = _END64.unpack(record)
            spans.append((offset, at - size))
    for span in spans:
        yield from (start for start in span if 0 <= start <= end)
