"""Containers written by hand: zips with any lie in them, torch's archives, safetensors, npy."""

from __future__ import annotations

import io
import json
import pickle
import struct
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

MAGIC = 0x1950A86A20F9469CFC6C  # of torch's files before 1.6, in a pickle of its own
SYSTEM = {
    "protocol_version": 1001,
    "little_endian": True,
    "type_sizes": {"short": 2, "int": 4, "long": 4},
}
LOCAL = "<4s5H3I2H"
CENTRAL = "<4s6H3I5H2I"
LOCAL_FIELDS = "magic version flags method time date crc packed size name_size extra_size".split()
CENTRAL_FIELDS = (
    "magic made version flags method time date crc packed size name_size extra_size "
    "comment_size disk internal external offset"
).split()


@dataclass(frozen=True)
class Member:
    """One entry of a zip; `local` and `central` hold the fields in which each header lies."""

    name: str
    data: bytes
    method: int = 0
    local: Mapping[str, Any] = field(default_factory=dict)  # incl. name=, extra=
    central: Mapping[str, Any] = field(default_factory=dict)  # incl. name=, extra=
    hidden: bool = False  # not in the directory


def _packed(member: Member) -> bytes:
    if member.method != 8:
        return member.data
    squeeze = zlib.compressobj(9, zlib.DEFLATED, -15)
    return squeeze.compress(member.data) + squeeze.flush()


def _header(
    member: Member, packed: bytes, lies: Mapping[str, Any], central: bool, at: int
) -> bytes:
    name = lies.get("name", member.name)
    name = name.encode() if isinstance(name, str) else name
    extra = lies.get("extra", b"")
    truth = {
        "magic": b"PK\x01\x02" if central else b"PK\x03\x04",
        "made": 20,
        "version": 20,
        "flags": 0,
        "method": member.method,
        "time": 0,
        "date": 33,
        "crc": zlib.crc32(member.data),
        "packed": len(packed),
        "size": len(member.data),
        "name_size": len(name),
        "extra_size": len(extra),
        "comment_size": 0,
        "disk": 0,
        "internal": 0,
        "external": 0,
        "offset": at,
    }
    truth |= {key: given for key, given in lies.items() if key not in ("name", "extra")}
    fields = [truth[key] for key in (CENTRAL_FIELDS if central else LOCAL_FIELDS)]
    return struct.pack(CENTRAL if central else LOCAL, *fields) + name + extra


def archive(
    members: Sequence[Member],
    before: bytes = b"",
    after: bytes = b"",
    comment: bytes = b"",
    end: Mapping[str, int] | None = None,
    shift: bool = True,
) -> bytes:
    """A zip; `end` holds the lies of its last record, `shift` whether offsets count `before`."""
    body, directory = bytearray(before), bytearray()
    for member in members:
        packed = _packed(member)
        at = len(body)
        body += _header(member, packed, member.local, False, at) + packed
        if not member.hidden:
            told = at if shift else at - len(before)
            directory += _header(member, packed, member.central, True, told)
    count = sum(not member.hidden for member in members)
    last = {
        "disk": 0,
        "first": 0,
        "here": count,
        "count": count,
        "size": len(directory),
        "offset": len(body) if shift else len(body) - len(before),
        "comment": len(comment),
    } | dict(end or {})
    return (
        bytes(body + directory)
        + b"PK\x05\x06"
        + struct.pack("<4H2IH", *last.values())
        + comment
        + after
    )


def members(
    pickled: bytes, storages: Sequence[bytes] = (), root: str = "archive", **more: bytes
) -> list[Member]:
    """The members of one of torch's archives."""
    found = [Member(f"{root}/data.pkl", pickled), Member(f"{root}/byteorder", b"little")]
    found += [Member(f"{root}/data/{i}", data) for i, data in enumerate(storages)]
    return [*found, Member(f"{root}/version", b"3\n")]


def torch_zip(pickled: bytes, storages: Sequence[bytes] = ()) -> bytes:
    """One of torch's archives, written by torch itself, with this pickle in it."""
    out = io.BytesIO()
    with torch.serialization._open_zipfile_writer_buffer(out) as writer:
        writer.write_record("data.pkl", pickled, len(pickled))
        writer.write_record("byteorder", b"little", 6)
        for i, data in enumerate(storages):
            writer.write_record(f"data/{i}", data, len(data))
    return out.getvalue()


def saved(content: Any, **options: Any) -> bytes:
    """What `torch.save` makes of it."""
    out = io.BytesIO()
    torch.save(content, out, **options)
    return out.getvalue()


def legacy(
    content: bytes,
    *,
    magic: bytes | None = None,
    version: bytes | None = None,
    system: bytes | None = None,
    keys: bytes | None = None,
    storages: Sequence[bytes] = (),
) -> bytes:
    """A file as torch wrote it before 1.6: five pickles in a row, then numbers."""
    dumps = [
        pickle.dumps(MAGIC, 2) if magic is None else magic,
        pickle.dumps(1001, 2) if version is None else version,
        pickle.dumps(SYSTEM, 2) if system is None else system,
        content,
        pickle.dumps([str(i) for i in range(len(storages))], 2) if keys is None else keys,
    ]
    numbers = [struct.pack("<q", len(data) // 4) + data for data in storages]
    return b"".join([*dumps, *numbers])


def tar(**parts: bytes) -> bytes:
    """A tar of these files."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as file:
        for name, data in parts.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return out.getvalue()


def safetensors(header: Any, data: bytes = b"", size: int | None = None) -> bytes:
    """A safetensors file; the header is text, or anything that JSON takes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def npy(header: str | dict[str, Any], data: bytes = b"", version: int = 1) -> bytes:
    """An npy file with this header."""
    text = (header if isinstance(header, str) else repr(header)).encode("latin1") + b"\n"
    size = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + size + text + data


def array(content: Any, **options: Any) -> bytes:
    """What `numpy.save` makes of it."""
    out = io.BytesIO()
    np.save(out, content, **options)
    return out.getvalue()


def arrays(**content: bytes) -> bytes:
    """An npz of these npy files."""
    return archive([Member(f"{name}.npy", data) for name, data in content.items()])
