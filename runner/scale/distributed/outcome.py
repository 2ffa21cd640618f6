"""How the processes of a run end, and which end caused the others.

A process reports its end by a file to its agent, or by the store under torchrun and SLURM.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.core.errors import Interrupted, ProcessLost, RestartRequired, RunnerError
from runner.core.masking import mask_secrets
from runner.core.process_wait import MEMORY_HINT, describe_exit
from runner.core.record.console import LOG
from runner.core.record.storage import read_record, replace_text
from runner.core.record.text import dataclass_from_json, describe_error

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

OUTCOME_FILE = "outcome-{}.json"
RANKS_FOLDER = "ranks"  # subfolder for files of ranks other than 0
CAUSE_KINDS = ("error", "restart", "interrupted")  # outcomes that make other processes end
LOST_KINDS = ("lost", "hung")  # outcomes of processes that noticed the end of another one
REPORT_S = 2.0  # for others to report after one is lost
POLL_S = 0.05


@dataclass
class RankOutcome:
    """How one process ends, written as early as possible; `kind` separates cause and effect.

    `lost` and `hung` refer to other processes: one has ended, or does not answer.
    """

    rank: int
    kind: str = "done"  # running | done | error | lost | hung | restart | interrupted
    message: str = ""
    exit_code: int = 0
    choices: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_error(cls, rank: int, error: BaseException) -> RankOutcome:
        """Return the outcome of a process that this error ends."""
        if isinstance(error, RestartRequired):
            return cls(rank, "restart", str(error), 1, error.choices)
        if not isinstance(error, RunnerError):
            text, file, number = describe_error(error)
            return cls(rank, "error", f"{text} ({file}:{number})", 1)
        kind = "interrupted" if isinstance(error, Interrupted) else "error"
        if isinstance(error, ProcessLost):
            kind = "hung" if error.hung else "lost"
        return cls(rank, kind, str(error), error.exit_code)

    def as_json(self) -> str:
        """Return the outcome as text for another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> RankOutcome:
        """Parse the output of `as_json`."""
        return dataclass_from_json(cls, json.loads(text))

    def write(self, folder: Path) -> None:
        """Write the outcome to the agent's folder; an OSError is ignored."""
        with suppress(OSError):
            replace_text(folder / OUTCOME_FILE.format(self.rank), self.as_json())

    @classmethod
    def read(cls, folder: Path, rank: int) -> RankOutcome | None:
        """Read a process's outcome; None if it left none, e.g. because it was killed."""
        try:
            return cls.from_json(read_record(folder / OUTCOME_FILE.format(rank)))
        except (OSError, ValueError, TypeError, AttributeError):
            return None


class SharedOutcomes:
    """Exchanges outcomes between the processes of a run without an agent of ours."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        """`store` is used by this attempt only."""
        self._store, self.rank, self.size = store, rank, size

    def publish(self, outcome: RankOutcome) -> None:
        """Publish an outcome; ignored if the store has ended with its process."""
        outcome.message = mask_secrets(outcome.message)
        with suppress(RuntimeError):
            self._store.set(f"outcome/{outcome.rank}", outcome.as_json())

    def find_error(self) -> ProcessLost | None:
        """Return the error that ended another process, if already published; else None."""
        with suppress(RuntimeError):
            _, cause = self._read_outcomes(0.0)
            return _lost_error(cause) if cause is not None and cause.kind == "error" else None
        return None

    def name_cause(self, error: ProcessLost) -> ProcessLost:
        """Return the error with the lost process and its reason, if published in time."""
        try:
            others, cause = self._read_outcomes(REPORT_S)
        except RuntimeError:  # rank 0, which has the store, has ended
            return ProcessLost("process 0, which hosts the store, has ended", error.hung)
        if cause is not None:
            return _lost_error(cause, error.hung)
        silent = [rank for rank in range(self.size) if rank not in {*others, self.rank}]
        if len(silent) != 1 or error.hung:
            return error
        return ProcessLost(f"process {silent[0]} was killed or ended during the run")

    def _read_outcomes(self, wait_s: float) -> tuple[dict[int, RankOutcome], RankOutcome | None]:
        """Return the others' outcomes by rank, and the outcome that is the cause, if any."""
        deadline, outcomes = time.monotonic() + wait_s, dict[int, RankOutcome]()
        while True:
            for rank in {*range(self.size)} - {self.rank, *outcomes}:
                if self._store.check([key := f"outcome/{rank}"]):
                    outcomes[rank] = RankOutcome.from_json(self._store.get(key))
            causes = [o for _, o in sorted(outcomes.items()) if o.kind in CAUSE_KINDS]
            if causes or len(outcomes) == self.size - 1 or time.monotonic() > deadline:
                return outcomes, min(causes, key=lambda o: CAUSE_KINDS.index(o.kind), default=None)
            time.sleep(POLL_S)


