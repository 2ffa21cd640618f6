"""What ended a run of several processes: the cause, and not what followed from it in others."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from runner.distributed.outcome import RankOutcome
from runner.distributed.world import RANKS
from runner.record.console import LOG


@dataclass
class RankEnd:
    """How a process has ended, as the agent that started it knows."""

    rank: int
    name: str
    code: int = 0  # negative for a signal
    killed: bool = False  # by the agent, as one that hung
    outcome: RankOutcome | None = None  # none of one that was killed before it began to train

    @property
    def kind(self) -> str:
        """That of its outcome; "" of one that left none."""
        return "" if self.outcome is None else self.outcome.kind


@dataclass
class MachineReport:
    """How the processes of a machine have ended."""

    ends: list[RankEnd]
    received: int = 0  # the signal that its agent was sent
    problem: str = ""  # that ended all of them


@dataclass
class RunVerdict:
    """How a run ends, or why its processes are started again; the same on each machine."""

    kind: str = "done"  # done | error | interrupted | restart | lost | unreachable
    message: str = ""
    exit_code: int = 1
    choices: dict[str, Any] = field(default_factory=dict)
    folder: str = ""  # rank 0's
    log: str = ""  # in it, with the traceback of an error that is no message to the user


def judge(reports: Sequence[MachineReport], unreachable: str = "") -> RunVerdict:
    """The verdict on what the machines report; `unreachable` names one that does not."""
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
    """Which process was lost, and how: one that was killed before one that had to be."""
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
