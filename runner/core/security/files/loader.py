"""Load a file of unknown origin: digest, sandbox, then the same bytes.

There is no fallback when the first way refuses. Our own files use the same restricted loaders,
since a forged manifest can match any files.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from runner import rooms
from runner.core.errors import CheckpointError, SecurityError
from runner.core.findings import Reason, Severity, Trust
from runner.core.record.text import escape_control_chars, summarize_error
from runner.core.schemas.security import SecurityLevel
from runner.core.security.files import parsing, provenance
from runner.core.security.files.encode import TIED
from runner.core.security.files.file_bytes import FileBytes
from runner.core.security.files.folder_rules import check_folder
from runner.core.security.files.formats import FileRefusal, check_name, printable
from runner.core.security.files.parsing import NEEDS_PICKLE, Examination
from runner.core.security.files.policy import FileLimits, FilePolicy
from runner.core.security.files.provenance import Assessment, FileFacts, check_allowed

STRICT_POLICY = FilePolicy(SecurityLevel.strict)  # no pickle, even if the config allows it


@dataclass(frozen=True)
class LoadedFile:
    """A file's content, with its verdict."""

    content: Any  # safetensors: dict of tensors; torch: plain data; npy: array; npz: dict of arrays
    assessment: Assessment
    metadata: dict[str, str] = field(default_factory=dict)  # of a safetensors file

    @property
    def facts(self) -> FileFacts:
        """The file's digest, size and format."""
        return next(iter(self.assessment.files.values()))


def open_file(
    path: Path,
    policy: FilePolicy,
    sha256: str | None = None,
    sandboxed: bool = True,
    sandbox: Any | None = None,
) -> LoadedFile:
    """Check and load one file on the CPU; a foreign file has to pass the sandbox first.

    A given `sha256`, of our manifest or an earlier check, must match. With `sandboxed=False` a
    foreign file, the user's own arrays, is examined in this process. `sandbox` reuses an open one.
    Raises SecurityError if it is refused, CheckpointError if it is missing or has changed.
    """
    try:
        check_name(path.name)  # before the file is read
    except FileRefusal as refusal:
        raise _refusal_error(path, str(refusal)) from None
    assessment = Assessment(str(path))
    with FileBytes.open_copy(path) as data:
        if sha256 is not None and data.sha256 != sha256:
            raise damage_error(path, data.size)
        trust = Trust.CHECKED
        if sha256 is None:
            trust = provenance.trust_by_digest(path, data, policy)
        examination = _examine(data, path, policy, trust, sandboxed, sandbox)
        if policy.allows_pickle(data.sha256):
            _unpickle_allowed(data, examination)
        assessment.files[path.name] = FileFacts(data.sha256, data.size, examination.format)
        assessment.refuse(examination.reasons)
        if sha256 is None:
            provenance.set_trust(assessment, path, policy)
        elif not assessment.refused:
            assessment.trust = Trust.CHECKED
        if assessment.refused:
            raise _refusal_error(path, describe_refusal(assessment, policy))
        if sandboxed or policy.level is SecurityLevel.strict:
            check_allowed(assessment, policy)
        return LoadedFile(examination.content, assessment, examination.metadata)


def damage_error(path: Path, size: int) -> CheckpointError:
    """Return the error for a file that differs from its digest."""
    return CheckpointError(f"{path}: damaged: its {size} bytes do not match the recorded sha256")


def _refusal_error(path: Path, why: str) -> SecurityError:
    return SecurityError(escape_control_chars(f"{path}: refused: {why}"))


def _examine(
    data: FileBytes,
    path: Path,
    policy: FilePolicy,
    trust: Trust,
    sandboxed: bool,
    sandbox: Any | None,
) -> Examination:
    off, foreign = policy.level is SecurityLevel.off, trust is Trust.UNTRUSTED
    if not foreign or off or not sandboxed:
        limits = FileLimits(expanded=sys.maxsize) if off else policy.limits
        options = {"check_archive": foreign, "deep": trust is not Trust.CHECKED}
        options = dict.fromkeys(options, False) if off else options
        return parsing.examine(data.data, data.path, path.name, limits, **options)
    opened = nullcontext(sandbox) if sandbox is not None else rooms.find("files", "sandbox")()
    with opened as process:
        examination = Examination(*process.examine(data, path.name, policy.limits))
    if not examination.refused:
        loaded = parsing.load_content(data.path, examination.format)
        examination.content, examination.metadata = loaded
    return examination


