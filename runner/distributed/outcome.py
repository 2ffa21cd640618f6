"""How a process of a distributed run ends: told to the others, since an exit code says too little.

To the agent that started it by a file; under torchrun or SLURM to the other processes by the store.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from runner.errors import Interrupted, ProcessLost, RestartAll, RunnerError
from runner.masking import masked
from runner.record.storage import read_record, replace_text
from runner.record.text import dataclass_from_json, describe_error

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

FILE = "outcome-{}.json"
CAUSES = ("error", "restart", "interrupted")  # what has ended the others, too
REPORT_S = 2.0  # that the others have to report, once one is lost
POLL_S = 0.05


def dump_json(value: Any) -> str:
    """A dataclass, for another process or machine."""
    return json.dumps(asdict(value))


def parse_json(kind: type[T], text: str | bytes) -> T:
    """The one that `dump_json` wrote."""
    return dataclass_from_json(kind, json.loads(text))


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
            replace_text(folder / FILE.format(self.rank), dump_json(self))

    @classmethod
    def read(cls, folder: Path, rank: int) -> RankOutcome | None:
        """That of a process; None where it left none, as one that was killed."""
        try:
            return parse_json(cls, read_record(folder / FILE.format(rank)))
        except (OSError, ValueError, TypeError, AttributeError):
            return None


class SharedOutcomes:
    """What the processes of a run tell each other of their ends, where no agent of ours asks."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        """`store` is of this attempt alone."""
        self._store, self.rank, self.size = store, rank, size

    def publish(self, outcome: RankOutcome) -> None:
        """Tell the others; nothing where the store has ended with the process that had it."""
        outcome.message = masked(outcome.message)
        with suppress(RuntimeError):
            self._store.set(f"outcome/{outcome.rank}", dump_json(outcome))

    def find_error(self) -> ProcessLost | None:
        """That by which another process has ended, if one is told by now."""
        try:
            _, cause = self._read(0.0)
        except RuntimeError:
            return None
        return None if cause is None or cause.kind != "error" else _lost_by(cause)

    def name_cause(self, error: ProcessLost) -> ProcessLost:
        """The same error, saying which process was lost and why, as far as that is told in time."""
        try:
            others, cause = self._read(REPORT_S)
        except RuntimeError:  # who has the store has left no process to ask
            return ProcessLost("process 0, which had the store of all, has ended", error.hung)
        if cause is not None:
            return _lost_by(cause, error.hung)
        silent = [rank for rank in range(self.size) if rank not in {*others, self.rank}]
        if len(silent) != 1 or error.hung:
            return error
        return ProcessLost(f"process {silent[0]} was killed, or has ended in the midst of it")

    def _read(self, wait_s: float) -> tuple[dict[int, RankOutcome], RankOutcome | None]:
        """The others' outcomes by rank, and the one of them that is the cause."""
        until, outcomes = time.monotonic() + wait_s, dict[int, RankOutcome]()
        while True:
            for rank in {*range(self.size)} - {self.rank, *outcomes}:
                if self._store.check([key := f"outcome/{rank}"]):
                    outcomes[rank] = parse_json(RankOutcome, self._store.get(key))
            causes = [o for _, o in sorted(outcomes.items()) if o.kind in CAUSES]
            if causes or len(outcomes) == self.size - 1 or time.monotonic() > until:
                return outcomes, min(causes, key=lambda o: CAUSES.index(o.kind), default=None)
            time.sleep(POLL_S)


def _lost_by(cause: RankOutcome, hung: bool = False) -> ProcessLost:
    error = ProcessLost(f"process {cause.rank}: {cause.message}", hung)
    error.exit_code = cause.exit_code
    return error
