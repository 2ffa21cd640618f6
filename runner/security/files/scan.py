"""The verdict on files and folders: every byte hashed once, what can be loaded examined."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from runner.errors import CheckpointError
from runner.security.files.file_bytes import FileBytes, hash_file
from runner.security.files.formats import Refused, check_name, is_loadable, is_model_name
from runner.security.files.policy import FilePolicy, Provenance
from runner.security.files.provenance import MANIFEST, judge, provenance_of
from runner.security.files.sandbox import Sandbox
from runner.security.trust import OTHER, Assessment, FileFacts, Reason, Severity

DEPTH = 64
SPECIAL = "a pipe, socket or device"
RUN_PARTS = ("checkpoints", "debug/captures")  # a folder with one of them is a run's


@dataclass
class Item:
    """What is judged as one: a file, or a folder that is loaded as a whole."""

    path: Path
    kind: str  # file | checkpoint | capture | run | dcp | folder
    files: dict[str, Path] = field(default_factory=dict)  # all regular files, by path within
    odd: list[Reason] = field(default_factory=list)  # what is neither file nor folder

    @property
    def size(self) -> int:
        """Bytes of its files."""
        total = 0
        for path in self.files.values():
            try:
                total += path.stat().st_size
            except OSError:  # it is reported when it is read
                continue
        return total


class Scanner:
    """A context manager; one for all that is examined together, so that it needs one process."""

    def __init__(self, policy: FilePolicy, deep: bool = True) -> None:
        self.policy, self.deep = policy, deep
        self.sandbox = Sandbox()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.sandbox.close()

    def scan(self, item: Item, report: Callable[[int], None] | None = None) -> Assessment:
        """The verdict; `report` is given the bytes of each file that is done."""
        start = time.perf_counter()
        found = Assessment(str(item.path))
        found.refuse(item.odd)
        alone = item.kind == "file"
        for name, path in item.files.items():
            loads = alone or is_loadable(path)
            try:
                facts, reasons = self._examine(path) if loads else (_hash(path), [])
            except CheckpointError as error:
                found.refuse([_odd("file.unreadable", name, str(error), loads)])
                continue
            found.files[name] = facts
            found.refuse(reasons if alone else [_within(name, reason) for reason in reasons])
            if report is not None:
                report(facts.size)
        judge(found, item.path, self.policy)
        found.seconds = time.perf_counter() - start
        return found

    def _examine(self, path: Path) -> tuple[FileFacts, list[Reason]]:
        try:
            check_name(path.name)
        except Refused as refused:
            return FileFacts(*hash_file(path), "unknown"), [refused.reason]
        with FileBytes.watch(path) as data:
            kind, reasons = self._check(path, data)
            facts = FileFacts(data.sha256, data.size, kind)
            if data.changed():
                text = "it changed while it was examined; scan it again once nothing writes to it"
                reasons = [Reason("file.changed", Severity.REFUSAL, path.name, text)]
        return facts, reasons

    def _check(self, path: Path, data: FileBytes) -> tuple[str, list[Reason]]:
        """Examine it here if its digest is known, else in the sandbox while it is hashed."""
        known, limits = provenance_of(path, data, self.policy), self.policy.limits
        if known is Provenance.FOREIGN:
            return self.sandbox.examine(data, path.name, limits, self.deep)
        from runner.security.files.loading import examine  # brings torch, which few need

        deep = self.deep and known is not Provenance.OWN
        examined = examine(data.data, data.place, path.name, limits, rules=False, deep=deep)
        return examined.format, examined.reasons


def list_items(path: Path) -> Iterator[Item]:
    """What there is to judge at `path`, in the order of names; of loose files all.

    Links that lead out of the folder are named and not followed, but for those of a Hugging Face
    snapshot to its own `blobs`.
    """
    if not os.path.isdir(path):
        yield list_folder(path)
    elif kind := _kind(path):
        yield _whole(path, kind, _roots(path))
    else:
        rest = Item(path, "folder")
        yield from _collect(path, _roots(path), rest, loose=True)
        if rest.odd:
            yield rest


def list_folder(path: Path) -> Item:
    """One file, or one folder judged as a whole, whatever is in it."""
    if os.path.isdir(path):
        return _whole(path, _kind(path) or "folder", _roots(path))
    if os.path.exists(path) and not os.path.isfile(path):
        return Item(path, "file", odd=[_odd("file.special", path.name, SPECIAL, refused=True)])
    return Item(path, "file", {path.name: path})


def _roots(folder: Path) -> list[Path]:
    """Where links in the folder may lead."""
    place = folder.resolve()
    if place.parent.name == "snapshots":
        return [place, place.parent.parent / "blobs"]
    return [place]


def _kind(folder: Path) -> str | None:
    """What a folder is, if it is one thing."""
    is_file, is_folder = os.path.isfile, os.path.isdir
    if is_file(folder / ".metadata"):
        return "dcp"
    if is_file(folder / MANIFEST) and os.path.exists(folder / "state.pt"):
        return "capture" if folder.absolute().parent.name == "captures" else "checkpoint"
    if is_folder(folder / ".hydra") and any(is_folder(folder / part) for part in RUN_PARTS):
        return "run"
    return None


def _whole(folder: Path, kind: str, roots: list[Path]) -> Item:
    item = Item(folder, kind)
    for _ in _collect(folder, roots, item, loose=False):
        pass
    item.files = dict(sorted(item.files.items()))
    return item


def _collect(
    folder: Path, roots: list[Path], item: Item, loose: bool, depth: int = 0
) -> Iterator[Item]:
    """Put what lies in the folder into `item`; of `loose` files and their kinds, yield items."""
    for entry in _entries(folder, item):
        path = Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            kind = _kind(path) if loose else None
            if kind is not None:
                yield _whole(path, kind, roots)
            elif depth < DEPTH:
                yield from _collect(path, roots, item, loose, depth + 1)
            else:
                text = f"it lies below {DEPTH} folders"
                item.odd.append(_odd("folder.depth", entry.path, text, refused=True))
        elif loose:
            one = Item(path, "file")
            _sort(entry, one, roots, folder)
            if one.files or one.odd:
                yield one
        else:
            _sort(entry, item, roots, item.path)


def _entries(folder: Path, item: Item) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        evidence = f"it cannot be read: {error.strerror}"
        item.odd.append(_odd("folder.unreadable", str(folder), evidence, refused=True))
        return []


def _sort(entry: os.DirEntry[str], item: Item, roots: list[Path], base: Path) -> None:
    """Put what is no folder among the files, or among what cannot be opened."""
    path = Path(entry.path)
    name, named = str(path.relative_to(base)), is_model_name(path.name)
    try:
        if entry.is_symlink():
            target = path.resolve()
            if not target.exists() or not any(target.is_relative_to(root) for root in roots):
                item.odd.append(_odd("link.outside", name, f"a link that leads to {target}", named))
            elif target.is_file() and named and path.suffix != target.suffix:
                item.files[name] = path  # a loader goes by the name it is given
            # else it is met where it really lies
        elif entry.is_file(follow_symlinks=False):
            item.files[name] = path
        else:
            item.odd.append(_odd("file.special", name, SPECIAL, named))
    except (OSError, RuntimeError) as error:  # a loop of links
        item.odd.append(_odd("link.broken", name, str(error), named))


def _odd(code: str, where: str, evidence: str, refused: bool) -> Reason:
    """Refused where it may be something that is loaded."""
    severity = Severity.REFUSAL if refused else Severity.NOTE
    return Reason(code, severity, where, f"{evidence}; it was not opened", "copy the file itself")


def _hash(path: Path) -> FileFacts:
    return FileFacts(*hash_file(path), OTHER)


def _within(name: str, reason: Reason) -> Reason:
    where = f"{name}: {reason.where}" if reason.where and reason.where != name else name
    return Reason(reason.code, reason.severity, where, reason.evidence, reason.way_out)
