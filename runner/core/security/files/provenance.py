"""The verdict on a file: reasons, and trust by origin.

The origin is a manifest of this run tree, a digest pinned by the user, or unknown. A manifest's
own digest detects damage but not forgery, so it counts only in folders of this run tree
(`FilePolicy.run_tree`), where an attacker with write access would not need to forge one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runner.core.errors import CheckpointError, SecurityError
from runner.core.findings import Reason, Severity, Trust
from runner.core.record.text import escape_control_chars
from runner.core.schemas.security import SecurityLevel
from runner.core.security.checksummed_json import MANIFEST, ListedFiles, read_manifest
from runner.core.security.files.file_bytes import FileBytes
from runner.core.security.files.formats import FileRefusal, is_model_name, leads_outside
from runner.core.security.files.policy import FilePolicy

log = logging.getLogger("runner")

SCHEMA = 1
OTHER = "other"  # format of files that are never loaded
SHOWN_DIGESTS = 4  # in one message
MAX_MANIFEST_BYTES = 1 << 24  # maximum size of a manifest
COPY_FILE = "copy the file itself"
INTACT = "use an intact copy or an earlier checkpoint"


@dataclass
class FileFacts:
    """A file's digest, size and format when it was read."""

    sha256: str
    size: int
    format: str  # by magic and name: safetensors | torch_zip | pickle | npy | npz | …


