"""Rules about containers, in one table: each with a sample that keeps it and one that breaks it.

A rule gets an opened container and returns what is wrong, or an empty text. What the formats' own
libraries refuse (offsets in safetensors, types in npy) is left to them.
"""

from __future__ import annotations

import io
import json
import math
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.lib import format as npy_format

from runner.security.files.formats import Data, Refused, open_zip
from runner.security.files.policy import FileLimits

BLOCK = 1 << 20  # bytes that are inflated at a time
ARRAY_HEADER = 1 << 17  # bytes in which the header of an array ends
LOCAL_HEADER = struct.Struct("<4s5H3L2H")


class Zip:
    """A zip archive: its bytes, and its members in the order of their place."""

    def __init__(self, data: Data, limits: FileLimits) -> None:
        self.data, self.limits = data, limits
        self.size = len(data)
        with open_zip(data) as archive:
            self.members = sorted(archive.infolist(), key=lambda member: member.header_offset)

    @cached_property
    def names(self) -> list[str]:
        """Member names as torch's reader compares them: without regard to case."""
        return [member.orig_filename.lower() for member in self.members]

    @cached_property
    def starts(self) -> list[int]:
        """Where each member's bytes begin, by its own header. Raises Refused."""
        return [self._start_of(member) for member in self.members]

    def _start_of(self, member: zipfile.ZipInfo) -> int:
        header = bytes(self.data[member.header_offset : member.header_offset + LOCAL_HEADER.size])
        if len(header) < LOCAL_HEADER.size:
            raise Refused("zip.local", member.orig_filename, "lies beyond the end of the file")
        name_length, extra_length = LOCAL_HEADER.unpack(header)[-2:]
        return member.header_offset + LOCAL_HEADER.size + int(name_length) + int(extra_length)


def check_begin(archive: Zip) -> str:
    """Readers that search from the end and readers from the beginning must see one archive."""
    return "" if archive.members[0].header_offset == 0 else "bytes lie before its first member"


def check_end(archive: Zip) -> str:
    """No comment and no appended bytes, where a second archive could hide."""
    ends = bytes(archive.data[-22:-18]) == b"PK\x05\x06"
    return "" if ends else "its directory is followed by a comment or other bytes"


def check_unique(archive: Zip) -> str:
    """Of two members with one name, readers take different ones."""
    return _repeated(archive.names)


def check_paths(archive: Zip) -> str:
    """Relative, printable names within the archive."""
    for member in archive.members:
        name = member.orig_filename
        parts = name.split("/")
        plain = name.isprintable() and not set(name) & set("\\:")
        if not plain or any(part in ("", ".", "..") for part in parts):
            return f"{name!r} is no plain name within the archive"
    return ""


def check_ratio(archive: Zip) -> str:
    """What all members say that they hold is bounded by the file's size."""
    total, most = sum(m.file_size for m in archive.members), archive.limits.may_expand(archive.size)
    return "" if total <= most else f"its {archive.size:,} bytes expand to {total:,}"


def check_sums(archive: Zip) -> str:
    """Each member's bytes have their CRC and length, inflated no further than they say."""

    whole = memoryview(archive.data)
    for member, start in zip(archive.members, archive.starts, strict=True):
        packed = whole[start : start + member.compress_size]
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


def check_arrays(archive: Zip) -> str:
    """Every member of an .npz is an array that fits its header, under one name."""
    for member in archive.members:
        if not member.orig_filename.endswith(".npy"):
            return f"{member.orig_filename} is no array"
    if twice := _repeated([name.removesuffix(".npy") for name in archive.names]):
        return twice
    if within := {n.removesuffix(".npy") for n in archive.names} & set(archive.names):
        return f"{min(within)} can be read as two arrays"
    for member, start in zip(archive.members, archive.starts, strict=True):
        head = bytes(archive.data[start : start + min(member.compress_size, ARRAY_HEADER)])
        if member.compress_type != zipfile.ZIP_STORED:
            head = zlib.decompressobj(-zlib.MAX_WBITS).decompress(head, ARRAY_HEADER)
        if wrong := _misfit(io.BytesIO(head), member.file_size):
            return f"{member.orig_filename} {wrong}"
    return ""


def check_array(array: Data, limits: FileLimits) -> str:
    """The bytes of an .npy are as many as its header says."""
    return _misfit(io.BytesIO(bytes(array[:ARRAY_HEADER])), len(array))


