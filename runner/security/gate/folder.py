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

from runner.errors import CheckpointError
from runner.security.gate.format import RAW_NAMES, is_models_name, is_raw
from runner.security.gate.glance import holds_model
from runner.security.gate.held import Peeked
from runner.security.gate.provenance import MANIFEST
from runner.security.trust import Reason, Severity

DEPTH = 64
SPECIAL = "a pipe, socket or device"
PARTS = ("checkpoints", "debug/captures")  # a folder with one of them is a run's


@dataclass
class Thing:
    """What is judged as one."""

    path: Path
    kind: str  # file | checkpoint | capture | run | dcp
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
    if not os.path.isdir(path):
        yield _named(path)
    else:
        yield from _things(path, path, 0)


def thing_of(path: Path) -> Thing:
    """One file, or one folder judged as a whole, whatever is in it."""
    if not os.path.isdir(path):
        return _named(path)
    return _whole(path, _kind(path) or "folder", path)


def _named(path: Path) -> Thing:
    found = Thing(path, "file")
    if os.path.exists(path) and not os.path.isfile(path):
        found.odd.append(_odd("file.special", path.name, SPECIAL, refused=True))
    else:
        found.files[path.name] = path
    return found


def is_loadable(path: Path) -> bool:
    """Whether the file is one that loaders read, by its name or its content.

    One that cannot be read may be.
    """
    anything = path.name.lower().endswith(RAW_NAMES)
    if path.name == ".metadata" or (is_models_name(path.name) and not anything):
        return True
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return False
        with Peeked(path) as data:
            return not is_raw(data) if anything else holds_model(data)
    except FileNotFoundError:
        return False
    except (CheckpointError, OSError):
        return True


def _kind(folder: Path) -> str | None:
    """What a folder is, if it is one thing."""
    is_file, is_folder = os.path.isfile, os.path.isdir  # of what cannot be reached: no
    if is_file(folder / ".metadata"):
        return "dcp"
    if is_file(folder / MANIFEST) and os.path.exists(folder / "state.pt"):
        return "capture" if folder.absolute().parent.name == "captures" else "checkpoint"
    if is_folder(folder / ".hydra") and any(is_folder(folder / part) for part in PARTS):
        return "run"
    return None


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
                here.odd.append(_too_deep(entry.path))
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
                found.odd.append(_too_deep(entry.path))
    found.files = dict(sorted(found.files.items()))
    return found


def _entries(folder: Path, found: Thing) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        told = f"it cannot be read: {error.strerror}"
        found.odd.append(_odd("folder.unreadable", str(folder), told, refused=True))
        return []


def _sort(entry: os.DirEntry[str], found: Thing, top: Path, base: Path) -> None:
    """Put what is no folder where it belongs."""
    path = Path(entry.path)
    name = str(path.relative_to(base))
    try:
        if entry.is_symlink():
            target = path.resolve()
            if not target.is_relative_to(top.resolve()) or not target.exists():
                told = f"a link that leads to {target}"
                found.odd.append(_odd("link.outside", name, told, is_models_name(path.name)))
            elif target.is_file() and is_models_name(path.name) and path.suffix != target.suffix:
                found.files[name] = path  # what it is depends on the name that it is loaded by
            # else it is met where it really lies
        elif entry.is_file(follow_symlinks=False):
            found.files[name] = path
        else:
            found.odd.append(_odd("file.special", name, SPECIAL, is_models_name(path.name)))
    except (OSError, RuntimeError) as error:  # a loop of links
        found.odd.append(_odd("link.broken", name, str(error), is_models_name(path.name)))


def _too_deep(path: str) -> Reason:
    return _odd("folder.depth", path, f"it lies below {DEPTH} folders", refused=True)


def _odd(code: str, where: str, evidence: str, refused: bool) -> Reason:
    """What could not be looked at is refused where it may be something that is loaded."""
    severity = Severity.REFUSAL if refused else Severity.NOTE
    return Reason(code, severity, where, f"{evidence}; it was not opened", "copy the file itself")
