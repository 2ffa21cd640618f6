"""Hostile files by their container: zips that are read in two ways, and files that are two things.

With `HOSTILE` in them they run in a careless reader; with `GOOD` alone they hold nothing bad and
are refused for their structure: two programs would read two different files.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.security.files.archives import (
    Member,
    archive,
    legacy,
    members,
    safetensors,
    torch_zip,
)
from tests.security.files.hostile_calls import mkdir
from tests.security.files.opcodes import mapping, tensor, whole
from tests.security.files.sample import PICKLE, TORCH, Sample

NUMBERS = struct.pack("<4f", 1, 2, 3, 4)
GOOD = whole(mapping(weight=tensor("0", 4, (2, 2), (2, 1))))
SYMLINK = 0o120777 << 16
Made = Callable[[bytes], bytes]  # from the hostile pickle


def good() -> list[Member]:
    """The members of an archive in which nothing is wrong."""
    return members(GOOD, [NUMBERS])


def _changed(place: str, **lies: object) -> bytes:
    """The good archive, whose data.pkl lies in its local or its central header."""
    first, *rest = good()
    return archive([Member(first.name, first.data, **{place: lies}), *rest])  # type: ignore[arg-type]


def _hidden(hostile: bytes) -> bytes:
    return archive([*good(), Member("archive/data.pkl", hostile, hidden=True)])


def _same_place(_: bytes) -> bytes:
    """Two names for one member's bytes."""
    return archive([*good(), Member("archive/data/1", NUMBERS, at=_offset("archive/data/0"))])


def _offset(name: str) -> int:
    data = archive(good())
    return data.index(b"PK\x03\x04", data.index(name.encode()) - 30)


def _within(hostile: bytes) -> bytes:
    """A member that lies within another one's bytes."""
    inner = archive([Member("archive/data.pkl", hostile)])
    first, *rest = good()
    outer = Member("archive/data/9", inner)
    start = 30 + len(outer.name)
    return archive([outer, Member("archive/data.pkl", hostile, at=start), *rest])


def _zip64_end(_: bytes) -> bytes:
    """A 64-bit end record that points to another directory."""
    data = archive(good())
    at = data.rindex(b"PK\x05\x06")
    end = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, 1, 1, 46, 0)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, at, 1)
    return data[:at] + end + locator + data[at:]


def _comment(hostile: bytes) -> bytes:
    """The comment is an archive of its own, with an end record of its own."""
    return archive(good(), comment=archive(members(hostile)))


def _two_ends(hostile: bytes) -> bytes:
    return archive(good()) + archive(members(hostile))


def _legacy_first(hostile: bytes) -> bytes:
    """Torch reads the beginning, and what looks at zips reads the end."""
    return legacy(hostile) + archive(good())


def _shell(hostile: bytes) -> bytes:
    """An archive behind a script, as self-extracting ones are."""
    return archive(members(hostile), before=b"#!/bin/sh\n:\n")


def _safetensors_first(hostile: bytes) -> bytes:
    """Both a safetensors file and a zip."""
    zipped = archive(members(hostile))
    header = {"a": {"dtype": "U8", "shape": [len(zipped)], "data_offsets": [0, len(zipped)]}}
    return safetensors(header, zipped)


def _extra_member(name: str, data: bytes = b"x = 1\n", **central: object) -> Made:
    return lambda _: archive([*good(), Member(name, data, central=central)])


def _second_root(hostile: bytes) -> bytes:
    return archive([*good(), *members(hostile, root="other")])


def _named(name: str) -> Made:
    """The hostile pickle is there under another name, beside a good one."""
    return lambda hostile: archive([*good(), Member(name, hostile)])


# What a careless torch runs at once.
LIVE: dict[str, Made] = {
    "plain": lambda h: archive(members(h)),
    "deflated": lambda h: archive([Member("a/data.pkl", h, 8), Member("a/version", b"3\n")]),
    "duplicate_first": lambda h: archive([Member("archive/data.pkl", h), *good()]),
    "local_crc": lambda h: archive(
        [Member("a/data.pkl", h, local={"crc": 0}), Member("a/version", b"3\n")]
    ),
    "version_needed": lambda h: archive(
        [Member("a/data.pkl", h, central={"version": 63}), Member("a/version", b"3\n")]
    ),
    "legacy_first": _legacy_first,
}

