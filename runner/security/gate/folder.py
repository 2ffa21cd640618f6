"""Everything in a folder, told apart into things: files, checkpoints, captures, runs, DCP folders.

Links that lead out of the folder are named and not followed; pipes, sockets and devices are named
and not opened.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from runner.security.gate.provenance import MANIFEST
from runner.security.gate.signing import NAME as SIGNATURE
from runner.security.gate.signing import SUFFIX
from runner.security.trust import Reason, Severity

DEPTH = 64
LOADABLE = (
    ".bin", ".ckpt", ".distcp", ".joblib", ".keras", ".nemo", ".npk", ".npy", ".npz", ".onnx",
    ".pickle", ".pkl", ".pt", ".pt2", ".pte", ".pth", ".ptl", ".safetensors", ".tar", ".torch",
    ".ts",
)  # fmt: skip
"""Names of files that hold models or arrays, or claim to."""
MAGIC = (b"\x93NUMPY", *(b"\x80" + bytes([protocol]) for protocol in range(2, 6)))
"""First bytes of those that are looked at whatever their name is."""
PARTS = ("checkpoints", "debug/captures")  # a folder with one of them is a run's


@dataclass
class Thing:
    """What is judged as one."""

    path: Path
    kind: str  # file | checkpoint | capture | run | dcp | signed
    files: dict[str, Path] = field(default_factory=dict)  # all regular files, by path within
    odd: list[Reason] = field(default_factory=list)  # what is neither file nor folder

    @property
    def size(self) -> int:
        """Bytes of its files, as the disk has it now."""
        total = 0
        for path in self.files.values():
            try:
                total += path.stat().st_size
            except OSError:  # it is reported when it is read
                continue
        return total


def things(path: Path) -> Iterator[Thing]:
    """What there is to judge at `path`, in the order of names; of loose files all.

    Whether a loose file is worth a look is for `is_loadable` to say.
    """
    if not path.is_dir():
        yield Thing(path, "file", {path.name: path})
        return
    yield from _things(path, path, 0)


def thing_of(path: Path) -> Thing:
    """One file, or one folder judged as a whole, whatever is in it."""
    if not path.is_dir():
        return Thing(path, "file", {path.name: path})
    return _whole(path, _kind(path) or "folder", path)


def is_loadable(path: Path) -> bool:
    """Whether the file is one that loaders read, by its name or its first bytes."""
    if path.name.lower().endswith(LOADABLE) or path.name == ".metadata":
        return True
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return False
        with path.open("rb") as file:
            head = file.read(8)
            if head.startswith(b"PK\x03\x04"):  # archives of other things are no concern of ours
                file.seek(-min(path.stat().st_size, 1 << 16), os.SEEK_END)
                tail = file.read()
                return b"data.pkl" in tail or b".npy" in tail
    except OSError:
        return False
    return head.startswith(MAGIC)


def _kind(folder: Path) -> str | None:
    """What a folder is, if it is one thing."""
    if (folder / ".metadata").is_file():
        return "dcp"
    if (folder / MANIFEST).is_file() and (folder / "state.pt").exists():
        return "capture" if folder.absolute().parent.name == "captures" else "checkpoint"
    if (folder / ".hydra").is_dir() and any((folder / part).is_dir() for part in PARTS):
        return "run"
    has_own = (folder / SIGNATURE).is_file() or folder.with_name(folder.name + SUFFIX).is_file()
    return "signed" if has_own else None


def _things(folder: Path, top: Path, depth: int) -> Iterator[Thing]:
    kind = _kind(folder)
    if kind is not None:
        yield _whole(folder, kind, top)
        return
    here = Thing(folder, "folder")
    for entry in _entries(folder, here):
        if entry.is_dir(follow_symlinks=False):
            if depth < DEPTH:
                yield from _things(Path(entry.path), top, depth + 1)
            else:
                here.odd.append(_odd("folder.depth", entry.path, f"below {DEPTH} folders"))
        else:
            found = Thing(Path(entry.path), "file")
            _sort(entry, found, top, Path(entry.path).parent)
            if found.files or found.odd:
                yield found
    if here.odd:
        yield here


def _whole(folder: Path, kind: str, top: Path) -> Thing:
    found = Thing(folder, kind)
    waiting = [(folder, 0)]
    while waiting:
        place, depth = waiting.pop()
        for entry in _entries(place, found):
            if not entry.is_dir(follow_symlinks=False):
                _sort(entry, found, top, folder)
            elif depth < DEPTH:
                waiting.append((Path(entry.path), depth + 1))
            else:
                found.odd.append(_odd("folder.depth", entry.path, f"below {DEPTH} folders"))
    found.files = dict(sorted(found.files.items()))
    return found


def _entries(folder: Path, found: Thing) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        found.odd.append(_odd("folder.unreadable", str(folder), str(error.strerror)))
        return []


def _sort(entry: os.DirEntry[str], found: Thing, top: Path, base: Path) -> None:
    """Put what is no folder where it belongs."""
    path = Path(entry.path)
    name = str(path.relative_to(base))
    try:
        if entry.is_symlink():
            target = path.resolve()
            if target.is_relative_to(top.resolve()) and target.exists():
                return  # it is met where it really lies
            found.odd.append(_odd("link.outside", name, f"a link that leads to {target}", path))
        elif entry.is_file(follow_symlinks=False):
            found.files[name] = path
        else:
            found.odd.append(_odd("file.special", name, "a pipe, socket or device", path))
    except (OSError, RuntimeError) as error:  # a loop of links
        found.odd.append(_odd("link.broken", name, str(error), path))


def _odd(code: str, where: str, evidence: str, path: Path | None = None) -> Reason:
    """In the place of a model's file it is a refusal: that is what a loader would open."""
    loadable = path is not None and path.name.lower().endswith(LOADABLE)
    severity = Severity.REFUSAL if loadable else Severity.NOTE
    return Reason(code, severity, where, f"{evidence}; it was not opened", "copy the file itself")
