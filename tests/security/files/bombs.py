"""Small files that ask for much: memory, time, or depth.

The largest of them has a few megabytes, and is made in well under a second.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.security.files.archives import (
    Member,
    archive,
    arrays,
    entry,
    legacy,
    members,
    npy,
    safetensors,
    torch_zip,
)
from tests.security.files.opcodes import (
    call,
    get,
    mapping,
    name,
    put,
    storage,
    tensor,
    value,
    whole,
)
from tests.security.files.sample import Sample

MEGABYTE = 1 << 20
SCALARS = struct.pack("<16f", *range(16))
Bytes = Callable[[], bytes]
LAYOUT = call(name("torch.serialization", "_get_layout"), value("torch.sparse_coo"))


def _pickled(*pieces: bytes) -> Bytes:
    """An archive whose one storage, if any, is used: it is refused for nothing but its size."""
    used = any(b"_rebuild_tensor_v2" in piece for piece in pieces)
    return lambda: torch_zip(whole(*pieces), [SCALARS] if used else [])


def _encoded(times: int) -> bytes:
    """Each call doubles the text."""
    piece = call(name("_codecs", "encode"), value("a" * 16), value("latin1"))
    for _ in range(times):
        piece = call(name("_codecs", "encode"), piece, value("hex_codec"))
    return piece


def _bytes(times: int) -> bytes:
    """The same where each call takes what the last one gave, as bytes."""
    body = value(b"a" * 16)
    for _ in range(times):
        body = call(name("_codecs", "encode"), body, value("hex_codec"))
    return body


def _deep(depth: int, opener: bytes, closer: bytes) -> bytes:
    return opener * depth + closer * (depth - 1)


def _laughs(levels: int) -> bytes:
    """Lists of ten times the list before."""
    body = value("ha") + put(0)
    for level in range(levels):
        body = b"](" + body + get(level) * 9 + b"e" + put(level + 1)
    return body


def _itself() -> bytes:
    return b"]" + put(0) + get(0) + b"a"


def _dict_itself() -> bytes:
    return b"}" + put(0) + value("a") + get(0) + b"s"


def _sparse(index: int, size: int) -> Bytes:
    """A sparse tensor one of whose places is outside of it."""
    place = struct.pack("<q", index)
    indices = tensor("0", 1, (1, 1), (1, 1), kind="LongStorage")
    values = tensor("1", 1, (1,), (1,))
    body = call(
        name("torch._utils", "_rebuild_sparse_tensor"),
        LAYOUT,
        b"(" + indices + values + value((size,)) + value(False) + b"t",
    )
    return lambda: torch_zip(whole(mapping(w=body)), [place, struct.pack("<f", 1.0)])


def _stretched(*size: int) -> Bytes:
    return _pickled(mapping(w=tensor("0", 16, size, (0,) * len(size))))


def _overlapping() -> bytes:
    """Views that all look at the same numbers; together they are far more than the file."""
    views = [tensor("0", 65_536, (65_536 - i,), (1,), i) for i in range(1_000)]
    body = b"](" + b"".join(views) + b"e"
    return torch_zip(whole(body), [b"\0" * 262_144])


def _deflated(root: str = "archive") -> bytes:
    inner = members(whole(mapping(w=tensor("0", 16 * MEGABYTE, (16 * MEGABYTE,), (1,)))))
    more = Member(f"{root}/data/0", b"\0" * (64 * MEGABYTE), 8)
    return archive([*inner, more])


def _quine() -> bytes:
    """A member that says to be far larger than it is."""
    lies = {"size": 0xFFFFFFF0}
    return archive([*members(whole(value({}))), Member("archive/data/0", b"x" * 50, 8, lies, lies)])


def _header(text: bytes) -> Bytes:
    return lambda: safetensors(text)


def _many_tensors() -> bytes:
    """A header of a million empty tensors would be large; this one has sixty thousand."""
    return safetensors({f"{i}": entry([0], 0, 0) for i in range(60_000)})


def _copies() -> bytes:
    """Of one text, as many arrays as there is room for."""
    text = call(name("_codecs", "encode"), value("a" * MEGABYTE), value("latin1")) + put(0)
    copies = call(name("builtins", "bytearray"), get(0)) * 5_000
    return torch_zip(whole(b"](" + text + copies + b"e"))


BOMBS: dict[str, tuple[str, Bytes]] = {
    "stretched": ("model.pt", _stretched(1 << 40)),
    "stretched_modestly": ("model.pt", _stretched(64 * MEGABYTE)),
    "stretched_2d": ("model.pt", _stretched(1 << 20, 1 << 20)),
    "overlapping": ("model.pt", _overlapping),
    "hex": ("model.pt", _pickled(_encoded(24))),
    "hex_bytes": ("model.pt", _pickled(_bytes(24))),
    "bytearray": ("model.pt", _pickled(call(name("builtins", "bytearray"), value(1 << 33)))),
    "bytearray_many": (
        "model.pt",
        _pickled(*[call(name("builtins", "bytearray"), value(1 << 28))] * 12),
    ),
    "tensor_by_size": (
        "model.pt",
        _pickled(call(name("torch", "Tensor"), value(1 << 20), value(1 << 12))),
    ),
    "storage_by_size": ("model.pt", _pickled(call(name("torch", "FloatStorage"), value(1 << 31)))),
    "storage_claims": ("model.pt", _pickled(mapping(w=storage("0", 1 << 34)))),
    "deflated": ("model.pt", _deflated),
    "claims": ("model.pt", _quine),
    "members": (
        "model.pt",
        lambda: archive(
            [*members(whole(value({}))), *(Member(f"archive/data/{i}", b"") for i in range(30_000))]
        ),
    ),
    "lists": ("model.pt", _pickled(_deep(100_000, b"]", b"a"))),
    "tuples": ("model.pt", _pickled(b")" + b"\x85" * 100_000)),
    "dicts": ("model.pt", _pickled(b"}" + b"K\x00}" * 50_000 + b"s" * 50_000)),
    "marks": ("model.pt", _pickled(b"(" * 100_000 + b"t" * 100_000)),
    "laughs": ("model.pt", _pickled(_laughs(12))),
    "laughs_little": ("model.pt", _pickled(_laughs(8))),
    "itself": ("model.pt", _pickled(_itself())),
    "dict_itself": ("model.pt", _pickled(_dict_itself())),
    "text": ("model.pt", _pickled(value("x" * (20 << 20)))),
    "keys": ("model.pt", _pickled(mapping(**{"x" * (18 << 20): value(1)}))),
    "number": ("model.pt", _pickled(b"\x8b" + struct.pack("<i", 1 << 20) + b"\x7f" * (1 << 20))),
    "decimal": ("model.pt", _pickled(b"L" + b"9" * 1_000_000 + b"L\n")),
    "sparse": ("model.pt", _sparse(10**6, 2)),
    "sparse_far": ("model.pt", _sparse(2**40, 2)),
    "sparse_negative": ("model.pt", _sparse(-5, 2)),
    "sparse_wide": ("model.pt", _sparse(0, 2**40)),
    "legacy_storage": (
        "model.pth",
        lambda: (
            legacy(
                whole(mapping(w=tensor("0", 1 << 34, (4,), (1,)))),
                keys=whole(value(["0"])),
            )
            + struct.pack("<q", 1 << 34)
        ),
    ),
    "legacy_lists": ("model.pth", lambda: legacy(whole(_deep(100_000, b"]", b"a")))),
    "copies": ("model.pt", _copies),
    "header_deep": ("model.safetensors", _header(b'{"a":' + b"[" * 200_000)),
    "header_deep_dict": ("model.safetensors", _header(b'{"a":' * 100_000)),
    "header_number": (
        "model.safetensors",
        _header(b'{"a":{"dtype":"F32","shape":[' + b"9" * 100_000 + b'],"data_offsets":[0,0]}}'),
    ),
    "header_text": (
        "model.safetensors",
        _header(json.dumps({"__metadata__": {"a": "x" * (20 << 20)}}).encode()),
    ),
    "header_dimensions": (
        "model.safetensors",
        _header(json.dumps({"a": entry([1] * 100_000, 0, 0)}).encode()),
    ),
    "npy_claims": (
        "data.npy",
        lambda: npy({"descr": "<f8", "fortran_order": False, "shape": (1 << 40,)}, b"\0" * 64),
    ),
    "npy_record": (
        "data.npy",
        lambda: npy({"descr": "<U2000000000", "fortran_order": False, "shape": (1,)}, b"\0" * 64),
    ),
    "npy_empty_items": (
        "data.npy",
        lambda: npy({"descr": "|V0", "fortran_order": False, "shape": (1 << 50,)}),
    ),
    "npz_deflated": (
        "data.npz",
        lambda: archive(
            [
                Member(
                    "x.npy",
                    npy(
                        {"descr": "|u1", "fortran_order": False, "shape": (64 * MEGABYTE,)},
                        b"\0" * (64 * MEGABYTE),
                    ),
                    8,
                )
            ]
        ),
    ),
    "npz_members": (
        "data.npz",
        lambda: arrays(**{f"a{i}": b"" for i in range(30_000)}),
    ),
}


def _write(file: str, made: Bytes, folder: Path, marker: Path) -> Path:
    path = folder / file
    path.write_bytes(made())
    return path


def samples() -> list[Sample]:
    return [Sample(key, "bomb", partial(_write, file, made)) for key, (file, made) in BOMBS.items()]
