"""How a process of a distributed run ends: a file, since an exit code says too little."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runner.errors import Interrupted, ProcessLost, RestartAll, RunnerError
from runner.record.storage import read_record, replace_text
from runner.record.text import dataclass_from_json, describe_error

FILE = "outcome-{}.json"


@dataclass
class RankOutcome:
    """How one process ends, written as soon as it is known; `kind` tells cause from consequence.

    `lost` and `hung` are of the others: one of them has ended, or does not answer.
    """

    rank: int
    kind: str = "done"  # running | done | error | lost | hung | restart | interrupted
    message: str = ""
    exit_code: int = 0
    choices: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, rank: int, error: BaseException) -> RankOutcome:
        """That of a process which this error ends."""
        if isinstance(error, RestartAll):
            return cls(rank, "restart", str(error), 1, error.choices)
        if isinstance(error, Interrupted):
            return cls(rank, "interrupted", str(error), error.exit_code)
        if isinstance(error, RunnerError):
            kind = "error"
            if isinstance(error, ProcessLost):
                kind = "hung" if error.hung else "lost"
            return cls(rank, kind, str(error), error.exit_code)
        text, file, number = describe_error(error)
        return cls(rank, "error", f"{text} ({file}:{number})", 1)

    def write(self, folder: Path) -> None:
        """Write it into a folder that the process which started this one reads."""
        with suppress(OSError):
            replace_text(folder / FILE.format(self.rank), json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path, rank: int) -> RankOutcome | None:
        """That of a process; None where it left none, as one that was killed."""
        try:
            return dataclass_from_json(cls, json.loads(read_record(folder / FILE.format(rank))))
        except (OSError, ValueError, TypeError, AttributeError):
            return None
