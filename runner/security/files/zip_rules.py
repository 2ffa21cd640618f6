"""Rules for zip archives.

A rule takes an open archive and the limit of its content in bytes; it returns the problem, or
"". Checks that the formats' own libraries do (safetensors offsets, npy shapes and types) are
not repeated.
"""

from __future__ import annotations

import zipfile
from functools import partial

from runner.security.files.formats import Data, FileRefusal, open_zip
from runner.security.files.policy import FileLimits

BLOCK = 1 << 20  # bytes inflated at a time
# other methods are inflated without a bound
COMPRESSION_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


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
}


def check_zip(data: Data, limits: FileLimits) -> None:
    """Check an archive. Raises FileRefusal for the first rule that it breaks."""
    with open_zip(data) as archive:
        for code, rule in ZIP_RULES.items():
            if problem := rule(archive, limits.may_expand(len(data))):
                raise FileRefusal(code, "", problem)
