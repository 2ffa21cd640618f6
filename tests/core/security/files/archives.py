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


@dataclass(frozen=True)
class Member:
    """One entry of a zip; `local` and `central` hold the fields in which each header lies."""

    name: str
    data: bytes
    method: int = 0
    local: dict[str, Any] = field(default_factory=dict)
    central: dict[str, Any] = field(default_factory=dict)
    hidden: bool = False  # not in the directory

    def packed(self) -> bytes:
        """Its bytes in the archive."""
        if self.method != 8:
            return self.data
        squeeze = zlib.compressobj(9, zlib.DEFLATED, -15)
        return squeeze.compress(self.data) + squeeze.flush()


def _header(member: Member, central: bool, at: int) -> bytes:
    name, size = member.name.encode(), len(member.data)
    fields = {"version": 20, "flags": 0, "method": member.method, "time": 0, "date": 33}
    fields |= {"crc": zlib.crc32(member.data), "packed": len(member.packed()), "size": size}
    fields |= {"name_size": len(name), "extra_size": 0}
    if not central:
        return b"PK\x03\x04" + struct.pack("<5H3I2H", *(fields | member.local).values()) + name
    fields |= {"comment": 0, "disk": 0, "internal": 0, "external": 0, "offset": at}
    values = (fields | member.central).values()
    return b"PK\x01\x02" + struct.pack("<H5H3I5H2I", 20, *values) + name


def archive(
    members: Sequence[Member],
    before: bytes = b"",
    after: bytes = b"",
    end: Mapping[str, int] | None = None,
) -> bytes:
    """A zip between other bytes; `end` holds the lies of its last record."""
    body, directory = bytearray(before), bytearray()
    for member in members:
        directory += b"" if member.hidden else _header(member, True, len(body))
        body += _header(member, False, 0) + member.packed()
    count = sum(not member.hidden for member in members)
    last = {"disk": 0, "first": 0, "here": count, "count": count, "size": len(directory)}
    last |= {"offset": len(body), "comment": 0, **(end or {})}
    return bytes(body + directory) + b"PK\x05\x06" + struct.pack("<4H2IH", *last.values()) + after


def members(pickled: bytes, storages: Sequence[bytes] = ()) -> list[Member]:
    """The members of one of torch's archives."""
    made = [Member("archive/data.pkl", pickled), Member("archive/byteorder", b"little")]
    made += [Member(f"archive/data/{i}", data) for i, data in enumerate(storages)]
    return [*made, Member("archive/version", b"3\n")]


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
    """The bytes that `torch.save` makes of it."""
    out = io.BytesIO()
    torch.save(content, out, **options)
    return out.getvalue()


def legacy(content: bytes, **parts: bytes) -> bytes:
    """A file as torch wrote it before 1.6: five pickles in a row, some of them replaced."""
    dumps = {"magic": MAGIC, "version": 1001, "system": SYSTEM}
    made = {key: pickle.dumps(plain, 2) for key, plain in dumps.items()}
    made |= {"content": content, "keys": pickle.dumps([], 2)}
    return b"".join((made | parts).values())


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


def npy(header: str | dict[str, Any], data: bytes = b"") -> bytes:
    """An npy file with this header."""
    text = (header if isinstance(header, str) else repr(header)).encode("latin1") + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def array(content: Any) -> bytes:
    """The bytes that `numpy.save` makes of it."""
    out = io.BytesIO()
    np.save(out, content)
    return out.getvalue()


def arrays(**content: bytes) -> bytes:
    """An npz of these npy files."""
    return archive([Member(f"{name}.npy", data) for name, data in content.items()])
