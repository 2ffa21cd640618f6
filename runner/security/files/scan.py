"""Judge files and folders: hash every byte once, and examine loadable files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from runner.errors import CheckpointError, SecurityError
from runner.findings import Reason, Severity, Trust
from runner.security.files.file_bytes import FileBytes, hash_file
from runner.security.files.formats import Refused, check_name, is_loadable, is_model_name
from runner.security.files.policy import FilePolicy
from runner.security.files.provenance import (
    MANIFEST,
    OTHER,
    Assessment,
    FileFacts,
    judge,
    known_trust,
)
from runner.security.files.sandbox import Sandbox

DEPTH = 64
SPECIAL = "a pipe, socket or device"


@dataclass
class Item:
    """A unit of judgement: a file, or a folder that is loaded as a whole."""

    path: Path
    kind: str = "file"  # file | checkpoint | folder
    files: dict[str, Path] = field(default_factory=dict)  # all regular files by relative path
    odd: list[Reason] = field(default_factory=list)  # links that lead outside, pipes, …

    @property
    def size(self) -> int:
        """Total bytes of its files."""
        return sum(path.stat().st_size for path in self.files.values() if path.is_file())

    @property
    def refused(self) -> bool:
        """Whether it contains something loadable that cannot be examined."""
        return any(reason.severity is Severity.REFUSAL for reason in self.odd)


class Scanner:
    """A context manager that shares one sandbox among all items."""

    def __init__(self, policy: FilePolicy, deep: bool = True) -> None:
        self.policy, self.deep = policy, deep
        self.sandbox = Sandbox()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.sandbox.close()

    def scan(self, item: Item, report: Callable[[int], None] | None = None) -> Assessment:
        """Return the verdict; `report` is called with the size of each finished file."""
        start = time.perf_counter()
        assessment = Assessment(str(item.path))
        assessment.refuse(item.odd)
        alone = item.kind == "file"
        for name, path in item.files.items():
            loads = alone or is_loadable(path)
            try:
                facts, reasons = self._examine(path) if loads else _unexamined(path)
            except CheckpointError as error:
                assessment.refuse([_odd("file.unreadable", name, str(error), loads)])
                continue
            assessment.files[name] = facts
            assessment.refuse(reasons if alone else [_within(name, reason) for reason in reasons])
            if report is not None:
                report(facts.size)
        judge(assessment, item.path, self.policy)
        assessment.seconds = time.perf_counter() - start
        return assessment

    def _examine(self, path: Path) -> tuple[FileFacts, list[Reason]]:
        try:
            check_name(path.name)
        except Refused as refused:
            return FileFacts(*hash_file(path), "unknown"), [refused.reason]
        with FileBytes.watch(path) as data:
            kind, reasons = self._check(path, data)
            facts = FileFacts(data.sha256, data.size, kind)
            if data.changed():
                text = "it changed during the scan; scan it again when no process writes to it"
                reasons = [Reason("file.changed", Severity.REFUSAL, path.name, text)]
        return facts, reasons

    def _check(self, path: Path, data: FileBytes) -> tuple[str, list[Reason]]:
        """Examine in this process if the digest is known, else in the sandbox during hashing."""
        trust, limits = known_trust(path, data, self.policy), self.policy.limits
        if trust is Trust.UNTRUSTED:
            return self.sandbox.examine(data, path.name, limits, self.deep)
        from runner.security.files.loading import examine  # imports torch, rarely needed

        deep = self.deep and trust is not Trust.CHECKED
        examined = examine(data.data, data.place, path.name, limits, rules=False, deep=deep)
        return examined.format, examined.reasons


def list_items(path: Path) -> Iterator[Item]:
    """Yield the items at `path` in order of names: checkpoints, and each other file.

    Links that lead out of the folder are reported, not followed, except for those of a Hugging Face
    snapshot to its own `blobs`.
    """
    if not os.path.isdir(path) or _is_whole(path):
        yield list_folder(path)
        return
    for folder, names in _walk(path, prune=_is_whole):
        if folder != path and _is_whole(folder):
            yield list_folder(folder)
            continue
        for name in names:
            item = Item(folder / name)
            _add(item, name, folder / name, _roots(path))
            if item.files or item.odd:
                yield item


def list_folder(path: Path) -> Item:
    """Return a file, or a folder judged as a whole."""
    if not os.path.isdir(path):
        if os.path.exists(path) and not os.path.isfile(path):
            return Item(path, odd=[_odd("file.special", path.name, SPECIAL, refused=True)])
        return Item(path, files={path.name: path})
    item = Item(path, "checkpoint" if _is_whole(path) else "folder")
    for folder, names in _walk(path):
        for name in names:
            place = folder / name
            _add(item, str(place.relative_to(path)), place, _roots(path))
    item.files = dict(sorted(item.files.items()))
    return item


def _is_whole(folder: Path) -> bool:
    """Whether it is one of our checkpoints or captures."""
    return os.path.isfile(folder / MANIFEST) and os.path.exists(folder / "state.pt")


def _roots(folder: Path) -> list[Path]:
    """Return the folders to which links in `folder` may lead."""
    place = folder.resolve()
    blobs = place.parent.parent / "blobs"
    return [place, blobs] if place.parent.name == "snapshots" else [place]


def _walk(
    top: Path, prune: Callable[[Path], bool] = lambda folder: False
) -> Iterator[tuple[Path, list[str]]]:
    """Yield each folder with its files and links; do not descend into pruned folders.

    Raises SecurityError if a folder cannot be read or lies too deep.
    """

    def fail(error: OSError) -> None:
        raise SecurityError(f"{error.filename}: refused: cannot be read: {error.strerror}")

    for parent, folders, files in os.walk(top, onerror=fail):
        folder = Path(parent)
        links = [name for name in folders if (folder / name).is_symlink()]
        folders[:] = [] if folder != top and prune(folder) else sorted(set(folders) - set(links))
        if folders and len(folder.relative_to(top).parts) >= DEPTH:
            raise SecurityError(f"{folder / folders[0]}: refused: it lies below {DEPTH} folders")
        yield folder, sorted([*files, *links])


def _add(item: Item, name: str, path: Path, roots: list[Path]) -> None:
    """Add a file to `item`, or the reason why it cannot be opened."""
    named = is_model_name(path.name)
    try:
        if path.is_symlink():
            target = path.resolve()
            if not target.exists() or not any(target.is_relative_to(root) for root in roots):
                item.odd.append(_odd("link.outside", name, f"a link that leads to {target}", named))
            elif target.is_file() and named and path.suffix != target.suffix:
                item.files[name] = path  # a loader uses the name it is given
            # else it is visited at its real place
        elif path.is_file():
            item.files[name] = path
        else:
            item.odd.append(_odd("file.special", name, SPECIAL, named))
    except (OSError, RuntimeError) as error:  # a symlink loop
        item.odd.append(_odd("link.broken", name, str(error), named))


def _odd(code: str, name: str, evidence: str, refused: bool) -> Reason:
    """Return a refusal if it might be loaded, else a note."""
    severity = Severity.REFUSAL if refused else Severity.NOTE
    return Reason(code, severity, name, f"{evidence}; it was not opened", "copy the file itself")


def _unexamined(path: Path) -> tuple[FileFacts, list[Reason]]:
    return FileFacts(*hash_file(path), OTHER), []


def _within(name: str, reason: Reason) -> Reason:
    place = f"{name}: {reason.where}" if reason.where and reason.where != name else name
    return Reason(reason.code, reason.severity, place, reason.evidence, reason.way_out)
