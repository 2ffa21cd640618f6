"""The verdict on a file: its reasons, and how far it may be trusted because of its origin.

The origin is a manifest of this run tree, a digest that the user pinned, or unknown. A manifest's
own digest shows damage and not its author, so it counts only within the folders of this run tree
(`FilePolicy.own`): whoever can write there need not forge anything.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runner.errors import CheckpointError, SecurityError
from runner.findings import Reason, Severity, Trust
from runner.record.text import escape_control_chars
from runner.security.config import SecurityLevel
from runner.security.files.file_bytes import FileBytes
from runner.security.files.formats import is_model_name
from runner.security.files.policy import FilePolicy
from runner.security.sealed import read_sealed

log = logging.getLogger("runner")

SCHEMA = 1
OTHER = "other"  # the format of a file that the runner never loads
SHOWN_DIGESTS = 4  # in one message
MANIFEST = "manifest.json"
FORMAT = 1  # of checkpoints and captures
MOST_BYTES = 1 << 24  # of a manifest or a list of digests that is read
SUMS = "SHA256SUMS"
SUM_LINE = re.compile(r"([0-9a-fA-F]{64})[ \t]+\*?(.+)")


@dataclass
class FileFacts:
    """One file, as it was when it was read."""

    sha256: str
    size: int
    format: str  # by magic and name: safetensors | torch_zip | pickle | npy | npz | …


@dataclass
class Assessment:
    """The verdict on a file or a folder, with its reasons and where it comes from."""

    path: str
    trust: Trust = Trust.UNTRUSTED
    reasons: list[Reason] = field(default_factory=list)
    files: dict[str, FileFacts] = field(default_factory=dict)  # by path within `path`
    seconds: float = 0.0
    schema: int = SCHEMA

    @property
    def refused(self) -> bool:
        """Whether nothing of it may be loaded."""
        return self.trust is Trust.REFUSED

    @property
    def refusals(self) -> list[Reason]:
        """Why not."""
        return [reason for reason in self.reasons if reason.severity is Severity.REFUSAL]

    def refuse(self, reasons: Sequence[Reason]) -> None:
        """Add the reasons; a refusal among them is final."""
        self.reasons += reasons
        if self.refusals:
            self.trust = Trust.REFUSED

    @property
    def digests(self) -> list[str]:
        """sha256 of each file that can be loaded: what to put into security.pinned."""
        return [f.sha256 for f in self.files.values() if f.format != OTHER and f.sha256]

    def as_dict(self) -> dict[str, Any]:
        """In plain values; enums by their names."""
        values = asdict(self)
        values["trust"] = self.trust.name
        for row, reason in zip(values["reasons"], self.reasons, strict=True):
            row["severity"] = reason.severity.name
        return values


# -- the least trust that a level asks for -----------------------------------------------------


def enough(assessment: Assessment, level: SecurityLevel) -> bool:
    """Whether it may be loaded at that level; CHECKED is only ever what this run tree wrote."""
    if level is SecurityLevel.off:
        return True
    least = Trust.CHECKED if level is SecurityLevel.strict else Trust.UNTRUSTED
    return assessment.trust >= least


def require(assessment: Assessment, policy: FilePolicy) -> None:
    """Raise SecurityError where the policy does not let it in; one warning for an unknown file."""
    path, pin = escape_control_chars(assessment.path), way_in(assessment)
    if not enough(assessment, policy.level):
        why = "security=strict loads only files of this run tree and pinned ones; " + pin
        if assessment.refused:
            first = next(iter(assessment.refusals), "nothing of it may be loaded")
            why = escape_control_chars(str(first))
        raise SecurityError(f"{path}: refused: {why}")
    if assessment.trust is Trust.UNTRUSTED and policy.level is SecurityLevel.standard:
        text = "unknown file, checked in a sandboxed process and loaded as plain data"
        log.warning("%s: %s; %s", path, text, pin)


def way_in(assessment: Assessment) -> str:
    """What to type once one has made sure of it."""
    digests = assessment.digests
    if len(digests) > SHOWN_DIGESTS:
        return "if you know where it comes from, pin the sha256 of each file that job=scan lists"
    return f"if you know where it comes from, add security.pinned=[{','.join(digests)}]"


# -- where a file comes from -------------------------------------------------------------------


def is_own(path: Path, policy: FilePolicy) -> bool:
    """Whether it lies, once links are followed, in a folder of this run tree."""
    try:
        place = path.resolve()
        return any(place.is_relative_to(folder.resolve()) for folder in policy.own)
    except (OSError, RuntimeError):  # a loop of links
        return False


def known_trust(path: Path, data: FileBytes, policy: FilePolicy) -> Trust:
    """CHECKED or PINNED where a file's digest is known; it is only waited for where it may be."""
    if is_own(path.parent, policy):
        try:
            if _listed_digests(path.parent, MANIFEST).get(path.name) == data.sha256:
                return Trust.CHECKED
        except CheckpointError:
            pass  # a damaged manifest, which `judge` reports
    pinned = policy.pinned and data.sha256 in policy.pinned
    return Trust.PINNED if pinned else Trust.UNTRUSTED


