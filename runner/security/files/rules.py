"""Rules about zip archives, in one table.

A rule gets an opened archive and the bytes that its content may take, and returns what is wrong, or
an empty text. What the formats' own libraries refuse (offsets in safetensors, shapes and types in
npy) is left to them.
"""

from __future__ import annotations

import zipfile
from functools import partial

from runner.security.files.formats import Data, Refused, open_zip
from runner.security.files.policy import FileLimits

BLOCK = 1 << 20  # bytes that are inflated at a time
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # others are inflated without a bound


def check_unique(archive: zipfile.ZipFile, most: int) -> str:
    """No two members share a name, case aside as torch compares them: readers take either one."""
    names = [member.orig_filename.lower() for member in archive.infolist()]
    return "" if len(set(names)) == len(names) else "two members have one name"


def check_paths(archive: zipfile.ZipFile, most: int) -> str:
    """Relative, printable names within the archive."""
    for member in archive.infolist():
        name = member.orig_filename
        plain = name.isprintable() and not set(name) & set("\\:")
        if not plain or any(part in ("", ".", "..") for part in name.split("/")):
            return f"{name!r} is no plain name within the archive"
    return ""


def check_ratio(archive: zipfile.ZipFile, most: int) -> str:
    """The sizes that the members state are bounded by the file's size."""
    total = sum(member.file_size for member in archive.infolist())
    return "" if total <= most else f"its members expand to {total:,} bytes, more than {most:,}"


def check_sums(archive: zipfile.ZipFile, most: int) -> str:
    """Each member's bytes have their CRC and length; none is inflated beyond its stated size."""
    for member in archive.infolist():
        sizes = {member.file_size, _content_size(archive, member)}
        if member.compress_type == zipfile.ZIP_STORED:
            sizes.add(member.compress_size)
        if len(sizes) > 1:
            return f"{member.orig_filename} does not match its checksum"
    return ""


def _content_size(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> int:
    """Bytes that a member has; -1 where its header, method or checksum is wrong."""
    if member.compress_type not in METHODS:
        return -1
    try:
        with archive.open(member) as file:
            return sum(map(len, iter(partial(file.read, BLOCK), b"")))
    except Exception:  # of zipfile, zlib or the buffer, for a forged header
        return -1


ZIP_RULES = {
    "zip.unique": check_unique,
    "zip.paths": check_paths,
    "zip.ratio": check_ratio,
    "zip.crc": check_sums,
}


def check_zip(data: Data, limits: FileLimits) -> None:
    """Hold an archive against the rules. Raises Refused for the first it breaks."""
    with open_zip(data) as archive:
        for code, rule in ZIP_RULES.items():
            if wrong := rule(archive, limits.may_expand(len(data))):
                raise Refused(code, "", wrong)
