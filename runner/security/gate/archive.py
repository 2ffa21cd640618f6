"""A zip archive of which every byte is accounted for, so that all readers see the same in it.

Readers of zip files differ in which of two headers they believe, which of two members of one name
they take, and where they look for the table at the end. Here there is only one answer: members lie
one after the other from the first byte to the table, and each is described the same way twice.
"""

from __future__ import annotations

import stat
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from runner.security.gate.format import Buffer
from runner.security.gate.policy import Bounds
from runner.security.gate.program import Peekable
from runner.security.gate.refused import Refused, repeated
from runner.security.gate.threads import at_once

STORED, DEFLATED = 0, 8
DESCRIPTOR, UTF8 = 1 << 3, 1 << 11  # sizes follow the data; the name is UTF-8
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF
_ZIP64, _PADDING = 0x0001, 0x4246  # extra fields: long sizes, and torch's alignment
_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")


@dataclass(frozen=True)
class Member:
    """A file in the archive."""

    name: str
    method: int
    start: int  # of its bytes, in the archive
    stored: int  # bytes that it takes there
    size: int  # bytes that it has
    crc: int


class _Entry(NamedTuple):
    """A row of the table at the end."""

    name: bytes
    flags: int
    method: int
    when: tuple[int, int]
    crc: int
    stored: int
    size: int
    offset: int


def read_archive(data: Buffer, bounds: Bounds, methods: tuple[int, ...]) -> list[Member]:
    """Its members, in the order of their bytes. Raises Refused."""
    count, table, end = find_table(data)
    if count > bounds.members:
        raise Refused("zip.members", "", f"has {count:,} members, more than {bounds.members:,}", "")
    entries = sorted(_read_table(data, count, table, end, methods), key=lambda e: e.offset)
    twice = repeated([entry.name for entry in entries])
    if twice is not None:
        raise Refused("zip.duplicate", _text(twice), "is there twice, and readers differ in which")
    members: list[Member] = []
    at = 0
    for entry, following in zip(entries, [*(e.offset for e in entries[1:]), table], strict=True):
        if entry.offset != at:
            gap = entry.offset - at
            code = "zip.overlap" if gap < 0 else "zip.gap" if at else "zip.prepended"
            raise Refused(
                code, f"at {min(at, entry.offset)}",
                f"{abs(gap):,} bytes belong to {'two members' if gap < 0 else 'no member'}",
            )  # fmt: skip
        members.append(_read_local(data, entry, following))
        at = following
    if not members:
        raise Refused("zip.empty", "", "holds nothing")
    return members


def check_sums(data: Buffer, members: list[Member]) -> None:
    """Compare each stored member's CRC with its bytes. Raises Refused.

    One thread sums at twice to three times the speed of sha256, so large ones are shared out.
    """
    view = memoryview(data)

    def check(member: Member) -> None:
        _compare(zlib.crc32(view[member.start : member.start + member.stored]), member)

    at_once(check, (m for m in members if m.method == STORED), lambda member: member.size)


def inflate(data: Buffer, member: Member) -> bytes | memoryview:
    """A member's bytes, never more than it says that it has. Raises Refused."""
    held = memoryview(data)[member.start : member.start + member.stored]
    if member.method == STORED:
        _compare(zlib.crc32(held), member)
        return held
    engine = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        plain = engine.decompress(held, member.size + 1)
    except zlib.error as error:
        raise Refused("zip.deflate", member.name, f"cannot be inflated: {error}") from None
    if len(plain) != member.size or not engine.eof or engine.unused_data:
        raise Refused("zip.size", member.name, f"does not inflate to {member.size:,} bytes")
    _compare(zlib.crc32(plain), member)
    return plain


def _compare(crc: int, member: Member) -> None:
    if crc != member.crc:
        raise Refused("zip.crc", member.name, "its bytes do not match their checksum")


def find_table(data: Peekable) -> tuple[int, int, int]:
    """How many rows the table at the end has, where it begins, and where it ends.

    Raises Refused.
    """
    last = len(data) - _END.size
    if last < 0 or bytes(data[last : last + 4]) != b"PK\x05\x06":
        raise Refused(
            "zip.end", f"at {max(last, 0)}", "the archive does not end with its table: it was cut "
            "short, or something was appended",
        )  # fmt: skip
    _, disk, first, here, count, size, offset, comment = _END.unpack(data[last:])
    if disk or first or here != count or comment:
        raise Refused("zip.end", f"at {last}", "is one of several parts, or has a comment")
    end = last
    locator = last - _LOCATOR.size
    if locator >= 0 and bytes(data[locator : locator + 4]) == b"PK\x06\x07":
        end = locator - _END64.size
        _, disk, where, disks = _LOCATOR.unpack(data[locator:last])
        if disk or disks != 1 or where != end or end < 0:
            raise Refused("zip.end", f"at {locator}", "points to another table than its own")
        signature, length, _, _, disk, first, here, long_count, long_size, long_offset = (
            _END64.unpack(data[end:locator])
        )
        short = (_short(long_count, _MAX16), _short(long_size, _MAX32), _short(long_offset, _MAX32))
        if (
            signature != b"PK\x06\x06" or length != _END64.size - 12 or disk or first
            or here != long_count
            or any(a not in (b, m) for a, b, m in zip(
                (count, size, offset), short, (_MAX16, _MAX32, _MAX32), strict=True
            ))
        ):  # fmt: skip
            raise Refused("zip.end", f"at {end}", "its two tables at the end disagree")
        count, size, offset = long_count, long_size, long_offset
    if offset + size != end:
        raise Refused("zip.end", f"at {end}", "the table of members is not where it should be")
    return count, offset, end


