"""Every file that somebody else may have made comes in here.

It is read once: what was hashed and checked is what is loaded. There is no second way in that is
tried when the first refuses.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.errors import CheckpointError, SecurityError
from runner.record.text import escape_control_chars
from runner.security.config import SecurityLevel
from runner.security.gate.assessing import Assessor, assess_folder
from runner.security.gate.child import Child
from runner.security.gate.examine import Examined, examine, malformed
from runner.security.gate.folder import thing_of
from runner.security.gate.format import identify
from runner.security.gate.glance import refusal
from runner.security.gate.held import Held, Peeked, hold
from runner.security.gate.load import PICKLED, loaded, unpickled
from runner.security.gate.policy import Policy, Whose
from runner.security.gate.provenance import is_own, vouch
from runner.security.trust import Assessment, FileFacts, Severity, Trust, require


@dataclass(frozen=True)
class Opened:
    """What a file held, and what is thought of it."""

    content: Any  # safetensors: dict of tensors; torch: plain data; npy: array; npz: dict of them
    assessment: Assessment
    metadata: dict[str, str] = field(default_factory=dict)  # of a safetensors file


def open_file(path: Path, policy: Policy, sha256: str | None = None, apart: bool = True) -> Opened:
    """Read, check and load one file, on the CPU; a foreign one once it passed a limited process.

    With `sha256`, which a manifest of this run tree gives, it must be that very file, and nothing
    more is asked of it; structure and types are checked all the same. Without `apart` a foreign
    file is looked at in this process only, and without a warning: for arrays of the user's own.
    Raises SecurityError naming the type, the place in the file, why, and the way out;
    CheckpointError where it is not there or not what it was.
    """
    start = time.perf_counter()
    if sha256 is None:
        _glance(path, policy)
    with hold(path) as held:
        if sha256 is not None and held.sha256 != sha256:
            raise CheckpointError(
                f"{path}: damaged: its {held.size} bytes do not match the recorded sha256"
            )
        found = Assessment(str(path), policy=policy.digest)
        if policy.level is SecurityLevel.off:
            examined = _unchecked(held, path, policy)
        else:
            whose = _whose(held.sha256, sha256, policy)
            if whose is Whose.FOREIGN and apart:
                _look_apart(found, held, path, policy)
            # once more, here: no tensor comes out of the limited process
            examined = examine(held.view, path.name, policy, whose=whose)
        _note(found, held, path, Examined(examined.format, examined.reasons))
        if sha256 is None:
            vouch(found, path, policy)
        elif not found.refused:
            found.trust = Trust.CHECKED
        if found.refused and policy.level is SecurityLevel.off:  # it could not even be parsed
            raise SecurityError(
                f"{escape_control_chars(found.path)}: refused: "
                f"{escape_control_chars(str(found.refusals[0]))}"
            )
        if found.refused or apart or policy.level is SecurityLevel.strict:
            require(found, policy)
        found.seconds = time.perf_counter() - start
        content = unpickled(held.view, examined.format) if examined.pickled else examined.content
        return Opened(content, found, examined.metadata)


def assess_file(path: Path, policy: Policy, deep: bool = True) -> Assessment:
    """The verdict alone; nothing is raised for what is wrong with the file.

    Without `deep` its structure is looked at and its values are not.
    """
    with Assessor(policy, deep) as assessor:
        return assessor.assess(thing_of(path))


def admit_folder(folder: Path, policy: Policy) -> Assessment | None:
    """Look at a folder of somebody else's before any of it is read; None for one of ours.

    What is loaded of it afterwards must have the digests that were found. Raises SecurityError.
    """
    if policy.level is SecurityLevel.off or is_own(folder, policy):
        return None
    found = assess_folder(folder, policy)
    require(found, policy)
    return found


def _whose(found: str, recorded: str | None, policy: Policy) -> Whose:
    if recorded is not None:
        return Whose.OWN
    return Whose.PINNED if found in policy.pinned else Whose.FOREIGN


def _glance(path: Path, policy: Policy) -> None:
    """Refuse what can be refused before all of it is read: it may be large."""
    with Peeked(path) as data:
        reason = refusal(data, path.name, policy)
    if reason is not None:
        raise SecurityError(
            f"{escape_control_chars(str(path))}: refused: {escape_control_chars(str(reason))}"
        )


def _look_apart(found: Assessment, held: Held, path: Path, policy: Policy) -> None:
    with Child() as child:
        kind, reasons = child.examine(held, path.name, policy)
    if any(reason.severity is Severity.REFUSAL for reason in reasons):
        _note(found, held, path, Examined(kind, reasons))
        require(found, policy)


def _note(found: Assessment, held: Held, path: Path, examined: Examined) -> None:
    found.files[path.name] = FileFacts(held.sha256, held.size, examined.format)
    found.refuse(examined.reasons)


def _unchecked(held: Held, path: Path, policy: Policy) -> Examined:
    """With security=off nothing is looked at; yet no pickle runs that was not named by digest."""
    try:
        kind = identify(held.view, path.name)
        if held.sha256 in policy.allow_pickle and kind in PICKLED:
            return Examined(kind, pickled=True)
        return Examined(kind, content=loaded(held.view, kind))
    except Exception as error:  # whatever the parsers raise
        return Examined(reasons=[malformed(error)])
