"""Where files come from: a manifest of this run tree, a digest that the user pinned, or unknown.

A manifest's own digest shows damage and not its author, so it counts only within the folders of
this run tree (`FilePolicy.own`): whoever can write there need not forge anything.
"""

from __future__ import annotations

import re
from pathlib import Path

from runner.errors import CheckpointError
from runner.findings import Reason, Severity, Trust
from runner.record.text import escape_control_chars
from runner.security.files.file_bytes import FileBytes
from runner.security.files.formats import is_model_name
from runner.security.files.policy import FilePolicy
from runner.security.sealed import read_sealed
from runner.security.trust import OTHER, Assessment

MANIFEST = "manifest.json"
FORMAT = 1  # of checkpoints and captures
MOST_BYTES = 1 << 24  # of a manifest or a list of digests that is read
SUMS = "SHA256SUMS"
SUM_LINE = re.compile(r"([0-9a-fA-F]{64})[ \t]+\*?(.+)")


def is_own(path: Path, policy: FilePolicy) -> bool:
    """Whether it lies, once links are followed, in a folder of this run tree."""
    try:
        place = path.resolve()
        return any(place.is_relative_to(folder.resolve()) for folder in policy.own)
    except (OSError, RuntimeError):  # a loop of links
        return False


def known_trust(path: Path, data: FileBytes, policy: FilePolicy) -> Trust:
    """CHECKED or PINNED where a file's digest is known; it is only waited for where it may be."""
    if is_own(path.parent, policy) and (path.parent / MANIFEST).is_file():
        try:
            if read_recorded(path.parent).get(path.name) == data.sha256:
                return Trust.CHECKED
        except CheckpointError:
            pass  # a damaged manifest, which `judge` reports
    pinned = policy.pinned and data.sha256 in policy.pinned
    return Trust.PINNED if pinned else Trust.UNTRUSTED


def read_recorded(folder: Path) -> dict[str, str]:
    """sha256 by file name, of a checkpoint's or capture's manifest; CheckpointError."""
    path = _bounded(folder / MANIFEST)
    try:
        recorded = {
            name: entry["sha256"] for name, entry in read_sealed(path, FORMAT)["files"].items()
        }
        if all(type(digest) is str for digest in recorded.values()):
            return recorded
    except (LookupError, TypeError, AttributeError):
        pass
    raise CheckpointError(f"{path}: not a manifest of the runner")


def read_sums(folder: Path) -> dict[str, str]:
    """sha256 by file name, of the folder's SHA256SUMS; CheckpointError where it is malformed."""
    path = _bounded(folder / SUMS)
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


def _bounded(path: Path) -> Path:
    if path.stat().st_size > MOST_BYTES:
        raise CheckpointError(f"{path}: has more than {MOST_BYTES >> 20} MiB")
    return path


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
    if not (folder / source).is_file():
        return {}
    try:
        listed = read_sums(folder) if source == SUMS else read_recorded(folder)
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