def _short(value: int, most: int) -> int:
    return min(value, most)


def _read_table(
    data: Buffer, count: int, at: int, end: int, methods: tuple[int, ...]
) -> Iterator[_Entry]:
    for _ in range(count):
        if at + _CENTRAL.size > end:
            raise Refused("zip.table", f"at {at}", "the table of members is cut short")
        (
            signature, made, _, flags, method, time, date, crc, stored, size, name_length,
            extra_length, comment, disk, _, attributes, offset,
        ) = _CENTRAL.unpack_from(data, at)  # fmt: skip
        start = at + _CENTRAL.size
        name = bytes(data[start : start + name_length])
        extra = bytes(data[start + name_length : start + name_length + extra_length])
        after = start + name_length + extra_length
        if signature != b"PK\x01\x02" or comment or disk or after > end:
            raise Refused("zip.table", f"at {at}", "a row of the table of members is malformed")
        _check_name(name, at)
        shown = _text(name)
        if flags & ~(DESCRIPTOR | UTF8):
            what = "is encrypted" if flags & 0x2041 else f"has the flags {flags:#x}"
            raise Refused("zip.flags", shown, what)
        if method not in methods:
            raise Refused(
                "zip.method", shown, f"is compressed by a method that is not read here ({method})"
            )
        kind = stat.S_IFMT(attributes >> 16) if made >> 8 == 3 else 0
        if kind not in (0, stat.S_IFREG) or attributes & 0x10:
            raise Refused("zip.kind", shown, "is a link, a folder or a device and not a file")
        wide = _extra(extra, shown, {_ZIP64}).get(_ZIP64, b"")
        fields = [size, stored, offset]
        for i, value in enumerate(fields):
            if value == _MAX32:
                if len(wide) < 8:
                    raise Refused("zip.table", shown, "has no size")
                fields[i], wide = int.from_bytes(wide[:8], "little"), wide[8:]
        if wide:
            raise Refused("zip.extra", shown, "says its size twice")
        size, stored, offset = fields
        if method == STORED and stored != size:
            raise Refused(
                "zip.size", shown, f"takes {stored:,} bytes and says that it has {size:,}"
            )
        yield _Entry(name, flags, method, (time, date), crc, stored, size, offset)
        at = after
    if at != end:
        raise Refused("zip.table", f"at {at}", f"{end - at:,} bytes after the table of members")


def _read_local(data: Buffer, entry: _Entry, following: int) -> Member:
    """The member, once its own header and what follows its bytes say what the table says."""
    shown, at = _text(entry.name), entry.offset
    if at + _LOCAL.size > len(data):
        raise Refused("zip.local", shown, "lies beyond the end of the file")
    signature, _, flags, method, time, date, crc, stored, size, name_length, extra_length = (
        _LOCAL.unpack_from(data, at)
    )
    start = at + _LOCAL.size
    name = bytes(data[start : start + name_length])
    extra = bytes(data[start + name_length : start + name_length + extra_length])
    start += name_length + extra_length
    told = (flags, method, (time, date), name)
    if signature != b"PK\x03\x04" or told != (entry.flags, entry.method, entry.when, entry.name):
        raise Refused("zip.local", shown, "its own header and the table of members disagree")
    wide = _extra(extra, shown, {_ZIP64, _PADDING}).get(_ZIP64, b"")
    if len(wide) not in (0, 16):
        raise Refused("zip.extra", shown, "its long sizes are malformed")
    if wide and stored == size == _MAX32:
        size, stored = struct.unpack("<2Q", wide)
        wide = b""
    true = (entry.crc, entry.stored, entry.size)
    if flags & DESCRIPTOR:
        blank = (crc, stored, size) in ((0, 0, 0), true) and not any(wide)
        end = start + entry.stored
        tail = bytes(data[end:following]) if following - end in (16, 24) else b""
        agreed = tail in (
            struct.pack("<4sL2L", b"PK\x07\x08", *(_short(n, _MAX32) for n in true)),
            struct.pack("<4sL2Q", b"PK\x07\x08", *true),
        )
    else:
        blank = (crc, stored, size) == true and not any(wide)
        agreed = start + entry.stored == following
    if not blank or not agreed:
        raise Refused("zip.local", shown, "its sizes are not those in the table of members")
    return Member(shown, entry.method, start, entry.stored, entry.size, entry.crc)


def _extra(extra: bytes, shown: str, known: set[int]) -> dict[int, bytes]:
    """The extra fields by their number, each known and there once."""
    found: dict[int, bytes] = {}
    at = 0
    while at < len(extra):
        number, length = struct.unpack_from("<2H", extra, at) if at + 4 <= len(extra) else (0, 0)
        value = extra[at + 4 : at + 4 + length]
        if number not in known or number in found or len(value) != length:
            raise Refused("zip.extra", shown, f"has something in its header (field {number:#06x})")
        if number == _PADDING and value.strip(b"Z"):
            raise Refused("zip.extra", shown, "something is hidden in the padding before it")
        found[number] = value
        at += 4 + length
    return found


def _check_name(name: bytes, at: int) -> None:
    try:
        text = name.decode()
    except UnicodeDecodeError:
        raise Refused("zip.name", f"at {at}", "a member's name is not UTF-8") from None
    parts = text.split("/")
    if (
        not text.isprintable() or "\\" in text or ":" in text
        or any(part in ("", ".", "..") for part in parts)
    ):  # fmt: skip
        raise Refused("zip.name", text, "is no plain name within the archive")


def _text(name: bytes) -> str:
    return name.decode("utf-8", "replace")
