"""Rules for zip archives.

A rule takes an open archive and the limit of its content in bytes; it returns the problem, or
"". Checks that the formats' own libraries do (safetensors offsets, npy shapes and types) are
not repeated.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import zipfile
from functools import partial
from typing import IO

from runner.core.security.files.formats import NPY_MAGIC, Data, FileRefusal, open_zip
from runner.core.security.files.policy import FileLimits

BLOCK = 1 << 20  # bytes inflated at a time
# other methods are inflated without a bound
COMPRESSION_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
LOCAL_HEADER_BYTES, DESCRIPTOR_BYTES, END_RECORD_BYTES = 30, 24, 22
END_MAGIC = b"PK\x05\x06"
TORCH_MEMBER = re.compile(
    r"[^/]+/(data\.pkl|data/\d+|byteorder|version|\.format_version|\.storage_alignment"
    r"|\.data/serialization_id)",
    re.ASCII,
)


def check_unique(archive: zipfile.ZipFile, limit: int) -> str:
    """Check that names are unique ignoring case (as torch compares), since readers differ."""
    names = [member.orig_filename.lower() for member in archive.infolist()]
    return "" if len(set(names)) == len(names) else "two members have one name"


def check_paths(archive: zipfile.ZipFile, limit: int) -> str:
    """Check for relative, printable names within the archive."""
    for member in archive.infolist():
        name = member.orig_filename
        is_plain = name.isprintable() and not set(name) & set("\\:")
        if not is_plain or any(part in ("", ".", "..") for part in name.split("/")):
            return f"{name!r} is not a plain name within the archive"
    return ""


def check_total_size(archive: zipfile.ZipFile, limit: int) -> str:
    """Check that the declared total size is at most `limit`."""
    total = sum(member.file_size for member in archive.infolist())
    return "" if total <= limit else f"its members expand to {total:,} bytes, more than {limit:,}"


def check_crc(archive: zipfile.ZipFile, limit: int) -> str:
    """Check each member's CRC and size; nothing is inflated beyond its declared size."""
    for member in archive.infolist():
        sizes = {member.file_size, _content_size(archive, member)}
        if member.compress_type == zipfile.ZIP_STORED:
            sizes.add(member.compress_size)
        if len(sizes) > 1:
            return f"{member.orig_filename} does not match its checksum"
    return ""


def check_gaps(archive: zipfile.ZipFile, limit: int) -> str:
    """Check that the members fill the file up to the directory, which ends it."""
    file: IO[bytes] = archive.fp  # type: ignore[assignment]
    end = 0
    for member in sorted(archive.infolist(), key=lambda member: member.header_offset):
        if not 0 <= member.header_offset - end <= DESCRIPTOR_BYTES:
            return f"has bytes outside its members, before {member.orig_filename}"
        file.seek(member.header_offset + LOCAL_HEADER_BYTES - 4)
        name_and_extra = sum(struct.unpack("<2H", file.read(4)))
        end = member.header_offset + LOCAL_HEADER_BYTES + name_and_extra + member.compress_size
    file.seek(-END_RECORD_BYTES, os.SEEK_END)
    if not 0 <= archive.start_dir - end <= DESCRIPTOR_BYTES or file.read(4) != END_MAGIC:
        return "has bytes outside its members, at the end"
    return ""


def check_links(archive: zipfile.ZipFile, limit: int) -> str:
    """Check that each member is an ordinary file."""
    for member in archive.infolist():
        if stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG):
            return f"{member.orig_filename} is a link or a special file"
    return ""


def check_members(archive: zipfile.ZipFile, limit: int) -> str:
    """Check that torch or numpy writes each member: no other archive, pickle or program."""
    names = [member.orig_filename for member in archive.infolist()]
    if any(name.lower().endswith("data.pkl") for name in names):
        odd = [name for name in names if TORCH_MEMBER.fullmatch(name) is None]
        odd += [name for name in names if name.split("/")[0] != names[0].split("/")[0]]
        return f"{odd[0]} is not a member that torch.save writes" if odd else ""
    for name in names:
        with archive.open(name) as file:
            if not name.endswith(".npy") or file.read(len(NPY_MAGIC)) != NPY_MAGIC:
                return f"{name} is not an array in numpy's format"
    return ""


def _content_size(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> int:
    """Return a member's actual size; -1 if its header, method or checksum is invalid."""
    if member.compress_type not in COMPRESSION_METHODS:
        return -1
    try:
        with archive.open(member) as file:
            return sum(map(len, iter(partial(file.read, BLOCK), b"")))
    except Exception:  # zipfile, zlib or the buffer raise these for forged headers
        return -1


ZIP_RULES = {
    "zip.unique": check_unique,
    "zip.paths": check_paths,
    "zip.ratio": check_total_size,
    "zip.crc": check_crc,
    "zip.gaps": check_gaps,
    "zip.links": check_links,
    "zip.members": check_members,
}


def check_zip(data: Data, limits: FileLimits) -> None:
    """Check an archive. Raises FileRefusal for the first rule that it breaks."""
    with open_zip(data) as archive:
        for code, rule in ZIP_RULES.items():
            if problem := rule(archive, limits.may_expand(len(data))):
                raise FileRefusal(code, "", problem)
