"""Loading a file of unknown origin: digest, sandbox, then the same bytes.

There is no second way that is tried when the first refuses. Our own files go through the same
restricted loaders: a manifest that was made by hand fits its files, whatever is in them.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from runner.errors import CheckpointError, SecurityError
from runner.findings import Reason, Severity, Trust
from runner.record.text import escape_control_chars
from runner.security.config import SecurityLevel
from runner.security.files.encode import TIED
from runner.security.files.file_bytes import FileBytes
from runner.security.files.formats import Refused, check_name, printable
from runner.security.files.loading import NEEDS_PICKLE, Examined, examine, load, unpickle
from runner.security.files.policy import FileLimits, FilePolicy
from runner.security.files.provenance import (
    Assessment,
    FileFacts,
    is_own,
    judge,
    known_trust,
    require,
)
from runner.security.files.sandbox import Sandbox
from runner.security.files.scan import Scanner, list_folder

STRICT = FilePolicy(SecurityLevel.strict)  # no pickle, whatever a config allows


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

    With `sha256`, which a manifest of this run tree or an earlier check gives, it must be that very
    file. Without `sandboxed` a foreign file is examined in this process, and without a warning: for
    arrays of the user's own. `sandbox` is one that is open already. Raises SecurityError with what
    the loader or a rule refused, CheckpointError where it is missing or not what it was.
    """
    try:
        check_name(path.name)  # before all of it is read
    except Refused as refused:
        raise _refused(path, str(refused)) from None
    assessment = Assessment(str(path))
    with FileBytes.copy(path) as data:
        if sha256 is not None and data.sha256 != sha256:
            raise CheckpointError(
                f"{path}: damaged: its {data.size} bytes do not match the recorded sha256"
            )
        trust = Trust.CHECKED if sha256 is not None else known_trust(path, data, policy)
        examined = _examine(data, path, policy, trust, sandboxed, sandbox)
        if policy.allows_pickle(data.sha256):
            _unpickle_allowed(data, examined)
        assessment.files[path.name] = FileFacts(data.sha256, data.size, examined.format)
        assessment.refuse(examined.reasons)
        if sha256 is None:
            judge(assessment, path, policy)
        elif not assessment.refused:
            assessment.trust = Trust.CHECKED
        if assessment.refused:
            raise _refused(path, describe_refusal(assessment, policy))
        if sandboxed or policy.level is SecurityLevel.strict:
            require(assessment, policy)
        return Opened(examined.content, assessment, examined.metadata)


def _refused(path: Path, why: str) -> SecurityError:
    return SecurityError(escape_control_chars(f"{path}: refused: {why}"))


def _examine(
    data: FileBytes,
    path: Path,
    policy: FilePolicy,
    trust: Trust,
    sandboxed: bool,
    sandbox: Sandbox | None,
) -> Examined:
    off, foreign = policy.level is SecurityLevel.off, trust is Trust.UNTRUSTED
    if not foreign or off or not sandboxed:
        limits = FileLimits(expanded=sys.maxsize) if off else policy.limits
        deep = trust is not Trust.CHECKED and not off
        rules = foreign and not off
        return examine(data.data, data.place, path.name, limits, rules=rules, deep=deep)
    with nullcontext(sandbox) if sandbox is not None else Sandbox() as process:
        examined = Examined(*process.examine(data, path.name, policy.limits))
    if not examined.refused:
        examined.content, examined.metadata = load(data.place, examined.format)
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


def describe_refusal(assessment: Assessment, policy: FilePolicy) -> str:
    """The first refusal, and what to type where the file may be unpickled all the same."""
    first = assessment.refusals[0]
    sha256 = next(iter(assessment.files.values())).sha256
    if first.code == NEEDS_PICKLE and policy.level is not SecurityLevel.strict:
        return f"{first}; or, if you trust who made it, add security.allow_pickle=[{sha256}]"
    return str(first)


def admit_folder(folder: Path, policy: FilePolicy) -> Assessment | None:
    """Examine a foreign folder before any of it is loaded; None for one of ours.

    What is loaded of it afterwards must have these digests. Raises SecurityError.
    """
    if policy.level is SecurityLevel.off or is_own(folder, policy):
        return None
    with Scanner(policy) as scanner:
        assessment = scanner.scan(list_folder(folder))
    require(assessment, policy)
    return assessment


def read_tensors(path: Path, sha256: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU; tied names get the same tensor.

    Raises SecurityError for a file that is refused though its digest fits, and CheckpointError, in
    one line, for one that is missing or not what it was.
    """
    opened = open_file(path, STRICT, sha256)
    tensors: dict[str, Tensor] = opened.content
    _expect(opened, path, "safetensors")
    try:
        for alias, name in json.loads(opened.metadata.get(TIED, "{}")).items():
            if alias in tensors:
                raise ValueError(f"{alias!r} is a tensor, and is said to be another one's name")
            tensors[alias] = tensors[name]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        line = printable(str(error) or type(error).__name__, 200)
        raise CheckpointError(f"{path}: not a safetensors file: {line}") from error
    return tensors


def read_state(path: Path, sha256: str) -> Any:
    """What `torch.save` wrote after `encode`, on the CPU.

    Raises SecurityError for a file that wants more than plain data, and CheckpointError for one
    that is missing or not what it was.
    """
    opened = open_file(path, STRICT, sha256)
    _expect(opened, path, "torch_zip")
    return opened.content


def read_arrays(path: Path, policy: FilePolicy) -> Any:
    """A user's `.npy` as one array, or `.npz` as a dict of them; never a pickle.

    Raises SecurityError for what is refused.
    """
    opened = open_file(path, policy, sandboxed=False)
    _expect(opened, path, "npy", "npz")
    return opened.content


def _expect(opened: Opened, path: Path, *kinds: str) -> None:
    kind = opened.facts.format
    if kind not in kinds:
        raise SecurityError(f"{path}: refused: it is {kind} and should be {kinds[0]}")
