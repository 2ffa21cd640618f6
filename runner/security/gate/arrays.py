"""numpy's files: a header of three known keys, a plain type, and bytes that fit it exactly."""

from __future__ import annotations

import ast
import re
from typing import Any

import numpy as np

from runner.security.gate.archive import DEFLATED, STORED, inflate, read_archive
from runner.security.gate.format import Buffer
from runner.security.gate.policy import Bounds, Whose
from runner.security.gate.program import Peekable
from runner.security.gate.refused import Refused

MAGIC = b"\x93NUMPY"
LONGEST = 10_000  # characters of a header, as numpy has it
TYPE = re.compile(r"[<>|=](?:[biufcSUV])([0-9]{1,9})|[<>|=][mM](8)(?:\[[A-Za-z0-9]{1,16}\])?")
OBJECTS = re.compile(r"[<>|=]?O[0-9]*")
MOST = 1 << 62


def check_npy(data: Buffer, bounds: Bounds, whose: Whose, where: str = "") -> None:
    """Raises Refused, for an array of objects too."""
    kind, size, begin = check_header(data, where)
    if kind[1] == "b" and size and np.frombuffer(data, np.uint8, size, begin).max() > 1:
        raise Refused(
            "npy.bool", where, "has truth values other than 0 and 1, which are read in two ways",
            "save it with array.astype(np.uint8).astype(bool)",
        )  # fmt: skip


def check_header(data: Peekable, where: str = "") -> tuple[str, int, int]:
    """Its type, the bytes that its values take, which there are, and where they begin.

    Raises as `check_npy`.
    """
    header, begin = _header(data, where)
    shape, kind = header["shape"], header["descr"]
    if type(kind) is not str or not (match := TYPE.fullmatch(kind)):
        if type(kind) is str and not OBJECTS.fullmatch(kind):
            raise Refused("npy.dtype", where, f"is of the unknown type {kind!r}", "")
        if "O" not in str(kind):
            raise Refused(
                "npy.dtype", where, f"has columns of several types: {kind!r}",
                "save each column as an array of its own",
            )  # fmt: skip
        raise Refused(
            "npy.object", where, f"holds objects ({kind}), which are a pickle",
            "save numbers or text: array.astype(float), array.astype(str)",
        )  # fmt: skip
    if (
        type(shape) is not tuple or type(header["fortran_order"]) is not bool or len(shape) > 64
        or any(type(n) is not int or not 0 <= n < MOST for n in shape)
    ):  # fmt: skip
        raise Refused("npy.header", where, f"has a shape or an order that is none: {shape!r}")
    item = int(match[1] or match[2]) * (4 if kind[1] == "U" else 1)
    size, largest = item, max(item, 1)
    for n in shape:
        size, largest = size * n, largest * max(n, 1)
    if largest >= MOST or item == 0 and shape.count(0) == 0 and largest > 1:
        raise Refused("npy.size", where, f"of {kind} and shape {shape} is no array that could be")
    if size != len(data) - begin:
        raise Refused(
            "npy.size", where,
            f"of {kind} and shape {shape} takes {size:,} bytes, not {len(data) - begin:,}",
        )  # fmt: skip
    return kind, size, begin


def check_npz(data: Buffer, bounds: Bounds, whose: Whose) -> None:
    """Raises Refused."""
    members = read_archive(data, bounds, (STORED, DEFLATED))
    total = sum(member.size for member in members)
    if total > bounds.may_inflate(len(data)):
        raise Refused(
            "zip.ratio", "", f"says that its {len(data):,} bytes become {total:,}",
            "save it with np.savez, which does not compress",
        )  # fmt: skip
    names = {member.name for member in members}
    for member in members:
        short = member.name.removesuffix(".npy")
        if short == member.name:
            raise Refused("npz.member", member.name, "is no array")
        if short in names:
            raise Refused(
                "npz.name", member.name, f"is called as {short} is, and numpy reads only that one",
                "give its arrays names that do not end in .npy",
            )  # fmt: skip
    for member in members:
        check_npy(inflate(data, member), bounds, whose, member.name)


def _header(data: Peekable, where: str) -> tuple[dict[str, Any], int]:
    """The three things that it says, and where the values begin."""
    version = bytes(data[6:8])
    if bytes(data[:6]) != MAGIC or version not in (b"\x01\x00", b"\x02\x00", b"\x03\x00"):
        raise Refused("npy.header", where, "is no array of numpy's")
    width = 2 if version[0] == 1 else 4
    begin = 8 + width
    length = int.from_bytes(data[8:begin], "little")
    if length > LONGEST or begin + length > len(data):
        raise Refused("npy.header", where, f"says that its header has {length:,} characters")
    try:
        text = bytes(data[begin : begin + length]).decode("utf-8" if version[0] == 3 else "latin1")
        header = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise Refused("npy.header", where, "is no table of numpy's") from None
    if type(header) is not dict or set(header) != {"descr", "fortran_order", "shape"}:
        raise Refused("npy.header", where, "has other than descr, fortran_order and shape")
    return header, begin + length