def _unpickle_allowed(data: FileBytes, examination: Examination) -> None:
    """Unpickle a file whose digest is in allow_pickle, if it cannot be loaded otherwise."""
    refusals = [r for r in examination.reasons if r.severity is Severity.REFUSAL]
    if len(refusals) != 1 or not refusals[0].code.startswith((NEEDS_PICKLE, "pickle.")):
        return
    examination.reasons.remove(refusals[0])
    try:
        examination.content = parsing.unpickle(data.path, examination.format)
    except Exception as error:  # of the file's own classes, too
        evidence = f"cannot be unpickled: {summarize_error(error)}"
        fix = "its classes must be importable under the names they were saved with"
        examination.reasons.append(Reason("pickle.failed", Severity.REFUSAL, "", evidence, fix))
        return
    evidence = f"unpickled, so it may run code: security.allow_pickle has {data.sha256[:12]}…"
    examination.reasons.append(Reason("pickle.allowed", Severity.WARNING, "", evidence))


def describe_refusal(assessment: Assessment, policy: FilePolicy) -> str:
    """Return the first refusal, with the override that would allow unpickling, if any."""
    first = assessment.refusals[0]
    sha256 = next(iter(assessment.files.values())).sha256
    if first.code == NEEDS_PICKLE and policy.level is not SecurityLevel.strict:
        return f"{first}; or, if you trust its author, add security.allow_pickle=[{sha256}]"
    return str(first)


def check_foreign_folder(folder: Path, policy: FilePolicy) -> Assessment | None:
    """Examine a foreign folder before loading from it; None for a folder of this run tree.

    Files loaded from it later must have the digests of the result. Raises SecurityError.
    """
    if policy.level is SecurityLevel.off or provenance.is_in_run_tree(folder, policy):
        return None
    assessment: Assessment = rooms.find("files", "folder", str(folder))(folder, policy)
    check_allowed(assessment, policy)
    return assessment


def check_weights_folder(folder: Path, policy: FilePolicy) -> None:
    """Raise SecurityError for a link, index or config in a foreign folder of weights.

    A malformed index is left to its reader.
    """
    for reason in () if policy.level is SecurityLevel.off else check_folder(folder, policy):
        if reason.code != "index.malformed":
            raise _refusal_error(folder, str(reason))


def read_tensors(path: Path, sha256: str) -> dict[str, Tensor]:
    """Load the tensors of a safetensors file on the CPU; tied names share one tensor.

    Raises SecurityError if it is refused, CheckpointError if it is missing or has changed.
    """
    loaded = open_file(path, STRICT_POLICY, sha256)
    tensors: dict[str, Tensor] = loaded.content
    _require_format(loaded, path, "safetensors")
    try:
        for alias, name in json.loads(loaded.metadata.get(TIED, "{}")).items():
            if alias in tensors:
                raise ValueError(f"{alias!r} is a tensor, but is also listed as an alias")
            tensors[alias] = tensors[name]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        line = printable(str(error) or type(error).__name__, 200)
        raise CheckpointError(f"{path}: not a safetensors file: {line}") from error
    return tensors


def read_state(path: Path, sha256: str) -> Any:
    """Load a file written by `torch.save` after `encode`, on the CPU.

    Raises SecurityError if it is more than plain data, CheckpointError if missing or changed.
    """
    loaded = open_file(path, STRICT_POLICY, sha256)
    _require_format(loaded, path, "torch_zip")
    return loaded.content


def read_arrays(path: Path, policy: FilePolicy) -> Any:
    """Load a user's `.npy` as an array or `.npz` as a dict. Raises SecurityError if refused."""
    loaded = open_file(path, policy, sandboxed=False)
    _require_format(loaded, path, "npy", "npz")
    return loaded.content


def _require_format(loaded: LoadedFile, path: Path, *kinds: str) -> None:
    kind = loaded.facts.format
    if kind not in kinds:
        raise SecurityError(f"{path}: refused: it is {kind} and should be {kinds[0]}")
