"""How a check says no: with a reason, at the first thing that is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runner.security.trust import Reason, Severity

SAVE_AGAIN = "save it again as safetensors, or with torch.save of tensors and plain containers"
DAMAGED = "get the file again, or compare its sha256 with that of its author"


class Refused(Exception):
    """Nothing of this file may be loaded."""

    def __init__(self, code: str, where: str, evidence: str, way_out: str = DAMAGED) -> None:
        self.reason = Reason(code, Severity.REFUSAL, shown(where), shown(evidence), way_out)
        super().__init__(str(self.reason))


def shown(text: object, limit: int = 200) -> str:
    """What a file says of itself, in one short line that no terminal mistakes for a command."""
    whole = str(text)
    plain = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in whole[:limit])
    return plain if len(whole) <= limit else f"{plain}…"


def repeated(names: Sequence[Any]) -> Any:
    """The first that is there twice, or None."""
    seen: set[Any] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