DEAD: dict[str, Made] = {
    "no_version": lambda h: archive(members(h)[:-1] + [Member("archive/.x", b"")]),
    "deep_root": lambda h: archive(members(h, root="a/b/c")),
    "duplicate_last": lambda h: archive([*good(), Member("archive/data.pkl", h)]),
    "duplicate_case": _named("archive/DATA.PKL"),
    "duplicate_good": lambda _: archive([*good(), good()[0]]),
    "duplicate_storage": lambda _: archive([*good(), good()[2]]),
    "second_pickle": _named("archive/extra.pkl"),
    "backslash": _named("archive\\data.pkl"),
    "parent": _named("archive/../../data.pkl"),
    "absolute": _named("/tmp/data.pkl"),  # noqa: S108
    "drive": _named("C:/data.pkl"),
    "nul_in_name": _named("archive/data.pkl\0.txt"),
    "escape_in_name": _named("archive/\x1b[2Jdata.pkl"),
    "empty_name": _named(""),
    "second_root": _second_root,
    "hidden": _hidden,
    "gap": lambda h: archive([Member(m.name, m.data, before=h) for m in good()]),
    "same_place": _same_place,
    "within": _within,
    "before": lambda h: archive(good(), before=h),
    "before_unshifted": lambda h: archive(good(), before=h, shift=False),
    "after": lambda h: archive(good(), after=h),
    "comment": lambda _: archive(good(), comment=b"hello"),
    "comment_archive": _comment,
    "two_archives": _two_ends,
    "script_first": _shell,
    "safetensors_first": _safetensors_first,
    "local_name": lambda _: _changed("local", name="archive/xxxx.pkl"),
    "central_name": lambda _: _changed("central", name="archive/xxxx.pkl"),
    "local_size": lambda _: _changed("local", size=7, packed=7),
    "central_size": lambda _: _changed("central", size=7, packed=7),
    "central_crc": lambda _: _changed("central", crc=1),
    "local_method": lambda _: _changed("local", method=8),
    "central_method": lambda _: _changed("central", method=8),
    "unknown_method": lambda _: _changed("central", method=99),
    "encrypted_local": lambda _: _changed("local", flags=1),
    "encrypted_central": lambda _: _changed("central", flags=1),
    "descriptor": lambda _: _changed("local", flags=8),
    "masked": lambda _: _changed("central", flags=1 << 13),
    "zip64_end": _zip64_end,
    "end_disk": lambda _: archive(good(), end={"disk": 1}),
    "end_count": lambda _: archive(good(), end={"here": 2, "count": 2}),
    "end_size": lambda _: archive(good(), end={"size": 10}),
    "end_offset": lambda _: archive(good(), end={"offset": 4}),
    "central_offset": lambda _: _changed("central", offset=3),
    "magic_local": lambda _: _changed("local", magic=b"PK\x07\x08"),
    "symlink": _extra_member("archive/data/1", b"/etc/passwd", external=SYMLINK),
    "folder_with_data": _extra_member("archive/data/"),
    "hidden_file": _extra_member("archive/.hidden"),
    "byteorder_twice": _extra_member("archive/byteorder", b"big"),
}  # fmt: skip

INERT = ("second_pickle", "hidden", "hidden_file", "safetensors_first")


def _write(made: Made, file: str, folder: Path, marker: Path) -> Path:
    path = folder / file
    path.write_bytes(made(whole(mkdir(str(marker)))))
    return path


def _named_zip(hostile: bytes) -> bytes:
    return torch_zip(hostile)


def samples() -> list[Sample]:
    found = [Sample(k, "zip", partial(_write, made, "model.pt"), TORCH) for k, made in LIVE.items()]
    found += [
        Sample(k, "zip", partial(_write, made, "model.pt"), inert=k in INERT)
        for k, made in DEAD.items()
    ]
    for file in ("model.pkl", "model.bin", "model", "model.npz", "model.ckpt"):
        found.append(Sample(file, "named", partial(_write, _named_zip, file), TORCH))
    found.append(
        Sample("model.safetensors", "named", partial(_write, _named_zip, "model.safetensors"))
    )
    raw: Made = lambda h: h + archive(good())  # noqa: E731
    found.append(Sample("pickle_and_zip", "polyglot", partial(_write, raw, "model.pkl"), PICKLE))
    return found
