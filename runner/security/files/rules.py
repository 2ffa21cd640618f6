"""Rules about zip archives, in one table: each with a sample that keeps it and one that breaks it.

A rule gets an opened archive and returns what is wrong, or an empty text. What the formats' own
libraries refuse (offsets in safetensors, shapes and types in npy) is left to them.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from runner.security.files.formats import Data, Refused, open_zip
from runner.security.files.policy import FileLimits

BLOCK = 1 << 20  # bytes that are inflated at a time
LOCAL_HEADER = struct.Struct("<4s5H3L2H")


class Zip:
    """A zip archive: its bytes, and its members."""

    def __init__(self, data: Data, limits: FileLimits) -> None:
        self.data, self.limits = data, limits
        with open_zip(data) as archive:
            self.members = archive.infolist()

    def packed(self, member: zipfile.ZipInfo) -> memoryview:
        """A member's bytes, found by its own header."""
        at = member.header_offset
        header = bytes(self.data[at : at + LOCAL_HEADER.size])
        if len(header) < LOCAL_HEADER.size:
            return memoryview(b"")
        name_length, extra_length = LOCAL_HEADER.unpack(header)[-2:]
        start = at + LOCAL_HEADER.size + int(name_length) + int(extra_length)
        return memoryview(self.data)[start : start + member.compress_size]


def check_unique(archive: Zip) -> str:
    """Of two members with one name, case aside as torch compares them, readers take other ones."""
    names = [member.orig_filename.lower() for member in archive.members]
    return "" if len(set(names)) == len(names) else "two members have one name"


def check_paths(archive: Zip) -> str:
    """Relative, printable names within the archive."""
    for member in archive.members:
        name = member.orig_filename
        plain = name.isprintable() and not set(name) & set("\\:")
        if not plain or any(part in ("", ".", "..") for part in name.split("/")):
            return f"{name!r} is no plain name within the archive"
    return ""


def check_ratio(archive: Zip) -> str:
    """What all members say that they hold is bounded by the file's size."""
    size, total = len(archive.data), sum(member.file_size for member in archive.members)
    return "" if total <= archive.limits.may_expand(size) else f"{size:,} bytes expand to {total:,}"


def check_sums(archive: Zip) -> str:
    """Each member's bytes have their CRC and length, inflated no further than they say."""
    for member in archive.members:
        packed = archive.packed(member)
        if member.compress_type == zipfile.ZIP_STORED:
            intact = zlib.crc32(packed) == member.CRC and len(packed) == member.file_size
        else:
            intact = _inflates(packed, member)
        if not intact:
            return f"{member.orig_filename} does not match its checksum"
    return ""


def _inflates(packed: memoryview, member: zipfile.ZipInfo) -> bool:
    engine, crc, size = zlib.decompressobj(-zlib.MAX_WBITS), 0, 0
    rest: bytes | memoryview = packed
    try:
        while not engine.eof and size <= member.file_size:
            part = engine.decompress(rest, BLOCK)
            if not part and not engine.unconsumed_tail:
                break
            crc, size, rest = zlib.crc32(part, crc), size + len(part), engine.unconsumed_tail
    except zlib.error:
        return False
    return engine.eof and (crc, size) == (member.CRC, member.file_size)


def make_zip(*members: tuple[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    """A sound archive of these members: the samples are made from it."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, data in members:
            archive.writestr(zipfile.ZipInfo(name), data, method)
    return out.getvalue()


def _good_zip() -> bytes:
    return make_zip(("a", b"x" * 100), ("b", b"y" * 100))


def _bad_ratio() -> bytes:
    return make_zip(("a", bytes(1 << 16)), method=zipfile.ZIP_DEFLATED)


@dataclass(frozen=True)
class FileRule:
    """One thing that may be wrong with an archive."""

    code: str
    check: Callable[[Zip], str]
    bad: Callable[[], bytes]
    limits: FileLimits = FileLimits()  # for its samples
    good: Callable[[], bytes] = _good_zip


ZIP_RULES = (
    FileRule("zip.unique", check_unique, lambda: make_zip(("a", b"1"), ("A", b"2"))),
    FileRule("zip.paths", check_paths, lambda: make_zip(("../a", b""))),
    FileRule("zip.ratio", check_ratio, _bad_ratio, FileLimits(expanded=1000, ratio=2)),
    FileRule("zip.crc", check_sums, lambda: _good_zip().replace(b"xxx", b"xyx", 1)),
)


def check_zip(data: Data, limits: FileLimits) -> None:
    """Hold an archive against the rules. Raises Refused for the first it breaks."""
    archive = Zip(data, limits)
    for rule in ZIP_RULES:
        if wrong := rule.check(archive):
            raise Refused(rule.code, "", wrong)
