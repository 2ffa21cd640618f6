"""Small files that ask for much: memory, time, or depth; each is made in well under a second."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.security.files.archives import (
    Member,
    archive,
    arrays,
    legacy,
    members,
    npy,
    safetensors,
    torch_zip,
)
from tests.security.files.opcodes import (
    call,
    get,
    listing,
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


def _pickled(*pieces: bytes) -> Bytes:
    used = any(b"_rebuild_tensor_v2" in piece for piece in pieces)
    return lambda: torch_zip(whole(*pieces), [SCALARS] if used else [])


def _encoded(times: int) -> bytes:
    """Each call doubles the text."""
    piece = call(name("_codecs", "encode"), value("a" * 16), value("latin1"))
    for _ in range(times):
        piece = call(name("_codecs", "encode"), piece, value("hex_codec"))
    return piece


def _tree(depth: int) -> bytes:
    """A tuple of the same tuple twice, and so on: hashing it takes 2 ** depth steps."""
    body = value(("a",)) + put(0)
    for level in range(depth):
        body = b"(" + body + get(level) + b"t" + put(level + 1)
    return body


def _collisions(count: int) -> bytes:
    """Keys of a dict that all have one hash."""
    keys = (i * (2**61 - 1) for i in range(1, count + 1))
    return b"}(" + b"".join(value(key) + b"N" for key in keys) + b"u"


def _sparse(index: int, size: int) -> Bytes:
    """A sparse tensor one of whose places is outside of it."""
    layout = call(name("torch.serialization", "_get_layout"), value("torch.sparse_coo"))
    parts = tensor("0", 1, (1, 1), (1, 1), kind="LongStorage") + tensor("1", 1, (1,), (1,))
    body = call(
        name("torch._utils", "_rebuild_sparse_tensor"),
        layout,
        b"(" + parts + value((size,)) + value(False) + b"t",
    )
    numbers = [struct.pack("<q", index), struct.pack("<f", 1.0)]
    return lambda: torch_zip(whole(mapping(w=body)), numbers)


def _deflated(size: int) -> bytes:
    """Zeros; it says that it has `size` of them."""
    inner = members(whole(mapping(w=tensor("0", size // 4, (size // 4,), (1,)))))
    lies = {"size": size}
    return archive([*inner, Member("archive/data/0", bytes(MEGABYTE), 8, lies, lies)])


def _copies() -> bytes:
    """Of one text, as many arrays as there is room for."""
    text = call(name("_codecs", "encode"), value("a" * MEGABYTE), value("latin1")) + put(0)
    copies = call(name("builtins", "bytearray"), get(0)) * 5_000
    return torch_zip(whole(b"](" + text + copies + b"e"))


def _shape(descr: str, *shape: int) -> dict[str, object]:
    return {"descr": descr, "fortran_order": False, "shape": shape}


BOMBS: dict[str, tuple[str, Bytes]] = {
    "stretched": ("model.pt", _pickled(mapping(w=tensor("0", 16, (1 << 40,), (0,))))),
    "hex": ("model.pt", _pickled(_encoded(40))),
    "bytearray": ("model.pt", _pickled(call(name("builtins", "bytearray"), value(1 << 33)))),
    "copies": ("model.pt", _copies),
    "tensor_by_size": (
        "model.pt",
        _pickled(call(name("torch", "Tensor"), value(1 << 20), value(1 << 12))),
    ),
    "storage_claims": ("model.pt", _pickled(mapping(w=storage("0", 1 << 34)))),
    "deflated": ("model.pt", lambda: _deflated(2 << 30)),
    "deflated_less": ("model.pt", lambda: _deflated(64 * MEGABYTE)),
    "lists": ("model.pt", _pickled(b"]" * 100_000 + b"a" * 99_999)),
    "tuples": ("model.pt", _pickled(b")" + b"\x85" * 100_000)),
    "dicts": ("model.pt", _pickled(b"}" + b"K\x00}" * 100_000 + b"s" * 100_000)),
    "itself": ("model.pt", _pickled(b"]" + put(0) + get(0) + b"a")),
    "sparse_far": ("model.pt", _sparse(2**40, 2)),
    "sparse_negative": ("model.pt", _sparse(-5, 2)),
    "legacy_lists": ("model.pth", lambda: legacy(whole(b"]" * 100_000 + b"a" * 99_999))),
    "hashed_tree": ("model.pt", _pickled(b"}", _tree(60), value(1), b"s")),
    "hashed_tree_in_set": ("model.pt", _pickled(call(name("builtins", "set"), listing(_tree(60))))),
    "collisions": ("model.pt", _pickled(_collisions(60_000))),
    "header_deep": ("model.safetensors", lambda: safetensors(b'{"a":' + b"[" * 200_000)),
    "header_size": ("model.safetensors", lambda: safetensors({"a": 1}, size=2**62)),
    "npy_claims": ("data.npy", lambda: npy(_shape("<f8", 1 << 40), b"\0" * 64)),
    "npy_record": ("data.npy", lambda: npy(_shape("<U2000000000", 1), b"\0" * 64)),
    "npz_claims": ("data.npz", lambda: arrays(x=npy(_shape("|u1", 1 << 40), b"\0" * 64))),
}


def _write(file: str, made: Bytes, folder: Path, marker: Path) -> Path:
    path = folder / file
    path.write_bytes(made())
    return path


def samples() -> list[Sample]:
    return [Sample(key, "bomb", partial(_write, file, made)) for key, (file, made) in BOMBS.items()]
