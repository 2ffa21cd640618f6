"""Outcomes of the processes of a run, and which of them caused the others.

A process reports its outcome to the agent that started it by a file; under torchrun or SLURM to the
other processes through the store. Exit codes alone do not tell cause from consequence.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from runner.errors import Interrupted, ProcessLost, RestartAll, RunnerError
from runner.masking import masked
from runner.record.console import LOG
from runner.record.storage import read_record, replace_text
from runner.record.text import dataclass_from_json, describe_error

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

FILE = "outcome-{}.json"
RANKS = "ranks"  # subfolder of the run's folder for the files of ranks above 0
CAUSES = ("error", "restart", "interrupted")  # kinds that end the other processes, by priority
REPORT_S = 2.0  # for the others to report after a loss
POLL_S = 0.05


def dump_json(value: Any) -> str:
    """Return a dataclass as JSON, for another process or machine."""
    return json.dumps(asdict(value))


def parse_json(kind: type[T], text: str | bytes) -> T:
    """Parse a dataclass that `dump_json` wrote."""
    return dataclass_from_json(kind, json.loads(text))


@dataclass
class RankOutcome:
    """End of one process, written as soon as it is known; `kind` tells cause from consequence.

    `lost` and `hung` are consequences: another process has ended, or does not answer.
    """

    rank: int
    kind: str = "done"  # running | done | error | lost | hung | restart | interrupted
    message: str = ""
    exit_code: int = 0
    choices: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, rank: int, error: BaseException) -> RankOutcome:
        """Return the outcome of a process that ends with `error`."""
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
        """Write it to the folder that the agent reads; errors are ignored."""
        with suppress(OSError):
            replace_text(folder / FILE.format(self.rank), dump_json(self))

    @classmethod
    def read(cls, folder: Path, rank: int) -> RankOutcome | None:
        """Read the outcome of `rank`; None if there is no valid one, as after SIGKILL."""
        try:
            return parse_json(cls, read_record(folder / FILE.format(rank)))
        except (OSError, ValueError, TypeError, AttributeError):
            return None


class SharedOutcomes:
    """Outcomes that processes exchange through the store, in runs without our agent."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        """`store` belongs to this attempt alone."""
        self._store, self.rank, self.size = store, rank, size

    def publish(self, outcome: RankOutcome) -> None:
        """Publish `outcome`; does nothing if the store has ended with its process."""
        outcome.message = masked(outcome.message)
        with suppress(RuntimeError):
            self._store.set(f"outcome/{outcome.rank}", dump_json(outcome))

    def find_error(self) -> ProcessLost | None:
        """Return the error that ended another process, or None if none is published yet."""
        try:
            _, cause = self._read(0.0)
        except RuntimeError:
            return None
        return None if cause is None or cause.kind != "error" else _lost_by(cause)

    def name_cause(self, error: ProcessLost) -> ProcessLost:
        """Return `error` with the lost process and the reason, if published within REPORT_S."""
        try:
            others, cause = self._read(REPORT_S)
        except RuntimeError:  # the store's process has ended
            return ProcessLost("process 0, which had the store of all, has ended", error.hung)
        if cause is not None:
            return _lost_by(cause, error.hung)
        silent = [rank for rank in range(self.size) if rank not in {*others, self.rank}]
        if len(silent) != 1 or error.hung:
            return error
        return ProcessLost(f"process {silent[0]} was killed, or has ended in the midst of it")

    def _read(self, wait_s: float) -> tuple[dict[int, RankOutcome], RankOutcome | None]:
        """Return the others' outcomes by rank, and the one that caused the rest, if any."""
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


@dataclass
class RankEnd:
    """End of a process, as known to its agent."""

    rank: int
    name: str
    code: int = 0  # negative for a signal
    killed: bool = False  # by the agent, because it hung
    outcome: RankOutcome | None = None  # None: killed before it began to train

    @property
    def kind(self) -> str:
        """The kind of its outcome, or "" without one."""
        return "" if self.outcome is None else self.outcome.kind


@dataclass
class MachineReport:
    """Ends of the processes of a machine."""

    ends: list[RankEnd]
    received: int = 0  # signal sent to its agent
    problem: str = ""  # that ended all of them


@dataclass
class RunVerdict:
    """Result of a run, or the reason to restart it; the same on each machine."""

    kind: str = "done"  # done | error | interrupted | restart | lost | unreachable
    message: str = ""
    exit_code: int = 1
    choices: dict[str, Any] = field(default_factory=dict)
    folder: str = ""  # rank 0's
    log: str = ""  # file in it with the traceback of an unexpected error


def judge(reports: Sequence[MachineReport], unreachable: str = "") -> RunVerdict:
    """Return the verdict on the machines' reports; `unreachable` names machines without one."""
    ends = sorted((end for report in reports for end in report.ends), key=lambda end: end.rank)
    by_kind = {end.kind: end for end in reversed(ends)}
    if (end := by_kind.get("error")) and end.outcome:
        message = end.outcome.message if end.rank == 0 else f"{end.name}: {end.outcome.message}"
        verdict = RunVerdict("error", message, end.outcome.exit_code)
        if verdict.exit_code == 1:
            verdict.log = f"{RANKS}/{end.rank}/{LOG}" if end.rank else LOG
        return verdict
    number = max(report.received for report in reports)
    if (end := by_kind.get("interrupted")) and end.outcome:
        number = number or end.outcome.exit_code - 128
    failed = unreachable or any(end.code for end in ends)
    if failed and number:
        return RunVerdict("interrupted", exit_code=128 + number)
    if unreachable:
        return RunVerdict("unreachable", unreachable)
    if (end := by_kind.get("restart")) and end.outcome:
        return RunVerdict("restart", f"{end.name}: {end.outcome.message}", 1, end.outcome.choices)
    if not failed:
        return RunVerdict(exit_code=0)
    problems = [report.problem for report in reports if report.problem]
    return RunVerdict("lost", problems[0] if problems else _cause(ends))


def _cause(ends: Sequence[RankEnd]) -> str:
    """Describe the lost process; one that ended on its own takes precedence over a hung one."""
    for end in ends:
        if end.code < 0 and not end.killed:
            memory = ", as the kernel does when memory runs out"
            more = memory if end.code == -signal.SIGKILL else ""
            return f"{end.name} was killed by {signal.Signals(-end.code).name}{more}"
    for end in ends:
        if end.code and not end.killed and end.kind in ("", "running"):
            return f"{end.name} ended with exit code {end.code}, in the midst of the run"
    for end in ends:
        if end.killed:
            return f"{end.name} did not answer within distributed.timeout_s, and was killed"
    return next(end.outcome.message for end in ends if end.outcome and end.outcome.exit_code)
