"""Judge files and folders: hash every byte once, and examine loadable files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from runner.core.errors import CheckpointError, SecurityError
from runner.core.findings import Reason, Severity, Trust
from runner.core.security.checksummed_json import MANIFEST
from runner.core.security.files.file_bytes import FileBytes, hash_file
from runner.core.security.files.folder_rules import check_folder
from runner.core.security.files.formats import (
    FileRefusal,
    check_name,
    is_loadable,
    is_model_name,
    printable,
)
from runner.core.security.files.policy import FilePolicy
from runner.core.security.files.provenance import (
    COPY_FILE,
    OTHER,
    Assessment,
    FileFacts,
    check_link,
    link_roots,
    set_trust,
    trust_by_digest,
)
from runner.scan.sandbox import Sandbox

MAX_DEPTH = 64
SPECIAL_FILE = "a pipe, socket or device"


@dataclass
class ScanItem:
    """A unit of judgement: a file, or a folder that is loaded as a whole."""

    path: Path
    kind: str = "file"  # file | checkpoint | folder | metadata
    files: dict[str, Path] = field(default_factory=dict)  # all regular files by relative path
    findings: list[Reason] = field(default_factory=list)  # links that lead outside, pipes, …

    @property
    def refused(self) -> bool:
        """Whether it contains something loadable that cannot be examined."""
        return any(reason.severity is Severity.REFUSAL for reason in self.findings)


class Scanner:
    """A context manager that shares one sandbox among all items."""

    def __init__(self, policy: FilePolicy, deep: bool = True) -> None:
        self.policy, self.deep = policy, deep
        self.sandbox = Sandbox()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.sandbox.close()

    def scan(self, item: ScanItem) -> Assessment:
        """Return the verdict on an item."""
        start = time.perf_counter()
        assessment = Assessment(str(item.path))
        assessment.refuse(item.findings)
        is_single = item.kind == "file"
        for name, path in item.files.items():
            loadable = is_single or is_loadable(path)
            try:
                if loadable:
                    facts, reasons = self._examine(path)
                else:
                    facts, reasons = FileFacts(*hash_file(path), OTHER), []
            except CheckpointError as error:
                assessment.refuse([_unopened_reason("file.unreadable", name, str(error), loadable)])
                continue
            assessment.files[name] = facts
            assessment.refuse(reasons if is_single else [_prefix_name(name, r) for r in reasons])
        if not is_single:
            assessment.refuse(self._check_folders(item, assessment))
        set_trust(assessment, item.path, self.policy)
        assessment.seconds = time.perf_counter() - start
        return assessment

    def _check_folders(self, item: ScanItem, assessment: Assessment) -> list[Reason]:
        """Return refusals of configs and other files beside those that are loaded."""
        loaded = [name for name, facts in assessment.files.items() if facts.format != OTHER]
        reasons = []
        for inner in sorted({Path(name).parent for name in loaded}):
            found = check_folder(item.path / inner, self.policy, link_roots(item.path))
            reasons += [_prefix_name(str(inner), r) if inner.name else r for r in found]
        return [reason for reason in reasons if not is_model_name(reason.where)]

    def _examine(self, path: Path) -> tuple[FileFacts, list[Reason]]:
        try:
            check_name(path.name)
        except FileRefusal as refusal:
            return FileFacts(*hash_file(path), "unknown"), [refusal.reason]
        with FileBytes.open_in_place(path) as data:
            kind, reasons = self._check(path, data)
            facts = FileFacts(data.sha256, data.size, kind)
            if data.changed():
                text = "it changed during the scan; scan it again when no process writes to it"
                reasons = [Reason("file.changed", Severity.REFUSAL, path.name, text)]
        return facts, reasons

    def _check(self, path: Path, data: FileBytes) -> tuple[str, list[Reason]]:
        """Examine in this process if the digest is known, else in the sandbox during hashing."""
        trust, limits = trust_by_digest(path, data, self.policy), self.policy.limits
        if trust is Trust.UNTRUSTED:
            return self.sandbox.examine(data, path.name, limits, self.deep)
        from runner.core.security.files.parsing import examine  # imports torch, rarely needed

        options = {"check_archive": False, "deep": self.deep and trust is not Trust.CHECKED}
        examination = examine(data.data, data.path, path.name, limits, **options)
        return examination.format, examination.reasons


def list_items(path: Path, policy: FilePolicy) -> Iterator[ScanItem]:
    """Yield the items at `path` in order of names: checkpoints, and each other file.

    Files beside a model count as items if they are refused, as a config that runs code is. Links
    that lead out of the folder are reported, not followed, except for those of a Hugging Face
    snapshot to its own `blobs`.
    """
    if not os.path.isdir(path) or _is_checkpoint(path):
        yield list_folder(path)
        return
    for folder, names in _walk(path, prune=_is_checkpoint):
        if folder != path and _is_checkpoint(folder):
            yield list_folder(folder)
            continue
        has_model = any(is_loadable(folder / name) for name in names)
        reasons = check_folder(folder, policy, link_roots(path)) if has_model else []
        refused = {r.where: r for r in reasons if not is_model_name(r.where)}
        for name in names:
            item = ScanItem(folder / name)
            if reason := refused.get(printable(name)):
                opened = {} if reason.code.startswith("link.") else {name: folder / name}
                yield ScanItem(folder / name, "metadata", opened, [reason])
                continue
            _add_file(item, name, folder / name, link_roots(path))
            if item.files or item.findings:
                yield item


def scan_folder(folder: Path, policy: FilePolicy) -> Assessment:
    """Return the verdict on a folder judged as a whole."""
    with Scanner(policy) as scanner:
        return scanner.scan(list_folder(folder))


def list_folder(path: Path) -> ScanItem:
    """Return a file, or a folder judged as a whole."""
    if not os.path.isdir(path):
        if os.path.exists(path) and not os.path.isfile(path):
            reason = _unopened_reason("file.special", path.name, SPECIAL_FILE, refuse=True)
            return ScanItem(path, findings=[reason])
        return ScanItem(path, files={path.name: path})
    item = ScanItem(path, "checkpoint" if _is_checkpoint(path) else "folder")
    for folder, names in _walk(path):
        for name in names:
            member = folder / name
            _add_file(item, str(member.relative_to(path)), member, link_roots(path))
    item.files = dict(sorted(item.files.items()))
    return item


def _is_checkpoint(folder: Path) -> bool:
    """Whether it is one of our checkpoints or captures."""
    return os.path.isfile(folder / MANIFEST) and os.path.exists(folder / "state.pt")


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
        if folders and len(folder.relative_to(top).parts) >= MAX_DEPTH:
            problem = f"it lies below {MAX_DEPTH} folders"
            raise SecurityError(f"{folder / folders[0]}: refused: {problem}")
        yield folder, sorted([*files, *links])


def _add_file(item: ScanItem, name: str, path: Path, roots: list[Path]) -> None:
    """Add a file to `item`, or the reason why it cannot be opened."""
    is_model = is_model_name(path.name)
    try:
        check_link(path, roots)
    except FileRefusal as refusal:
        severity = Severity.REFUSAL if is_model else Severity.NOTE
        item.findings.append(replace(refusal.reason, where=name, severity=severity))
        return
    try:
        is_link, is_file = path.is_symlink(), path.is_file()
    except OSError as error:  # its folder may not be searched
        item.findings.append(_unopened_reason("link.broken", name, str(error), is_model))
        return
    if not is_file:
        if not is_link:  # one to a folder of the same tree is visited there
            item.findings.append(_unopened_reason("file.special", name, SPECIAL_FILE, is_model))
    elif not is_link or (is_model and path.suffix != path.resolve().suffix):
        item.files[name] = path  # a loader uses the name it is given
    # else it is visited at its real place


def _unopened_reason(code: str, name: str, evidence: str, refuse: bool) -> Reason:
    """Return a refusal if it might be loaded, else a note."""
    severity = Severity.REFUSAL if refuse else Severity.NOTE
    return Reason(code, severity, name, f"{evidence}; it was not opened", COPY_FILE)


def _prefix_name(name: str, reason: Reason) -> Reason:
    where = f"{name}: {reason.where}" if reason.where and reason.where != name else name
    return Reason(reason.code, reason.severity, where, reason.evidence, reason.way_out)
