"""Hostile files by their container: zips that are read in two ways, and files that are two things.

With the hostile pickle they run in a careless reader; the good archive alone holds nothing bad, and
is refused for its structure: two programs would read two different files.
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
Made = Callable[[bytes], bytes]  # from the hostile pickle


def good() -> list[Member]:
    """The members of an archive in which nothing is wrong."""
    return members(GOOD, [NUMBERS])


def _lying(**lies: object) -> Made:
    """The good archive, whose directory lies about data.pkl."""
    first, *rest = good()
    return lambda _: archive([Member(first.name, first.data, central=lies), *rest])


def _named(name: str) -> Made:
    """The hostile pickle is there under another name, beside a good one."""
    return lambda hostile: archive([*good(), Member(name, hostile)])


def _safetensors_first(hostile: bytes) -> bytes:
    """Both a safetensors file and a zip."""
    zipped = archive(members(hostile))
    header = {"a": {"dtype": "U8", "shape": [len(zipped)], "data_offsets": [0, len(zipped)]}}
    return safetensors(header, zipped)


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
    "legacy_first": lambda h: legacy(h) + archive(good()),
}
DEAD: dict[str, Made] = {
    "duplicate_last": lambda h: archive([*good(), Member("archive/data.pkl", h)]),
    "duplicate_case": _named("archive/DATA.PKL"),
    "duplicate_storage": lambda _: archive([*good(), good()[2]]),
    "backslash": _named("archive\\data.pkl"),
    "parent": _named("archive/../../data.pkl"),
    "absolute": _named("/tmp/data.pkl"),  # noqa: S108
    "drive": _named("C:/data.pkl"),
    "nul_in_name": _named("archive/data.pkl\0.txt"),
    "escape_in_name": _named("archive/\x1b[2Jdata.pkl"),
    "empty_name": _named(""),
    "folder_with_data": _named("archive/data/"),
    "crc": _lying(crc=1),
    "size": _lying(size=7, packed=7),
    "method": _lying(method=8),
    "unknown_method": _lying(method=99),
    "offset": _lying(offset=3),
    "end_count": lambda _: archive(good(), end={"here": 2, "count": 2}),
    "end_offset": lambda _: archive(good(), end={"offset": 4}),
}
INERT: dict[str, Made] = {
    "before": lambda h: archive(good(), before=h),
    "before_unshifted": lambda h: archive(good(), before=h, shift=False),
    "script_first": lambda h: archive(members(h), before=b"#!/bin/sh\n:\n"),
    "after": lambda h: archive(good(), after=h),
    "comment": lambda _: archive(good(), comment=b"hello"),
    "comment_archive": lambda h: archive(good(), comment=archive(members(h))),
    "two_archives": lambda h: archive(good()) + archive(members(h)),
    "second_pickle": _named("archive/extra.pkl"),
    "hidden": lambda h: archive([*good(), Member("archive/data.pkl", h, hidden=True)]),
    "hidden_file": _named("archive/.hidden"),
    "safetensors_first": _safetensors_first,
}


def _write(made: Made, file: str, folder: Path, marker: Path) -> Path:
    path = folder / file
    path.write_bytes(made(whole(mkdir(str(marker)))))
    return path


def samples() -> list[Sample]:
    found = []
    for table, fires, inert in ((LIVE, TORCH, False), (DEAD, "", False), (INERT, "", True)):
        for key, made in table.items():
            write = partial(_write, made, "model.pt")
            found.append(Sample(key, "zip", write, fires, inert=inert))
    names = ("model.pkl", "model.bin", "model", "model.npz", "model.ckpt", "model.safetensors")
    for file in names:
        fires = "" if file.endswith(".safetensors") else TORCH
        found.append(Sample(file, "named", partial(_write, torch_zip, file), fires))
    raw: Made = lambda h: h + archive(good())  # noqa: E731
    found.append(Sample("pickle_and_zip", "polyglot", partial(_write, raw, "model.pkl"), PICKLE))
    return found
