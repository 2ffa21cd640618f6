"""Whether bytes are a pickle, of any protocol: a walk over its opcodes, of which none is followed.

Protocols 0 and 1 have no beginning of their own, a program runs whatever follows its end, and what
is imported on the way was imported even if it breaks off later. Numbers without a header read as a
few opcodes too. So it is a pickle if an import is reached, or an end that is no accident. Where an
unpickler is lenient this is lenient as well; what is too long to tell is taken for one.
"""

from __future__ import annotations

import pickletools
import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

WINDOW = 1 << 16  # bytes that are read at a time
LONGEST = 1 << 24  # bytes of a line that is looked for its end
MOST = 100_000  # opcodes that are looked at
FEW = 8  # opcodes up to an end that numbers may reach by accident
SHORT = 1 << 12  # bytes of a text or line that are looked at
NEWEST = 5  # protocol

_NAME = re.compile(rb"[^\x00-\x20\x7f]+")  # that something could be imported by
_NUMBER = re.compile(rb"\s*[+-]?[0-9]")
_FLOAT = re.compile(rb"\s*[+-]?([0-9.]|inf|nan)", re.IGNORECASE)
_QUOTED = re.compile(rb"\s*['\"]")
_LINES = {  # how the line after an opcode has to begin
    "INT": _NUMBER, "LONG": _NUMBER, "GET": _NUMBER, "PUT": _NUMBER, "FLOAT": _FLOAT,
    "STRING": _QUOTED, "UNICODE": re.compile(b""), "PERSID": re.compile(b""),
}  # fmt: skip
_LENGTHS = {  # bytes of the length before an argument, and whether that has a sign
    pickletools.TAKEN_FROM_ARGUMENT1: (1, False),
    pickletools.TAKEN_FROM_ARGUMENT4: (4, True),
    pickletools.TAKEN_FROM_ARGUMENT4U: (4, False),
    pickletools.TAKEN_FROM_ARGUMENT8U: (8, False),
}
_UTF8 = ("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")
_TEXTS = (*_UTF8, "UNICODE", "STRING", "BINSTRING", "SHORT_BINSTRING")


class Peekable(Protocol):
    """Bytes, or a file of which only what is asked for is read."""

    def __len__(self) -> int: ...
    def __getitem__(self, part: slice, /) -> bytes | memoryview: ...


class _Opcode(NamedTuple):
    name: str
    size: int  # bytes of its argument; below 0 as pickletools has it
    pops: int  # from the stack; above a mark all that is there
    to_mark: bool
    pushes: int


class _Broken(Exception):
    """No unpickler goes on here."""


class _Beyond(Exception):
    """It goes on for longer than anybody looks."""


def is_program(data: Peekable) -> bool:
    """Whether an unpickler that is given these bytes would import something, or come to an end."""
    tape = _Tape(data)
    try:
        while True:  # what is read by one unpickler after another has several ends
            count, imports = _walk(tape)
            if imports or count >= FEW or tape.at == tape.size:
                return True
    except _Broken:
        return False
    except _Beyond:
        return True


def _walk(tape: _Tape) -> tuple[int, bool]:
    """How many opcodes there are up to the end of the next program, or else to an import."""
    begun, depth, has_text = tape.steps, 0, False
    marks: list[int] = []  # how deep the stack was at each
    while True:
        opcode = tape.opcode()
        name = opcode.name
        if name in ("GLOBAL", "INST"):
            if _NAME.fullmatch(tape.line()) and _NAME.fullmatch(tape.line()):
                return tape.steps - begun, True
            raise _Broken
        _skip_argument(tape, opcode)
        if name == "MARK":
            marks.append(depth)
            continue
        if name == "POP" and marks and depth == marks[-1]:
            marks.pop()
            continue
        if opcode.to_mark:
            if not marks:
                raise _Broken
            depth = marks.pop()
        depth -= opcode.pops
        if depth < 0:
            raise _Broken
        if name == "STOP":
            return tape.steps - begun, False
        if name == "STACK_GLOBAL" and has_text:
            return tape.steps - begun, True
        has_text = has_text or name in _TEXTS
        depth += opcode.pushes


def _skip_argument(tape: _Tape, opcode: _Opcode) -> None:
    name, size = opcode.name, opcode.size
    if name in _LINES:
        if not _LINES[name].match(tape.line()):
            raise _Broken
    elif name == "PROTO":
        if tape.take(1)[0] > NEWEST:
            raise _Broken
    elif size >= 0:
        tape.skip(size)
    else:
        width, signed = _LENGTHS[size]
        length = int.from_bytes(tape.take(width), "little", signed=signed)
        if length < 0:
            raise _Broken
        if name in _UTF8 and length <= SHORT:
            _check_utf8(tape.take(length))
        else:
            tape.skip(length)


def _check_utf8(text: bytes) -> None:
    try:
        text.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise _Broken from None


class _Tape:
    """Where the walk is; what runs beyond the end is broken."""

    def __init__(self, data: Peekable) -> None:
        self.data, self.size, self.at = data, len(data), 0
        self.steps = 0  # opcodes that were looked at
        self._held, self._from = b"", 0

    def opcode(self) -> _Opcode:
        self.steps += 1
        if self.steps > MOST:
            raise _Beyond
        opcode = _OPCODES.get(self.take(1)[0])
        if opcode is None:
            raise _Broken
        return opcode

    def take(self, count: int) -> bytes:
        start = self.at
        self.skip(count)
        if not self._from <= start <= self.at <= self._from + len(self._held):
            self._from = start
            self._held = bytes(self.data[start : start + max(count, WINDOW)])
        found = self._held[start - self._from : self.at - self._from]
        if len(found) < count:  # it was cut short meanwhile
            raise _Broken
        return found

    def skip(self, count: int) -> None:
        self.at += count
        if self.at > self.size:
            raise _Broken

    def line(self) -> bytes:
        """The first of what is up to the next line, or up to the end, which serves as well."""
        start = self.at
        while self.at < self.size:
            if self.at - start > LONGEST:
                raise _Beyond
            left = self._from + len(self._held) - self.at
            part = self.take(min(left if left > 0 else WINDOW, self.size - self.at))
            end = part.find(b"\n")
            if end >= 0:
                self.at += end + 1 - len(part)
                break
        return bytes(self.data[start : min(self.at - 1, start + SHORT)])


def _row(opcode: pickletools.OpcodeInfo) -> _Opcode:
    before: Sequence[object] = opcode.stack_before
    to_mark = pickletools.markobject in before
    return _Opcode(
        opcode.name,
        opcode.arg.n if opcode.arg is not None else 0,
        before.index(pickletools.markobject) if to_mark else len(before),
        to_mark,
        len(opcode.stack_after),
    )


_OPCODES = {ord(opcode.code): _row(opcode) for opcode in pickletools.opcodes}