def _misfit(file: Any, size: int) -> str:
    version = npy_format.read_magic(file)
    read = npy_format.read_array_header_1_0 if version == (1, 0) else _read_wide_header
    shape, _, dtype = read(file)
    if dtype.hasobject:
        return ""  # numpy refuses it
    if any(n < 0 for n in shape):
        return f"has the shape {shape}"
    count = math.prod(shape) * dtype.itemsize
    there = size - file.tell()
    return "" if count == there else f"of {dtype} and shape {shape} is {count:,} bytes, not {there}"


def _read_wide_header(file: Any) -> Any:
    """Versions 2 and 3 differ only in the encoding of column names."""
    return npy_format.read_array_header_2_0(file)


def check_keys(header: Data, limits: FileLimits) -> str:
    """Unique names in a safetensors header, which the library does not ask for."""
    length = int.from_bytes(header[:8], "little")

    twice: list[str] = []

    def collect(pairs: list[tuple[str, Any]]) -> None:
        if len(dict(pairs)) != len(pairs):
            twice.append(_repeated([name for name, _ in pairs]))

    json.loads(bytes(header[8 : 8 + length]), object_pairs_hook=collect)
    return twice[0] if twice else ""


def _repeated(names: list[str]) -> str:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return f"{name!r} is there twice"
        seen.add(name)
    return ""


def make_zip(*members: tuple[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    """A sound archive of these members: the samples are made from it."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, data in members:
            archive.writestr(zipfile.ZipInfo(name), data, method)
    return out.getvalue()


def _twice(data: bytes) -> bytes:
    """The member `b` renamed to `a`, in both headers."""
    return data.replace(b"b.npy", b"a.npy")


def _npy(array: np.ndarray | None = None) -> bytes:
    out = io.BytesIO()
    np.save(out, np.arange(4.0) if array is None else array)
    return out.getvalue()


def _safetensors(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header


ONE = ("a.npy", b"x" * 100)


def _good_zip() -> bytes:
    return make_zip(ONE, ("b.npy", b"y" * 100))


DEFLATED = zipfile.ZIP_DEFLATED
SMALL = FileLimits(expanded=1000, ratio=2)  # of the samples of bombs


@dataclass(frozen=True)
class Rule:
    """One thing that may be wrong with a container."""

    code: str
    check: Callable[..., str]
    good: Callable[[], bytes]
    bad: Callable[[], bytes]
    limits: FileLimits = FileLimits()  # for its samples


ZIP_RULES = (
    Rule("zip.begin", check_begin, _good_zip, lambda: b"#!/bin/sh\n" + _good_zip()),
    Rule("zip.end", check_end, _good_zip, lambda: _good_zip() + b"tail"),
    Rule("zip.unique", check_unique, _good_zip, lambda: _twice(_good_zip())),
    Rule("zip.paths", check_paths, _good_zip, lambda: make_zip(("../a", b""))),
    Rule(
        "zip.ratio",
        check_ratio,
        _good_zip,
        lambda: make_zip(("a", bytes(1 << 16)), method=DEFLATED),
        SMALL,
    ),
    Rule(
        "zip.crc",
        check_sums,
        lambda: make_zip(ONE, method=DEFLATED),
        lambda: _good_zip().replace(b"xxx", b"xyx", 1),
    ),
)
NPZ_RULES = (
    Rule(
        "npz.arrays",
        check_arrays,
        lambda: make_zip(("a.npy", _npy())),
        lambda: make_zip(("a.npy", _npy() + b"more")),
    ),
)
DATA_RULES = {
    "npy": (Rule("npy.size", check_array, _npy, lambda: _npy() + b"more"),),
    "safetensors": (
        Rule(
            "safetensors.keys",
            check_keys,
            lambda: _safetensors(b'{"a":1,"b":1}'),
            lambda: _safetensors(b'{"a":1,"a":1}'),
        ),
    ),
}


def check_container(data: Data, kind: str, limits: FileLimits) -> None:
    """Hold a file of that format against its rules. Raises Refused for the first it breaks."""
    if kind in ("torch_zip", "npz"):
        archive = Zip(data, limits)
        if not archive.members:
            raise Refused("zip.empty", "", "holds nothing")
        for rule in ZIP_RULES + (NPZ_RULES if kind == "npz" else ()):
            _apply(rule, archive)
    for rule in DATA_RULES.get(kind, ()):
        _apply(rule, data, limits)


def _apply(rule: Rule, *given: Any) -> None:
    if wrong := rule.check(*given):
        raise Refused(rule.code, "", wrong)