def _listed_digests(folder: Path, source: str) -> dict[str, str]:
    """sha256 by file name, of the folder's manifest or SHA256SUMS; empty where it has none.

    Raises CheckpointError for one that is malformed.
    """
    path = folder / source
    if not path.is_file():
        return {}
    if path.stat().st_size > MOST_BYTES:
        raise CheckpointError(f"{path}: has more than {MOST_BYTES >> 20} MiB")
    return _read_sums(path) if source == SUMS else _read_manifest(path)


def _read_manifest(path: Path) -> dict[str, str]:
    try:
        files = read_sealed(path, FORMAT)["files"]
        return {name: str(entry["sha256"]) for name, entry in files.items()}
    except (LookupError, TypeError, AttributeError):
        raise CheckpointError(f"{path}: not a manifest of the runner") from None


def _read_sums(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    sums: dict[str, str] = {}
    for line in filter(str.strip, lines):
        match = SUM_LINE.fullmatch(line)
        if match is None:
            raise CheckpointError(f"{path}: is no list of sha256 and file names: {line[:100]!r}")
        sums[match[2].removeprefix("./")] = match[1].lower()
    return sums


def judge(assessment: Assessment, path: Path, policy: FilePolicy) -> None:
    """Set the trust of a file or folder, from its digests and reasons.

    `assessment.files` must be complete: by their path in the folder, or the one name of a file. A
    folder has the trust of its least trusted file that can be loaded; a file that differs from the
    manifest or SHA256SUMS beside it is refused.
    """
    folder = path if path.is_dir() else path.parent
    checked = is_own(folder, policy)
    for place in sorted({(folder / name).parent for name in assessment.files}):
        names = [name for name in assessment.files if (folder / name).parent == place]
        _compare(assessment, place, names, SUMS)
        recorded = _compare(assessment, place, names, MANIFEST)
        loadable = {
            Path(name).name
            for name in names
            if assessment.files[name].format != OTHER or is_model_name(name)
        }
        checked = checked and loadable <= set(recorded)
    if assessment.refusals:
        assessment.trust = Trust.REFUSED
    elif assessment.digests and set(assessment.digests) <= set(policy.pinned):
        assessment.trust = Trust.PINNED
    else:
        assessment.trust = Trust.CHECKED if checked else Trust.UNTRUSTED


def _compare(assessment: Assessment, folder: Path, names: list[str], source: str) -> dict[str, str]:
    """Refuse the files of the folder that differ from its list of digests, and return that list."""
    try:
        listed = _listed_digests(folder, source)
    except CheckpointError as error:
        text = f"{escape_control_chars(str(error))}, so its digests do not count"
        assessment.reasons.append(Reason("digests.damaged", Severity.WARNING, source, text))
        return {}
    for name in names:
        digest, wanted = assessment.files[name].sha256, listed.get(Path(name).name)
        if wanted is not None and digest and digest != wanted:
            wanted = escape_control_chars(wanted)
            text = f"its sha256 is {digest[:16]}…, and {source} says {wanted[:16]}…"
            way_out = "take a whole copy, or the checkpoint before it"
            reason = Reason("digests.differ", Severity.REFUSAL, name, text, way_out)
            assessment.refuse([reason])
    return listed
