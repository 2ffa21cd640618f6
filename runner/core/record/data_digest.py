"""A digest of the files that a run reads, to detect later changes of the data."""

from __future__ import annotations

import hashlib
import logging
import os
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

log = logging.getLogger("runner")

DATA_PATH_KEYS = ("path", "validation_path", "test_path")  # keys of the files that a run reads
CHANGED_FIX = "restore the file, or to go on with it as it is: data.changed=accept"
MAX_FULL_BYTES = 2**26  # total bytes up to which all are read
MAX_STAMPED_FILES = 100_000  # of a user's data set
BLOCK_COUNT, BLOCK_BYTES = 1024, 2**14  # of larger data: this many blocks, evenly spaced


def digest_files(paths: Iterable[str], name: str = "") -> dict[str, Any]:
    """Return sha256 over the names, sizes and bytes of all files in `paths`.

    `of` says which bytes were hashed; `name` replaces that of a single file. Raises OSError.
    """
    files = [file for path in paths for file in _files(Path(os.path.expanduser(path)))]
    if name and len(files) == 1 and files[0][0] == files[0][1].name:
        files = [(name, files[0][1])]
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


class DataFiles:
    """The files that a run reads, and their digest, computed once."""

    def __init__(self, data: object) -> None:
        """Find the paths in the config of `data`."""
        self.paths = {
            f"data.{key}": str(Path(os.path.expanduser(path)).absolute())
            for key in DATA_PATH_KEYS
            if (path := str(getattr(data, key, None) or "???")) != "???"
        }

    @cached_property
    def digest(self) -> dict[str, Any]:
        """The digest of all files, as provenance.json has it. Raises OSError."""
        return digest_files(self.paths.values())

    def describe(self) -> dict[str, Any]:
        """Return paths and digests, of all files and of data.path alone; {} if unreadable."""
        if not self.paths:
            return {}
        try:
            own = self.digest
            if len(self.paths) > 1:
                own = digest_files([self.paths["data.path"]])
        except OSError as error:
            log.warning("the data have no digest, by which changes are found: %s", error)
            return {}
        return {"paths": self.paths, "sha256": self.digest["sha256"], "own": own["sha256"]}


def stamp_arguments(arguments: Mapping[str, Any]) -> str:
    """Return a sha256 of names, sizes and times of the files that texts in `arguments` name.

    "" without one, or for more than MAX_STAMPED_FILES. For a user's data set, which is not read.
    """
    texts = [value for value in arguments.values() if isinstance(value, str) and value]
    paths = [path for text in texts if (path := Path(os.path.expanduser(text))).exists()]
    stamp, count = hashlib.sha256(), 0
    for path in paths:
        walk = [("", [], [""])] if path.is_file() else os.walk(path)
        entries = []
        for folder, _, names in walk:
            count += len(names)
            if count > MAX_STAMPED_FILES:
                return ""
            for file in (Path(path, folder, name) for name in names):
                with suppress(OSError):
                    status = file.stat()
                    name = os.path.relpath(file, path)
                    entries.append(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\0")
        stamp.update("".join(sorted(entries)).encode("utf-8", "surrogatepass"))
    return stamp.hexdigest() if paths else ""


def change_problem(files: DataFiles, since: str, then: str, what: str = "") -> str:
    """Return the message that `what` (data.path) has another digest than `then`. Raises OSError."""
    now = files.digest["sha256"]
    digests = f"sha256 {then[:12]}… then, {now[:12]}… now"
    return f"{what or files.paths['data.path']} has changed since {since}: {digests}"


def _files(path: Path) -> list[tuple[str, Path]]:
    """Return (name, path) of a file, or of all in a folder but hidden ones and outputs of runs."""
    if path.is_file():
        return [(path.name, path)]
    outputs = Path("outputs").absolute()
    names = ((file.relative_to(path), file) for file in path.rglob("*") if file.is_file())
    return sorted(
        (name.as_posix(), file)
        for name, file in names
        if not any(part.startswith(".") for part in name.parts)
        and not file.absolute().is_relative_to(outputs)
    )