@dataclass
class Assessment:
    """The verdict on a file or folder: trust, reasons, and files."""

    path: str
    trust: Trust = Trust.UNTRUSTED
    reasons: list[Reason] = field(default_factory=list)
    files: dict[str, FileFacts] = field(default_factory=dict)  # by relative path
    seconds: float = 0.0
    schema: int = SCHEMA

    @property
    def refused(self) -> bool:
        """Whether nothing of it may be loaded."""
        return self.trust is Trust.REFUSED

    @property
    def refusals(self) -> list[Reason]:
        """The reasons that are refusals."""
        return [reason for reason in self.reasons if reason.severity is Severity.REFUSAL]

    def refuse(self, reasons: Sequence[Reason]) -> None:
        """Add reasons; any refusal sets the trust to REFUSED."""
        self.reasons += reasons
        if self.refusals:
            self.trust = Trust.REFUSED

    @property
    def digests(self) -> list[str]:
        """sha256 of each loadable file, as for security.pinned."""
        return [f.sha256 for f in self.files.values() if f.format != OTHER and f.sha256]

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-compatible dict; enums become their names."""
        values = asdict(self)
        values["trust"] = self.trust.name
        for row, reason in zip(values["reasons"], self.reasons, strict=True):
            row["severity"] = reason.severity.name
        return values


def may_load(assessment: Assessment, level: SecurityLevel) -> bool:
    """Whether it may be loaded at that level; strict requires CHECKED or PINNED."""
    if level is SecurityLevel.off:
        return True
    required = Trust.CHECKED if level is SecurityLevel.strict else Trust.UNTRUSTED
    return assessment.trust >= required


def check_allowed(assessment: Assessment, policy: FilePolicy) -> None:
    """Raise SecurityError if the policy does not allow it; warn once about an unknown file."""
    path, hint = escape_control_chars(assessment.path), pin_hint(assessment)
    if not may_load(assessment, policy.level):
        why = "security=strict loads only files of this run tree and pinned ones; " + hint
        if assessment.refused:
            first = next(iter(assessment.refusals), "no file of it may be loaded")
            why = escape_control_chars(str(first))
        raise SecurityError(f"{path}: refused: {why}")
    if assessment.trust is Trust.UNTRUSTED and policy.level is SecurityLevel.standard:
        text = "not below outputs/ here, so checked in a sandboxed process and loaded as plain data"
        log.warning("%s: %s; %s", path, text, hint)


def pin_hint(assessment: Assessment) -> str:
    """Return the hint how to allow the file."""
    digests = assessment.digests
    if len(digests) > SHOWN_DIGESTS:
        return "if you know where it comes from, pin the sha256 of each file that job=scan lists"
    return f"if you know where it comes from, add security.pinned=[{','.join(digests)}]"


# -- the origin of a file ----------------------------------------------------------------------


def is_in_run_tree(path: Path, policy: FilePolicy) -> bool:
    """Whether its resolved path lies in a folder of this run tree."""
    try:
        resolved = path.resolve()
        return any(resolved.is_relative_to(folder.resolve()) for folder in policy.run_tree)
    except (OSError, RuntimeError):  # a symlink loop
        return False


def link_roots(folder: Path) -> list[Path]:
    """Return the folders to which links in `folder` may lead."""
    resolved = folder.resolve()
    snapshots = (path.parent for path in (resolved, *resolved.parents))
    cached = next((path for path in snapshots if path.name == "snapshots"), None)
    return [resolved] if cached is None else [resolved, cached.parent / "blobs"]


def check_link(path: Path, roots: Sequence[Path]) -> None:
    """Raise FileRefusal if the path is a link out of `roots`, or cannot be resolved."""
    if not path.is_symlink():
        return
    try:
        target = path.resolve()
    except (OSError, RuntimeError) as error:  # a loop
        raise FileRefusal("link.broken", path.name, str(error), COPY_FILE) from None
    if not target.exists() or not any(map(target.is_relative_to, roots)):
        evidence = f"a link that leads to {target}; it was not opened"
        raise FileRefusal("link.outside", path.name, evidence, COPY_FILE)


def trust_by_digest(path: Path, data: FileBytes, policy: FilePolicy) -> Trust:
    """Return CHECKED or PINNED if the digest is known; hashes only if it could be."""
    if is_in_run_tree(path.parent, policy):
        try:
            if _recorded_digests(path.parent).get(path.name) == data.sha256:
                return Trust.CHECKED
        except (CheckpointError, FileRefusal):
            pass  # `set_trust` reports it
    pinned = policy.pinned and data.sha256 in policy.pinned
    return Trust.PINNED if pinned else Trust.UNTRUSTED


def _recorded_digests(folder: Path) -> dict[str, str]:
    """Return sha256 by file name from the manifest, or {}. CheckpointError, FileRefusal."""
    path = folder / MANIFEST
    check_link(path, link_roots(folder))
    if not path.is_file():
        return {}
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"{path}: has more than {MAX_MANIFEST_BYTES >> 20} MiB")
    files = read_manifest(folder, ListedFiles).files
    recorded = {name: file.sha256 for name, file in files.items()}
    for name in filter(leads_outside, recorded):
        raise FileRefusal("digests.path", MANIFEST, f"lists {name!r}, outside its folder", INTACT)
    return recorded


def set_trust(assessment: Assessment, path: Path, policy: FilePolicy) -> None:
    """Set the trust of a file or folder from its digests and reasons.

    `assessment.files` has paths in the folder. A folder has the trust of its least trusted loadable
    file; a file that differs from the manifest beside it is refused.
    """
    folder = path if path.is_dir() else path.parent
    checked = is_in_run_tree(folder, policy)
    for parent in sorted({(folder / name).parent for name in assessment.files}):
        names = [name for name in assessment.files if (folder / name).parent == parent]
        recorded = _compare_digests(assessment, parent, names)
        loadable = {
            Path(n).name for n in names if assessment.files[n].format != OTHER or is_model_name(n)
        }
        checked = checked and loadable <= set(recorded)
    if assessment.refusals:
        assessment.trust = Trust.REFUSED
    elif assessment.digests and set(assessment.digests) <= set(policy.pinned):
        assessment.trust = Trust.PINNED
    else:
        assessment.trust = Trust.CHECKED if checked else Trust.UNTRUSTED


def _compare_digests(assessment: Assessment, folder: Path, names: list[str]) -> dict[str, str]:
    """Refuse files that differ from the folder's manifest; return its digests."""
    try:
        recorded = _recorded_digests(folder)
    except FileRefusal as refusal:
        assessment.refuse([refusal.reason])
        return {}
    except CheckpointError as error:
        text = f"{escape_control_chars(str(error))}, so its digests are ignored"
        assessment.reasons.append(Reason("digests.damaged", Severity.WARNING, MANIFEST, text))
        return {}
    for name in names:
        digest, expected = assessment.files[name].sha256, recorded.get(Path(name).name)
        if expected is not None and digest and digest != expected:
            expected = escape_control_chars(expected)
            text = f"its sha256 is {digest[:16]}…, but {MANIFEST} lists {expected[:16]}…"
            assessment.refuse([Reason("digests.differ", Severity.REFUSAL, name, text, INTACT)])
    return recorded
