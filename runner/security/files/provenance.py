"""Where files come from: a manifest of this run tree, a digest that the user pinned, or unknown.

A manifest's own digest shows damage and not its author, so it counts only within the folders of
this run tree (`FilePolicy.own`): whoever can write there need not forge anything.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.errors import CheckpointError
from runner.record.storage import FileDigest
from runner.record.text import escape_control_chars
from runner.security.files.file_bytes import FileBytes
from runner.security.files.formats import is_model_name
from runner.security.files.policy import FilePolicy, Provenance
from runner.security.sealed import read_sealed
from runner.security.trust import OTHER, Assessment, Reason, Severity, Trust

MANIFEST = "manifest.json"
UNLISTED = (MANIFEST, "replay.md")  # files of ours that it does not name
FORMAT = 1  # of checkpoints and captures
MOST_BYTES = 1 << 24  # of a manifest or a list of digests that is read
SUMS = "SHA256SUMS"
SUM_LINE = re.compile(r"([0-9a-fA-F]{64})[ \t]+\*?(.+)")


@dataclass(frozen=True)
class Recorded:
    """What a folder's manifest says of the files beside it."""

    files: dict[str, FileDigest] = field(default_factory=dict)
    written_by: str = ""
    fault: str = ""  # why it cannot be believed


def is_own(path: Path, policy: FilePolicy) -> bool:
    """Whether it lies, once links are followed, in a folder of this run tree."""
    try:
        place = path.resolve()
        return any(place.is_relative_to(folder.resolve()) for folder in policy.own)
    except (OSError, RuntimeError):  # a loop of links
        return False


def read_recorded(folder: Path) -> Recorded | None:
    """The manifest of a checkpoint or capture of ours; None where there is none."""
    path = folder / MANIFEST
    if not os.path.isfile(path):
        return None
    try:
        if path.stat().st_size > MOST_BYTES:
            return Recorded(fault=f"{MANIFEST} has more than {MOST_BYTES >> 20} MiB")
        body = read_sealed(path, FORMAT)
        files = {str(name): FileDigest(**entry) for name, entry in body["files"].items()}
        if not all(type(w.size) is int and type(w.sha256) is str for w in files.values()):
            raise TypeError
        written_by = _writer(body, folder)
    except CheckpointError as error:
        return Recorded(fault=str(error))
    except (OSError, LookupError, TypeError, AttributeError):
        return Recorded(fault=f"{path}: not a manifest of the runner")
    return Recorded(files, written_by)


def _writer(body: Mapping[str, Any], folder: Path) -> str:
    """What it says of the run that wrote it; a checkpoint's run is named by its folders."""
    above = [place.name for place in folder.resolve().parents]
    run = "/".join(reversed(above[1:3])) if above[:1] == ["checkpoints"] else body.get("name", "")
    maker = body.get("created_by") or body.get("versions", {}).get("runner", "")
    parts = {"run": run, "config": str(body.get("config_hash", ""))[:12], "runner": maker}
    return " ".join(
        f"{k} {escape_control_chars(str(value))[:100]}" for k, value in parts.items() if value
    )


def provenance_of(path: Path, data: FileBytes, policy: FilePolicy) -> Provenance:
    """Where a file's digest is known from; it is only waited for where it may be known."""
    if is_own(path.parent, policy):
        record = read_recorded(path.parent)
        written = record.files.get(path.name) if record is not None else None
        if written is not None and written.sha256 == data.sha256:
            return Provenance.OWN
    pinned = policy.pinned and data.sha256 in policy.pinned
    return Provenance.PINNED if pinned else Provenance.FOREIGN


def read_sums(folder: Path) -> dict[str, str]:
    """sha256 by file name, of the folder's SHA256SUMS; empty where there is none.

    Raises CheckpointError for one that is malformed.
    """
    path = folder / SUMS
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > MOST_BYTES:
            raise CheckpointError(f"{path}: has more than {MOST_BYTES >> 20} MiB")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    found: dict[str, str] = {}
    for line in filter(str.strip, lines):
        match = SUM_LINE.fullmatch(line)
        if match is None:
            raise CheckpointError(f"{path}: is no list of sha256 and file names: {line[:100]!r}")
        found[match[2].removeprefix("./")] = match[1].lower()
    return found


