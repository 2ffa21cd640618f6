"""Where a file comes from, and who vouches for it: a manifest of ours, or a digest.

A manifest's own digest shows damage and not who wrote it, so it counts only within the folders of
this run tree (`Policy.own`): whoever can write there need not forge anything.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.errors import CheckpointError
from runner.record.provenance import versions
from runner.record.text import escape_control_chars
from runner.security.gate.format import is_models_name
from runner.security.gate.policy import Policy
from runner.security.sealed import read_sealed
from runner.security.trust import OTHER, Assessment, Reason, Severity, Trust
from runner.storage import Written

MANIFEST = "manifest.json"
BESIDE = (MANIFEST, "replay.md")  # what it does not name, and we put there
FORMAT = 1  # of checkpoints and captures
LIMIT = 1 << 24  # bytes of a manifest that is read


@dataclass(frozen=True)
class Recorded:
    """What a folder's manifest says of the files beside it."""

    files: dict[str, Written] = field(default_factory=dict)
    written_by: str = ""
    fault: str = ""  # in what way it is not good


def is_own(path: Path, policy: Policy) -> bool:
    """Whether it lies, once links are followed, in a folder of this run tree."""
    try:
        place = path.resolve()
        return any(place.is_relative_to(folder.resolve()) for folder in policy.own)
    except (OSError, RuntimeError):  # a loop of links
        return False


def recorded(folder: Path) -> Recorded | None:
    """The manifest of a checkpoint or capture of ours; None where there is none."""
    path = folder / MANIFEST
    if not os.path.isfile(path):
        return None
    try:
        if path.stat().st_size > LIMIT:
            return Recorded(fault=f"{MANIFEST} has more than {LIMIT >> 20} MiB")
        body = read_sealed(path, FORMAT)
        files = {str(name): Written(**entry) for name, entry in body["files"].items()}
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


def vouch(found: Assessment, path: Path, policy: Policy) -> None:
    """Raise the trust of a file or folder, unless it is refused, as far as somebody vouches for it.

    `found.files` must be complete: by their path in the folder, or the one name of a file. Whoever
    vouches must do so for all of them that are ever loaded, and a file that is not what its
    manifest says is refused.
    """
    found.policy, found.versions = policy.digest, versions()
    checked = _recorded(found, path if path.is_dir() else path.parent, policy)
    _sum_up(found, checked, _pinned(found, policy))


def _recorded(found: Assessment, folder: Path, policy: Policy) -> bool:
    """Whether manifests of ours vouch for every file that is loaded; what they deny is refused."""
    own = is_own(folder, policy)
    checked = own
    for place, names in _by_manifest(found, folder).items():
        record = recorded(place)
        loads = any(found.files[name].format != OTHER for name in names)
        if record is None or (record.fault and not loads):
            checked = checked and not loads
        elif record.fault:
            checked = False
            found.reasons.append(Reason(
                "manifest.damaged", Severity.WARNING, f"{place.name}/{MANIFEST}",
                escape_control_chars(record.fault), "it vouches for nothing; take a whole copy",
            ))  # fmt: skip
        else:
            found.written_by = record.written_by
            checked = _fits(found, record, folder, place, names) and checked
            if not own:
                found.reasons.append(Reason(
                    "manifest.foreign", Severity.NOTE, f"{place.name}/{MANIFEST}",
                    "it lies outside this run tree, where anybody can write one",
                ))  # fmt: skip
    return checked


def _by_manifest(found: Assessment, folder: Path) -> dict[Path, list[str]]:
    """The files by the folder of the manifest that is the nearest above them, else by their own."""
    held = {(folder / name).parent for name in found.files if Path(name).name == MANIFEST}
    sorted_out: dict[Path, list[str]] = {}
    for name in found.files:
        place = (folder / name).parent
        above = [at for at in (place, *place.parents) if at in held]
        sorted_out.setdefault(above[0] if above else place, []).append(name)
    return sorted_out


def _may_load(found: Assessment, name: str) -> bool:
    """Whether somebody may load it: for its content, or for its name alone."""
    return found.files[name].format != OTHER or is_models_name(name)


def _fits(found: Assessment, record: Recorded, folder: Path, place: Path, names: list[str]) -> bool:
    """Whether it vouches for each of these files beside and below it that may be loaded."""
    fits = True
    for name in names:
        within = (folder / name).relative_to(place).as_posix()
        facts, written = found.files[name], record.files.get(within)
        if within in BESIDE:
            continue
        if written is None:
            fits = fits and not _may_load(found, name)
            found.reasons.append(Reason(
                "manifest.stray", Severity.NOTE, name, f"{MANIFEST} does not name it",
                "move it elsewhere, unless you put it there",
            ))  # fmt: skip
        elif facts.sha256 and (facts.sha256, facts.size) != (written.sha256, written.size):
            fits = False
            found.refuse([Reason(
                "manifest.digest", Severity.REFUSAL, name,
                f"it is not what {MANIFEST} says: its sha256 is {facts.sha256[:16]}… and should "
                f"be {escape_control_chars(written.sha256)[:16]}…",
                "take a whole copy, or the checkpoint before it",
            )])  # fmt: skip
    return fits


def _pinned(found: Assessment, policy: Policy) -> bool:
    digests = found.digests
    return bool(digests) and set(digests) <= set(policy.pinned)


def _sum_up(found: Assessment, checked: bool, pinned: bool) -> None:
    if found.refusals:
        found.refuse([])
    elif pinned:
        found.trust = Trust.PINNED
    else:
        found.trust = Trust.CHECKED if checked else Trust.UNTRUSTED
