"""A digest of the files that a run reads, to detect later changes of the data."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

MAX_FULL_BYTES = 2**26  # total bytes up to which all are read
BLOCK_COUNT, BLOCK_BYTES = 1024, 2**14  # of larger data: this many blocks, evenly spaced


def digest_files(paths: Iterable[str]) -> dict[str, Any]:
    """Return sha256 over the names, sizes and bytes of all files in `paths`.

    `of` says which bytes were hashed. Raises OSError.
    """
    files = [file for path in paths for file in _files(Path(os.path.expanduser(path)))]
    sizes = [file.stat().st_size for _, file in files]
    total, digest = sum(sizes), hashlib.sha256()
    for (name, _), size in zip(files, sizes, strict=True):
        digest.update(f"{name}\0{size}\n".encode("utf-8", "surrogateescape"))
    if total <= MAX_FULL_BYTES:
        for _, file in files:
            digest.update(file.read_bytes())
        coverage = "all bytes"
    else:
        ends = list(accumulate(sizes))
        for position in (i * total // BLOCK_COUNT for i in range(BLOCK_COUNT)):
            number = bisect_right(ends, position)
            with files[number][1].open("rb") as stream:
                stream.seek(position - (ends[number] - sizes[number]))
                digest.update(stream.read(BLOCK_BYTES))
        coverage = f"names, sizes and {BLOCK_COUNT} blocks of {BLOCK_BYTES} bytes"
    return {"sha256": digest.hexdigest(), "of": coverage, "files": len(files), "bytes": total}


def _files(path: Path) -> list[tuple[str, Path]]:
    """Return (name, path) of a file, or of all files in a folder by relative name."""
    if path.is_file():
        return [(path.name, path)]
    files = (file for file in path.rglob("*") if file.is_file())
    return sorted((file.relative_to(path).as_posix(), file) for file in files)