def judge(found: Assessment, path: Path, policy: FilePolicy) -> None:
    """Set the trust of a file or folder, from its digests and reasons.

    `found.files` must be complete: by their path in the folder, or the one name of a file. A
    folder has the trust of its least trusted file that can be loaded, and a file that differs from
    its manifest or SHA256SUMS is refused.
    """
    folder = path if path.is_dir() else path.parent
    _compare_sums(found, folder)
    checked = _compare_manifests(found, folder, policy)
    if found.refusals:
        found.trust = Trust.REFUSED
    elif found.digests and set(found.digests) <= set(policy.pinned):
        found.trust = Trust.PINNED
    else:
        found.trust = Trust.CHECKED if checked else Trust.UNTRUSTED


def _compare_sums(found: Assessment, folder: Path) -> None:
    for place in {(folder / name).parent for name in found.files}:
        try:
            sums = read_sums(place)
        except CheckpointError as error:
            found.reasons.append(Reason("sums.malformed", Severity.WARNING, SUMS, str(error)))
            continue
        for name, facts in found.files.items():
            listed = sums.get((folder / name).name) if (folder / name).parent == place else None
            if listed is not None and facts.sha256 and listed != facts.sha256:
                found.refuse([_other_digest("sums.digest", name, SUMS, facts.sha256, listed)])


def _compare_manifests(found: Assessment, folder: Path, policy: FilePolicy) -> bool:
    """Whether manifests of ours list every file that is loaded; what they deny is refused."""
    checked = is_own(folder, policy)
    for place, names in _by_manifest(found, folder).items():
        loads = any(found.files[name].format != OTHER for name in names)
        record = read_recorded(place)
        if record is None:
            checked = checked and not loads
            continue
        where = f"{place.name}/{MANIFEST}"
        if record.fault:
            checked = checked and not loads
            text = f"{escape_control_chars(record.fault)}, so its digests do not count"
            found.reasons.append(Reason("manifest.damaged", Severity.WARNING, where, text))
            continue
        found.written_by = record.written_by
        checked = _compare_recorded(found, record, folder, place, names) and checked
        if not is_own(folder, policy):
            text = "it lies outside this run tree, where anybody can write one"
            found.reasons.append(Reason("manifest.foreign", Severity.NOTE, where, text))
    return checked


def _by_manifest(found: Assessment, folder: Path) -> dict[Path, list[str]]:
    """The files by the folder of the nearest manifest above them, else by their own."""
    with_manifest = {(folder / name).parent for name in found.files if Path(name).name == MANIFEST}
    groups: dict[Path, list[str]] = {}
    for name in found.files:
        place = (folder / name).parent
        above = [at for at in (place, *place.parents) if at in with_manifest]
        groups.setdefault(above[0] if above else place, []).append(name)
    return groups


def _compare_recorded(
    found: Assessment, record: Recorded, folder: Path, place: Path, names: list[str]
) -> bool:
    """Whether the manifest lists each of these files beside and below it that may be loaded."""
    listed = True
    for name in names:
        within = (folder / name).relative_to(place).as_posix()
        facts, written = found.files[name], record.files.get(within)
        if within in UNLISTED:
            continue
        if written is None:
            listed = listed and facts.format == OTHER and not is_model_name(name)
            text = f"{MANIFEST} does not name it"
            found.reasons.append(Reason("manifest.stray", Severity.NOTE, name, text))
        elif facts.sha256 and (facts.sha256, facts.size) != (written.sha256, written.size):
            listed = False
            reason = _other_digest("manifest.digest", name, MANIFEST, facts.sha256, written.sha256)
            found.refuse([reason])
    return listed


def _other_digest(code: str, name: str, source: str, sha256: str, wanted: str) -> Reason:
    return Reason(
        code,
        Severity.REFUSAL,
        name,
        f"its sha256 is {sha256[:16]}…, and {source} says {escape_control_chars(wanted)[:16]}…",
        "take a whole copy, or the checkpoint before it",
    )
