"""A zip archive by torch.save: its members, and that the pickle and the storages agree."""

from __future__ import annotations

import re

from runner.security.gate.archive import DEFLATED, STORED, Member, check_sums, read_archive
from runner.security.gate.format import CONVERT, Buffer
from runner.security.gate.pickles import read_pickle
from runner.security.gate.policy import Bounds, Whose
from runner.security.gate.refused import Refused

SMALL = {  # what may be in it besides the pickle and the storages, and what that may say
    "version": re.compile(rb"[0-9]{1,4}\n?"),
    "byteorder": re.compile(rb"little|big"),
    ".format_version": re.compile(rb"[0-9]{1,4}"),
    ".storage_alignment": re.compile(rb"[0-9]{1,5}"),
    ".data/serialization_id": re.compile(rb"[0-9]{1,64}"),
}
DATA = re.compile(r"data/(0|[1-9][0-9]{0,9})", re.ASCII)


def check(data: Buffer, bounds: Bounds, whose: Whose) -> None:
    """Raises Refused, and NeedsPickle for one that is sound and asks for more than plain data."""
    # what is compressed is read as well, so that a program is called one, which often is
    members = _within_root(read_archive(data, bounds, (STORED, DEFLATED)))
    for member in members.values():
        if member.method != STORED:
            raise Refused("zip.method", member.name, "is compressed, which torch.save never does")
    if whose is Whose.FOREIGN:  # else its digest says the same, and more
        check_sums(data, list(members.values()))
    view = memoryview(data)
    storages: dict[str, int] = {}
    for name, member in members.items():
        held = view[member.start : member.start + member.size]
        if match := DATA.fullmatch(name):
            storages[match[1]] = member.size
        elif name in SMALL and not (len(held) <= 64 and SMALL[name].fullmatch(bytes(held))):
            raise Refused("torch.member", member.name, "does not hold what it should")
    read = members["data.pkl"]
    found = read_pickle(
        view[read.start : read.start + read.size], read.name, bounds, storages, whose
    )
    if len(data) * bounds.ratio + bounds.free < found.bytes:
        raise Refused(
            "torch.expanded", read.name,
            f"its tensors would take {found.bytes:,} bytes of {len(data):,}",
            "save them with .clone(), so that none is larger than what is stored of it",
        )  # fmt: skip
    if unused := storages.keys() - found.storages:
        raise Refused("torch.unused", f"data/{min(unused)}", "belongs to no tensor")


def _within_root(members: list[Member]) -> dict[str, Member]:
    """By their names below the one folder that holds them all. Raises Refused."""
    root = members[0].name.partition("/")[0]
    found: dict[str, Member] = {}
    for member in members:
        top, _, name = member.name.partition("/")
        if name == "constants.pkl" or name.startswith(("code/", "constants/")):
            raise Refused(
                "program.torchscript", member.name, "is of a TorchScript program, which is code",
                CONVERT,
            )  # fmt: skip
        if name.startswith(".data/") and name not in SMALL:
            raise Refused(
                "program.package", member.name, "is of a torch.package, which is code", CONVERT
            )
        if name.startswith(("models/", "archive_format")) or top in ("archive_format", "models"):
            raise Refused(
                "program.export", member.name, "is of an exported program, which is code", CONVERT
            )
        if top != root or not name:
            raise Refused("torch.root", member.name, f"does not lie in {root}/ as the others do")
        found[name] = member
    for name, member in found.items():
        if name != "data.pkl" and name not in SMALL and not DATA.fullmatch(name):
            raise Refused("torch.member", member.name, "is nothing that torch.save writes")
    if "data.pkl" not in found:
        raise Refused("torch.member", root, "has no data.pkl")
    return found