def _lost_error(cause: RankOutcome, hung: bool = False) -> ProcessLost:
    error = ProcessLost(f"process {cause.rank}: {cause.message}", hung)
    error.exit_code = cause.exit_code
    return error


@dataclass
class RankEnd:
    """How a process ended, as seen by its agent."""

    rank: int
    name: str
    code: int = 0  # negative for a signal
    killed: bool = False  # by the agent, because it hung
    outcome: RankOutcome | None = None  # None if killed before training began

    @property
    def kind(self) -> str:
        """The kind of its outcome; "" if it left none."""
        return "" if self.outcome is None else self.outcome.kind

    @property
    def failed(self) -> bool:
        """Whether it failed; `os._exit(0)` of user code leaves it `running`."""
        return self.code != 0 or self.kind == "running"


@dataclass
class RunVerdict:
    """How a run ends, or why its processes are restarted."""

    kind: str = "done"  # done | error | interrupted | restart | lost
    message: str = ""
    exit_code: int = 1
    choices: dict[str, Any] = field(default_factory=dict)
    log: str = ""  # log with the traceback of an unexpected error, relative to the run's folder


def judge(ends: Sequence[RankEnd], received: int = 0, problem: str = "") -> RunVerdict:
    """Return what ended a run, by the ends of its processes in the order of their ranks.

    `received` is the signal that the agent received, `problem` what ended all processes.
    """
    by_kind = {end.kind: end for end in reversed(ends)}
    if (end := by_kind.get("error")) and end.outcome:
        message = end.outcome.message if end.rank == 0 else f"{end.name}: {end.outcome.message}"
        verdict = RunVerdict("error", message, end.outcome.exit_code)
        if verdict.exit_code == 1:
            verdict.log = f"{RANKS_FOLDER}/{end.rank}/{LOG}" if end.rank else LOG
        return verdict
    if (end := by_kind.get("interrupted")) and end.outcome:
        received = received or end.outcome.exit_code - 128
    failed = any(end.failed for end in ends)
    if failed and received:
        return RunVerdict("interrupted", exit_code=128 + received)
    if (end := by_kind.get("restart")) and end.outcome:
        return RunVerdict("restart", f"{end.name}: {end.outcome.message}", 1, end.outcome.choices)
    if not failed:
        return RunVerdict(exit_code=0)
    return RunVerdict("lost", problem or _describe_lost_process(ends))


def _describe_lost_process(ends: Sequence[RankEnd]) -> str:
    """Name the lost process: one that was killed from outside before one that hung."""
    for end in ends:
        if end.code < 0 and not end.killed:
            hint = MEMORY_HINT if end.code == -signal.SIGKILL else ""
            return f"{end.name} {describe_exit(end.code)}{hint}"
    for end in sorted(ends, key=lambda end: end.killed):
        if end.killed:
            return f"{end.name} was killed: no answer within distributed.timeout_s"
        if end.failed and end.kind in ("", "running"):
            return f"{end.name} {describe_exit(end.code)} during the run"
    return next(end.outcome.message for end in ends if end.outcome and end.outcome.exit_code)
