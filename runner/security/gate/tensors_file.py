"""A safetensors file: a table in JSON, and the tensors' bytes one after the other."""

from __future__ import annotations

import json
from typing import Any

from runner.security.gate.policy import Bounds, Whose
from runner.security.gate.program import Peekable
from runner.security.gate.refused import Refused, repeated, shown

SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "U16": 2, "I16": 2,
    "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
MOST = 1 << 62


def check(data: Peekable, bounds: Bounds, whose: Whose = Whose.FOREIGN) -> None:
    """Raises Refused."""
    table, begin = _header(data, bounds)
    metadata = table.pop("__metadata__", {})
    if type(metadata) is not dict or any(type(text) is not str for text in metadata.values()):
        raise Refused("safetensors.metadata", "__metadata__", "is not text by name")
    text = sum(map(len, table)) + sum(len(a) + len(b) for a, b in metadata.items())
    if text > bounds.text:
        raise Refused("safetensors.text", "", f"has {text:,} characters")
    spans = sorted((_span(name, row), name) for name, row in table.items())
    at, total = 0, len(data) - begin
    for (start, end), name in spans:
        if start != at:
            what = "overlaps the one before it" if start < at else "leaves a hole before it"
            raise Refused("safetensors.overlap" if start < at else "safetensors.hole", name, what)
        at = end
    if at != total:
        raise Refused(
            "safetensors.size", f"at {begin + min(at, total)}",
            f"the tensors take {at:,} bytes, and there are {total:,}",
        )  # fmt: skip


def metadata(data: Peekable, bounds: Bounds) -> dict[str, str]:
    """What a checked file says of itself."""
    found: dict[str, str] = _header(data, bounds)[0].get("__metadata__", {})
    return found


def _header(data: Peekable, bounds: Bounds) -> tuple[dict[str, Any], int]:
    """The table, and where the bytes of the tensors begin."""
    length = int.from_bytes(data[:8], "little")
    if length > bounds.header or 8 + length > len(data):
        raise Refused("safetensors.header", "at 0", f"says that it has {length:,} bytes")
    raw = bytes(data[8 : 8 + length])
    # each is a table of its own, beside the whole and the metadata: too many are seen before
    # any of them takes memory
    if raw.count(b"{") > bounds.tensors + 2:
        raise Refused(
            "safetensors.tensors", "at 8",
            f"describes more than {bounds.tensors:,} tensors, which is no model's",
            "put what belongs together into one tensor, or into several files",
        )  # fmt: skip
    try:
        text = raw.decode()
        table = json.loads(text.rstrip(" "), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        gist = str(error).partition("\n")[0]
        raise Refused("safetensors.header", "at 8", f"is no table: {gist}") from None
    if type(table) is not dict:
        raise Refused("safetensors.header", "at 8", "is no table")
    return table, 8 + length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = repeated([name for name, _ in pairs])
        raise Refused(
            "safetensors.duplicate", twice, "is there twice, and readers differ in which they take"
        )
    return found


def _span(name: str, row: Any) -> tuple[int, int]:
    """Where a tensor's bytes begin and end, once type, shape and length agree."""
    if type(row) is not dict or set(row) != {"dtype", "shape", "data_offsets"}:
        raise Refused("safetensors.header", name, "has other than dtype, shape and data_offsets")
    dtype, shape, offsets = row["dtype"], row["shape"], row["data_offsets"]
    if type(dtype) is not str or dtype not in SIZES:
        raise Refused("safetensors.dtype", name, f"is of the unknown type {shown(dtype, 20)}", "")
    if not _counts(shape, 64) or not _counts(offsets, 2) or len(offsets) != 2:
        raise Refused("safetensors.header", name, "has a shape or offsets that are no sizes")
    count = SIZES[dtype]
    for n in shape:
        count *= n
    if offsets[1] - offsets[0] != count:
        raise Refused(
            "safetensors.size", name,
            f"of {dtype} and shape {shape} takes {count:,} bytes, not {offsets[1] - offsets[0]:,}",
        )  # fmt: skip
    return offsets[0], offsets[1]


def _counts(values: Any, most: int) -> bool:
    if type(values) is not list or len(values) > most:
        return False
    return all(type(n) is int and 0 <= n < MOST for n in values)
