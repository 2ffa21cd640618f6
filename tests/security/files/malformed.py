"""Files that are broken or do not keep to their format: cut short, bent, or with wrong sums."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save

from tests.security.files.archives import (
    Member,
    archive,
    array,
    arrays,
    entry,
    legacy,
    members,
    npy,
    safetensors,
    saved,
)
from tests.security.files.opcodes import call, mapping, name, put, tensor, value, whole
from tests.security.files.sample import Sample

NUMBERS = struct.pack("<4f", 1, 2, 3, 4)
ZEROS = b"\0" * 16
STATE = {"weight": torch.arange(4.0).reshape(2, 2), "step": 3}
CUTS = (0.0, 0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98, 0.999)
PLAIN = {"descr": "<f4", "fortran_order": False, "shape": (4,)}
Bytes = Callable[[], bytes]


def _zip() -> bytes:
    return saved(STATE)


def _old() -> bytes:
    return saved(STATE, _use_new_zipfile_serialization=False)


def _safe() -> bytes:
    return save({"weight": torch.arange(64.0), "bias": torch.arange(4)})


def _npy() -> bytes:
    return array(np.arange(50.0))


def _npz() -> bytes:
    out = io.BytesIO()
    np.savez(out, x=np.arange(50.0), y=np.arange(3))
    return out.getvalue()


FORMATS: dict[str, tuple[str, Bytes]] = {
    "zip": ("model.pt", _zip),
    "legacy": ("model.pth", _old),
    "safetensors": ("model.safetensors", _safe),
    "npy": ("data.npy", _npy),
    "npz": ("data.npz", _npz),
}


def cut(made: Bytes, share: float) -> bytes:
    """The first share of it, and never all."""
    data = made()
    return data[: min(int(len(data) * share), len(data) - 1)]


def flipped(data: bytes, where: bytes) -> bytes:
    """With one bit of the byte at the end of `where` turned."""
    at = data.index(where) + len(where) - 1
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def _pickled(*pieces: bytes) -> bytes:
    return archive(members(whole(*pieces), [NUMBERS]))


def _view(count: int, size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> Bytes:
    return lambda: _pickled(mapping(w=tensor("0", count, size, stride, offset)))


def _header(header: object, data: bytes = ZEROS, **options: int) -> Bytes:
    return lambda: safetensors(header, data, **options)


def _shape(header: dict[str, object] | str, data: bytes = NUMBERS, version: int = 1) -> Bytes:
    return lambda: npy(header, data, version)  # type: ignore[arg-type]


ZIPS: dict[str, Bytes] = {
    "storage_flipped": lambda: flipped(_zip(), struct.pack("<4f", 0, 1, 2, 3)),
    "pickle_flipped": lambda: flipped(_zip(), b"weight"),
    "no_pickle": lambda: archive(members(b"", [NUMBERS])[1:]),
    "empty_pickle": lambda: archive(members(b"", [NUMBERS])),
    "no_storage": lambda: archive(members(whole(mapping(w=tensor("0", 4, (4,), (1,)))))),
    "short_storage": lambda: archive(
        members(whole(mapping(w=tensor("0", 4, (4,), (1,)))), [NUMBERS[:8]])
    ),
    "long_storage": lambda: archive(
        members(whole(mapping(w=tensor("0", 4, (4,), (1,)))), [NUMBERS * 2])
    ),
    "other_root": lambda: archive(
        members(whole(mapping(w=tensor("../0", 4, (4,), (1,)))), [ZEROS])
    ),
    "unused_storage": lambda: archive(members(whole(value({})), [NUMBERS])),
    "two_kinds": lambda: _pickled(
        mapping(a=tensor("0", 4, (4,), (1,)), b=tensor("0", 2, (2,), (1,), kind="DoubleStorage"))
    ),
    "odd_byteorder": lambda: archive(
        [Member("a/data.pkl", whole(value({}))), Member("a/byteorder", b"middle"),
         Member("a/version", b"3\n")]
    ),
    "odd_version": lambda: archive(
        [Member("a/data.pkl", whole(value({}))), Member("a/version", b"99999\n")]
    ),
    "view_beyond": _view(4, (5,), (1,)),
    "view_offset": _view(4, (4,), (1,), 1),
    "view_stride": _view(4, (2, 2), (4, 1)),
    "view_negative_stride": _view(4, (4,), (-1,), 3),
    "view_negative_size": _view(4, (-4,), (1,)),
    "view_negative_offset": _view(4, (2,), (1,), -2),
    "view_ranks": _view(4, (2, 2), (1,)),
    "view_overflow": _view(4, (2**62, 4), (1, 1)),
    "count_negative": _view(-4, (0,), (1,)),
    "count_huge": _view(2**60, (4,), (1,)),
    "absent_memo": lambda: _pickled(b"h\x09"),
    "stack_underflow": lambda: _pickled(b"."),
    "append_to_dict": lambda: _pickled(b"}", value(1), b"a"),
    "setitem_on_list": lambda: _pickled(b"]", value(0), value(1), b"s"),
    "unhashable_key": lambda: _pickled(b"}", b"]", value(1), b"s"),
    "unknown_opcode": lambda: _pickled(b"\xf7"),
    "text_not_utf8": lambda: _pickled(b"X\x02\0\0\0\xff\xfe"),
    "text_beyond": lambda: _pickled(b"X\xff\xff\xff\x7fab"),
    "unbalanced_mark": lambda: _pickled(value(1), b"t"),
    "odd_items": lambda: _pickled(b"}", b"(", value(1), b"u"),
    "build_int": lambda: _pickled(value(1), b"}", b"b"),
    "odd_arguments": lambda: _pickled(call(name("torch._utils", "_rebuild_tensor_v2"), value(1))),
    "unknown_dtype": lambda: _pickled(mapping(k=name("torch", "float33"))),
    "odd_device": lambda: _pickled(mapping(k=call(name("torch", "device"), value("nowhere:1")))),
    "odd_size": lambda: _pickled(mapping(k=call(name("torch", "Size"), value(["a"])))),
    "put_only": lambda: _pickled(put(1)),
}  # fmt: skip

SAFETENSORS: dict[str, Bytes] = {
    "hole": _header({"a": entry([2], 0, 8), "b": entry([1], 12, 16)}),
    "hole_first": _header({"a": entry([2], 8, 16)}),
    "hole_last": _header({"a": entry([2], 0, 8)}),
    "overlap": _header({"a": entry([3], 0, 12), "b": entry([2], 8, 16)}),
    "same_place": _header({"a": entry([4], 0, 16), "b": entry([4], 0, 16)}),
    "duplicate": _header(
        b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},'
        b'"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
    ),
    "duplicate_other": _header(
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}'
    ),
    "duplicate_inner": _header(
        b'{"a":{"dtype":"F32","shape":[9],"shape":[4],"data_offsets":[0,16]}}'
    ),
    "duplicate_metadata": _header(
        b'{"__metadata__":{"a":"1","a":"2"},"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
    ),
    "reversed": _header({"a": entry([4], 16, 0)}),
    "negative_offset": _header({"a": entry([4], -16, 0)}),
    "beyond": _header({"a": entry([8], 0, 32)}),
    "short": _header({"a": entry([3], 0, 16)}),
    "negative_shape": _header({"a": entry([-2, -2], 0, 16)}),
    "overflow_shape": _header({"a": entry([2**62, 4], 0, 16)}),
    "float_shape": _header(
        b'{"a":{"dtype":"F32","shape":[4.0],"data_offsets":[0,16]}}'
    ),
    "bool_shape": _header(b'{"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}', b"\0" * 4),
    "unknown_dtype": _header({"a": entry([4], 0, 16, "F33")}),
    "no_dtype": _header({"a": {"shape": [4], "data_offsets": [0, 16]}}),
    "more_keys": _header({"a": {**entry([4], 0, 16), "code": "x"}}),
    "three_offsets": _header({"a": {**entry([4], 0, 16), "data_offsets": [0, 8, 16]}}),
    "metadata_numbers": _header({"__metadata__": {"a": 1}, "a": entry([4], 0, 16)}),
    "metadata_list": _header({"__metadata__": [], "a": entry([4], 0, 16)}),
    "list": _header([]),
    "text": _header("hello"),
    "null": _header(b"null"),
    "no_json": _header(b"{" + b"x" * 30),
    "nan": _header(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,16]}}'),
    "not_utf8": _header(b'{"\xff\xfe":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'),
    "space_first": _header(b' {"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'),
    "header_huge": _header({"a": entry([4], 0, 16)}, size=2**62),
    "header_100_mb": _header({"a": entry([4], 0, 16)}, size=100_000_001),
    "header_beyond": _header({"a": entry([4], 0, 16)}, size=4_000),
    "header_empty": _header(b"", b""),
    "header_short": _header({"a": entry([4], 0, 16)}, size=20),
    "trailing": _header({"a": entry([4], 0, 16)}, ZEROS + b"#!/bin/sh\n"),
}  # fmt: skip

OTHERS: dict[str, tuple[str, Bytes]] = {
    "empty": ("model.pt", lambda: b""),
    "zeros": ("model.pt", lambda: b"\0" * 1000),
    "noise": ("model.pt", lambda: bytes((i * 167 + 13) % 256 for i in range(3000))),
    "text": ("model.pt", lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
    "html": ("model.safetensors", lambda: b"<!DOCTYPE html><html>404</html>"),
    "magic_only": ("model.pt", lambda: b"PK\x03\x04"),
    "empty_zip": ("model.pt", lambda: archive([])),
    "npy_magic": ("data.npy", lambda: b"\x93NUMPX" + _npy()[6:]),
    "npy_version": ("data.npy", lambda: _npy()[:6] + b"\x09\x00" + _npy()[8:]),
    "npy_short": ("data.npy", _shape({**PLAIN, "shape": (5,)})),
    "npy_long": ("data.npy", _shape({**PLAIN, "shape": (3,)})),
    "npy_negative": ("data.npy", _shape({**PLAIN, "shape": (-4,)})),
    "npy_overflow": ("data.npy", _shape({**PLAIN, "shape": (2**62, 8)})),
    "npy_no_dict": ("data.npy", _shape("[1, 2, 3]")),
    "npy_more_keys": ("data.npy", _shape({**PLAIN, "x": 1})),
    "npy_odd_type": ("data.npy", _shape({**PLAIN, "descr": "<f3"})),
    "npy_header": ("data.npy", lambda: b"\x93NUMPY\x02\x00\xff\xff\xff\x7f{"),
    "npy_deep": ("data.npy", _shape("(" * 5_000 + ")" * 5_000)),
    "npz_flipped": ("data.npz", lambda: flipped(_npz(), struct.pack("<d", 7.0))),
    "npz_text": ("data.npz", lambda: arrays(x=b"hello")),
    "npz_duplicate": ("data.npz", lambda: archive([Member("x.npy", _npy())] * 2)),
    "npz_two_in_one": ("data.npz", lambda: arrays(**{"x": _npy(), "x.npy": _npy()})),
    "npz_parent": ("data.npz", lambda: archive([Member("../x.npy", _npy())])),
    "pt_is_safetensors": ("model.pt", _safe),
    "npz_is_pt": ("data.npz", _zip),
    "safetensors_is_pt": ("model.safetensors", _zip),
    "safetensors_is_npy": ("model.safetensors", _npy),
    "npy_is_npz": ("data.npy", _npz),
    "legacy_magic": ("model.pth", lambda: legacy(whole(value({})), magic=whole(value(5)))),
    "legacy_version": ("model.pth", lambda: legacy(whole(value({})), version=whole(value(5)))),
    "legacy_keys": ("model.pth", lambda: legacy(whole(value({})), keys=whole(value(["0", "1"])))),
    "legacy_trailing": ("model.pth", lambda: _old() + b"x" * 64),
    "legacy_count": ("model.pth", lambda: flipped(_old(), struct.pack("<q", 4))),
}


def _write(file: str, made: Bytes, folder: Path, marker: Path) -> Path:
    path = folder / file
    path.write_bytes(made())
    return path


def samples() -> list[Sample]:
    found = [
        Sample(f"{key}_{share}", "cut", partial(_write, file, partial(cut, made, share)))
        for key, (file, made) in FORMATS.items()
        for share in CUTS
    ]
    for family, table in (("zip", ZIPS), ("safetensors", SAFETENSORS)):
        file = FORMATS[family][0]
        found += [
            Sample(key, f"bad_{family}", partial(_write, file, made)) for key, made in table.items()
        ]
    found += [
        Sample(key, "bad", partial(_write, file, made)) for key, (file, made) in OTHERS.items()
    ]
    return found
