"""Loading a file that somebody else may have made: digest, sandbox, then the same bytes.

There is no second way that is tried when the first refuses.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.errors import CheckpointError, SecurityError
from runner.record.text import escape_control_chars
from runner.security.config import SecurityLevel
from runner.security.files.file_bytes import FileBytes
from runner.security.files.formats import Refused, check_name, identify
from runner.security.files.loading import (
    NEEDS_PICKLE,
    Examined,
    examine,
    load,
    parser_refusal,
    unpickle,
)
from runner.security.files.policy import Policy, Provenance
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
    policy: Policy,
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
    start = time.perf_counter()
    found = Assessment(str(path), policy=policy.digest)
    _check_before_reading(path)
    with FileBytes.copy(path) as data:
        if sha256 is not None and data.sha256 != sha256:
            raise CheckpointError(
                f"{path}: damaged: its {data.size} bytes do not match the recorded sha256"
            )
        source = _provenance(data, path, policy, sha256)
        if policy.level is SecurityLevel.off:
            examined = _load_unchecked(data, path)
        elif source is Provenance.FOREIGN and sandboxed:
            examined = _examine_apart(data, path, policy, sandbox)
        else:
            examined = examine(
                data.data,
                data.place,
                path.name,
                policy.limits,
                rules=source is Provenance.FOREIGN,
                deep=source is not Provenance.OWN,
            )
        if policy.allows_pickle(data.sha256):
            _unpickle_allowed(data, examined)
        found.files[path.name] = FileFacts(data.sha256, data.size, examined.format)
        found.refuse(examined.reasons)
        _require(found, path, policy, sha256 is not None, sandboxed)
        found.seconds = time.perf_counter() - start
        return Opened(examined.content, found, examined.metadata)


def admit_folder(folder: Path, policy: Policy) -> Assessment | None:
    """Examine a foreign folder before any of it is loaded; None for one of ours.

    What is loaded of it afterwards must have the digests that were found. Raises SecurityError.
    """
    if policy.level is SecurityLevel.off or is_own(folder, policy):
        return None
    with Scanner(policy) as scanner:
        found = scanner.scan(list_folder(folder))
    require(found, policy)
    return found


def _check_before_reading(path: Path) -> None:
    """Refuse by the name alone what would be refused, before all of it is read."""
    try:
        check_name(path.name)
    except Refused as refused:
        raise SecurityError(
            f"{escape_control_chars(str(path))}: refused: {escape_control_chars(str(refused))}"
        ) from None


def _provenance(data: FileBytes, path: Path, policy: Policy, sha256: str | None) -> Provenance:
    if sha256 is not None:
        return Provenance.OWN
    if not policy.pinned and not is_own(path.parent, policy):
        return Provenance.FOREIGN  # without waiting for the digest
    return provenance_of(path, data.sha256, policy)


def _examine_apart(
    data: FileBytes, path: Path, policy: Policy, sandbox: Sandbox | None
) -> Examined:
    with nullcontext(sandbox) if sandbox is not None else Sandbox() as process:
        kind, reasons = process.examine(data, path.name, policy.limits)
    examined = Examined(kind, reasons)
    if not examined.refused:
        examined.content, examined.metadata = load(data.place, kind)
    return examined


def _load_unchecked(data: FileBytes, path: Path) -> Examined:
    """security=off: no rules. Nothing is unpickled all the same."""
    kind = "unknown"
    try:
        kind = identify(data.data, path.name)
        return Examined(kind, [], *load(data.place, kind))
    except Refused as refused:
        return Examined(kind, [refused.reason])
    except Exception as error:  # a parser's own refusal, of a dozen types
        return Examined(kind, [parser_refusal(error, kind)])


def _unpickle_allowed(data: FileBytes, examined: Examined) -> None:
    """Run the pickle of a file whose digest was typed, where only that loads it."""
    refusals = [r for r in examined.reasons if r.severity is Severity.REFUSAL]
    if [reason.code for reason in refusals] != [NEEDS_PICKLE]:
        return
    evidence = f"it is unpickled and may run code, as security.allow_pickle has {data.sha256[:12]}…"
    examined.reasons.remove(refusals[0])
    examined.reasons.append(Reason("pickle.allowed", Severity.WARNING, "", evidence))
    examined.content = unpickle(data.place, examined.format)


def _require(
    found: Assessment, path: Path, policy: Policy, recorded: bool, sandboxed: bool
) -> None:
    """Raise SecurityError where the policy does not let it in."""
    if not recorded:
        judge(found, path, policy)
    elif not found.refused:
        found.trust = Trust.CHECKED
    if found.refused:
        raise SecurityError(
            f"{escape_control_chars(found.path)}: refused: {describe_refusal(found, policy)}"
        )
    if sandboxed or policy.level is SecurityLevel.strict:
        require(found, policy)


def describe_refusal(found: Assessment, policy: Policy) -> str:
    """The first refusal, and what to type where the file may be unpickled all the same."""
    first = found.refusals[0]
    text = str(first)
    sha256 = next(iter(found.files.values())).sha256
    if first.code == NEEDS_PICKLE and policy.level is not SecurityLevel.strict:
        text += f"; or, if you trust who made it, add security.allow_pickle=[{sha256}]"
    return text
