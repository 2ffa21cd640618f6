"""One file's bytes, from the first to the last: what they are, what is wrong, what they hold.

Nothing here knows of paths, digests that were promised, or who may be trusted: it is the part of
the gate that can be run in a process of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from runner.security.config import SecurityLevel
from runner.security.gate import arrays, legacy, pickles, tensors_file, torch_file
from runner.security.gate.format import Buffer, identify
from runner.security.gate.load import loaded
from runner.security.gate.policy import Bounds, Policy, Whose
from runner.security.gate.refused import DAMAGED, Refused, shown
from runner.security.gate.values import array_reasons, value_reasons
from runner.security.gate.walk import check_types
from runner.security.gate.wanted import NeedsPickle
from runner.security.trust import Reason, Severity


@dataclass
class Examined:
    """What was found; `content` is None where it is refused, or was not asked for."""

    format: str = "unknown"
    reasons: list[Reason] = field(default_factory=list)
    content: Any = None
    metadata: dict[str, str] = field(default_factory=dict)  # of a safetensors file
    pickled: bool = False  # it may be unpickled, since the policy names its digest

    @property
    def refused(self) -> bool:
        """Whether nothing of it may be used."""
        return any(reason.severity is Severity.REFUSAL for reason in self.reasons)


CHECKS: dict[str, Callable[[Buffer, Bounds, Whose], None]] = {
    "safetensors": tensors_file.check,
    "torch_zip": torch_file.check,
    "torch_legacy": legacy.check,
    "pickle": pickles.check_raw,
    "npy": arrays.check_npy,
    "npz": arrays.check_npz,
}


def examine(
    data: Buffer,
    name: str,
    policy: Policy,
    deep: bool = True,
    whose: Whose = Whose.FOREIGN,
    place: str = "",
) -> Examined:
    """Check the bytes of the file called `name`, and load them where nothing speaks against it.

    Without `deep` its structure is checked, and nothing is loaded. Where its digest is known, as
    `whose` says, the checksums in torch's zip add nothing to that and are not taken; of one of our
    own no values are looked at either, and what the runner writes but nobody else should (sparse
    tensors) may be there. What only an unpickler reads is never read here, also where the policy
    allows it: then `pickled` is true, there is a warning, and no content. At `place`, if given, the
    same bytes can be opened as a file; what is loaded then is for a look alone. Raises nothing.
    """
    found = Examined()
    try:
        found.format = identify(data, name)
        try:
            CHECKS[found.format](data, policy.bounds, whose)
        except NeedsPickle as needs:
            _allow(data, policy, needs, found)
        else:
            if deep:
                _open(data, policy.bounds, whose, found, place)
    except Refused as refused:
        found.reasons.append(refused.reason)
    except Exception as error:  # a way to be malformed that no check has a name for
        found.reasons.append(malformed(error))
    if found.refused:
        found.content = None
    return found


def _open(data: Buffer, bounds: Bounds, whose: Whose, found: Examined, place: str) -> None:
    """Load what was checked, and look at what came of it."""
    content = loaded(data, found.format, place)
    tensors = check_types(content, bounds, whose)
    if whose is not Whose.OWN:
        found.reasons += value_reasons(tensors)
        if found.format in ("npy", "npz"):
            found.reasons += array_reasons(content)
    found.content = content
    if found.format == "safetensors":
        found.metadata = tensors_file.metadata(data, bounds)


def _allow(data: Buffer, policy: Policy, needs: NeedsPickle, found: Examined) -> None:
    """Note that this very file may run code, where that was said by its digest; else refuse it."""
    digest = hashlib.sha256(data).hexdigest()
    if policy.level is SecurityLevel.strict or digest not in policy.allow_pickle:
        raise needs.filled_in(digest, policy.level is not SecurityLevel.strict)
    found.pickled = True
    found.reasons.append(
        Reason(
            "pickle.allowed", Severity.WARNING, needs.reason.where,
            f"is unpickled and may run code, since security.allow_pickle has {digest[:12]}…: "
            + needs.reason.evidence,
        )
    )  # fmt: skip


def malformed(error: Exception) -> Reason:
    """The refusal for what a parser said."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    naming = [line for line in lines if "GLOBAL" in line]  # of torch's long message
    text = shown((naming or lines or [""])[0])
    return Reason(
        "file.malformed", Severity.REFUSAL, "",
        f"cannot be read: {text or type(error).__name__}", DAMAGED,
    )  # fmt: skip
