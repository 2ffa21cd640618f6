"""Loading a file that somebody else may have made: digest, sandbox, then the same bytes.

There is no second way that is tried when the first refuses.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.errors import CheckpointError, SecurityError
from runner.record.text import escape_control_chars
from runner.security.config import SecurityLevel
from runner.security.files.file_bytes import FileBytes
from runner.security.files.formats import Refused, check_name
from runner.security.files.loading import (
    NEEDS_PICKLE,
    Examined,
    examine,
    load,
    unpickle,
)
from runner.security.files.policy import FileLimits, FilePolicy, Provenance
from runner.security.files.provenance import is_own, judge, provenance_of
from runner.security.files.sandbox import Sandbox
from runner.security.files.scan import Scanner, list_folder
from runner.security.trust import Assessment, FileFacts, Reason, Severity, Trust, require


@dataclass(frozen=True)
class Opened:
    """What a file held, and its verdict."""

    content: Any  # safetensors: dict of tensors; torch: plain data; npy: array; npz: dict of them
    assessment: Assessment
    metadata: dict[str, str] = field(default_factory=dict)  # of a safetensors file

    @property
    def facts(self) -> FileFacts:
        """Its digest, size and format."""
        return next(iter(self.assessment.files.values()))


def open_file(
    path: Path,
    policy: FilePolicy,
    sha256: str | None = None,
    sandboxed: bool = True,
    sandbox: Sandbox | None = None,
) -> Opened:
    """Read, check and load one file, on the CPU; a foreign one once it passed the sandbox.

    With `sha256`, which a manifest of this run tree or an earlier look gives, it must be that very
    file. Without `sandboxed` a foreign file is examined in this process, and without a warning: for
    arrays of the user's own. `sandbox` is one that is open already. Raises SecurityError with what
    the loader or a rule refused, CheckpointError where it is not there or not what it was.
    """
    try:
        check_name(path.name)  # before all of it is read
    except Refused as refused:
        text = f"{path}: refused: {refused}"
        raise SecurityError(escape_control_chars(text)) from None
    found, off = Assessment(str(path)), policy.level is SecurityLevel.off
    with FileBytes.copy(path) as data:
        if sha256 is not None and data.sha256 != sha256:
            raise CheckpointError(
                f"{path}: damaged: its {data.size} bytes do not match the recorded sha256"
            )
        source = Provenance.OWN
        if sha256 is None:
            source = provenance_of(path, data, policy)
        foreign = source is Provenance.FOREIGN and not off
        if foreign and sandboxed:
            examined = _examine_apart(data, path, policy, sandbox)
        else:
            deep = source is not Provenance.OWN and not off
            limits = FileLimits(expanded=sys.maxsize) if off else policy.limits
            examined = examine(data.data, data.place, path.name, limits, rules=foreign, deep=deep)
        if policy.allows_pickle(data.sha256):
            _unpickle_allowed(data, examined)
        found.files[path.name] = FileFacts(data.sha256, data.size, examined.format)
        found.refuse(examined.reasons)
        if sha256 is None:
            judge(found, path, policy)
        elif not found.refused:
            found.trust = Trust.CHECKED
        if found.refused:
            text = f"{path}: refused: {describe_refusal(found, policy)}"
            raise SecurityError(escape_control_chars(text))
        if sandboxed or policy.level is SecurityLevel.strict:
            require(found, policy)
        return Opened(examined.content, found, examined.metadata)


def admit_folder(folder: Path, policy: FilePolicy) -> Assessment | None:
    """Examine a foreign folder before any of it is loaded; None for one of ours.

    What is loaded of it afterwards must have the digests that were found. Raises SecurityError.
    """
    if policy.level is SecurityLevel.off or is_own(folder, policy):
        return None
    with Scanner(policy) as scanner:
        found = scanner.scan(list_folder(folder))
    require(found, policy)
    return found


def _examine_apart(
    data: FileBytes, path: Path, policy: FilePolicy, sandbox: Sandbox | None
) -> Examined:
    with nullcontext(sandbox) if sandbox is not None else Sandbox() as process:
        kind, reasons = process.examine(data, path.name, policy.limits)
    examined = Examined(kind, reasons)
    if not examined.refused:
        examined.content, examined.metadata = load(data.place, kind)
    return examined


def _unpickle_allowed(data: FileBytes, examined: Examined) -> None:
    """Run the pickle of a file whose digest was typed, where only that loads it."""
    refusals = [r for r in examined.reasons if r.severity is Severity.REFUSAL]
    if [reason.code for reason in refusals] != [NEEDS_PICKLE]:
        return
    evidence = f"it is unpickled and may run code, as security.allow_pickle has {data.sha256[:12]}…"
    examined.reasons.remove(refusals[0])
    examined.reasons.append(Reason("pickle.allowed", Severity.WARNING, "", evidence))
    examined.content = unpickle(data.place, examined.format)


def describe_refusal(found: Assessment, policy: FilePolicy) -> str:
    """The first refusal, and what to type where the file may be unpickled all the same."""
    first = found.refusals[0]
    text = str(first)
    sha256 = next(iter(found.files.values())).sha256
    if first.code == NEEDS_PICKLE and policy.level is not SecurityLevel.strict:
        text += f"; or, if you trust who made it, add security.allow_pickle=[{sha256}]"
    return text
